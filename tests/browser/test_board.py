"""The board in a real browser, over runs that were really trained."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muralist.generate.output_dir import note_plan
from tests.support.boards import PROMPTS, Board, line, running_board, write_generation, write_run
from tests.support.evaluations import write_evaluation
from tests.support.runs import train

pytestmark = pytest.mark.slow
_READ = "(metric) => document.querySelector(`[data-metric='${metric}'] .chart`)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, photo_folder: Path) -> Path:
    """One trained run, a second one like it, one that only looks like one, images and an evaluation."""
    root = tmp_path_factory.mktemp("board") / "results"
    words = "--enable_condition --init_from none --max_steps 12 --ckpt_every 4 --samples_per_gpu 2 --run_name trained"
    train(*words.split(), "--data_path", photo_folder, "--results_dir", root)
    shutil.copytree(root / "trained", root / "copied")
    config = root / "copied" / "config.yaml"
    config.write_text(re.sub("learning_rate: .*", "learning_rate: 8.0e-05", config.read_text()))
    write_run(root / "long", steps=5000, checkpoints=2)
    write_generation(root / "scenes", rows=700, failed=(5, 6))
    note_plan(root / "scenes" / "ledger.jsonl", 1000)
    write_evaluation(root / "scenes" / "evaluation")
    (root / "scenes" / "evaluation" / "index.html").write_text("<p>The report")
    return root


@pytest.fixture(scope="module")
def board(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with running_board(root, tmp_path_factory.mktemp("cache")) as running:
        yield running


class Visit:
    """An open page, and everything it asked for or complained about."""

    def __init__(self, browser: Any, board: Board, words: str, **context: Any) -> None:
        self.page = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context}).new_page()
        self.board = board
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{board.address}/#{words}")
        self.page.wait_for_selector("#live.on", state="attached")

    def names(self) -> list[str]:
        return self.page.locator("#list .name").all_text_contents()  # drawn yet or not

    def looked_at(self) -> str:
        return self.page.locator("#list [aria-selected=true] .name").text_content()

    def traces(self, metric: str) -> list[dict[str, Any]]:
        """The lines of a chart that have a name, as plotly holds them."""
        self.page.wait_for_function(f"metric => ({_READ})(metric)?.data?.length", arg=metric)
        keep = "data.filter(one => one.name).map(({name, x, y, line}) => ({name, x, y, color: line.color}))"
        return self.page.evaluate(f"metric => {{ const data = ({_READ})(metric).data; return {keep}; }}", metric)

    def layout(self, metric: str, name: str) -> Any:
        return self.page.evaluate(f"([metric, name]) => ({_READ})(metric)._fullLayout.yaxis[name]", [metric, name])

    def close(self) -> None:
        """End the visit: nothing went wrong, and nothing was asked of anybody else."""
        away = [url for url in self.requests if not url.startswith((self.board.address, "data:"))]
        self.page.context.close()
        assert self.troubles == [] and away == []


@pytest.fixture
def visit(browser: Any, board: Board) -> Callable[..., Visit]:
    return lambda words="", **context: Visit(browser, board, words, **context)


def test_curves_are_drawn_compared_and_zoomed(visit: Callable[..., Visit]) -> None:
    looking = visit("tab=curves&run=trained&smooth=0")
    page = looking.page
    assert page.title() == "results · muralist board"
    (loss,) = looking.traces("train/loss")
    assert loss["x"] == list(range(1, 13)) and loss["name"] == "trained" and all(0 < y < 10 for y in loss["y"])
    metrics = page.locator("[data-metric]").evaluate_all("all => all.map(one => one.dataset.metric)")
    assert metrics[0] == "train/loss"
    assert {"train/learning_rate", "train/grad_norm", "train/samples_per_second", "train/mfu"} < set(metrics)
    assert "train/data_wait_fraction" in metrics and "step 12 of" in page.locator(".chip").inner_text()

    page.keyboard.press("x")
    page.wait_for_function(f"() => ({_READ})('train/loss').data.at(-1).x[0] === 4")
    page.get_by_role("radio", name="steps").click()
    assert looking.layout("train/loss", "type") == "linear"
    page.keyboard.press("l")
    page.wait_for_function(f"() => ({_READ})('train/loss')._fullLayout.yaxis.type === 'log'")
    page.get_by_role("checkbox", name="Compare trained").click()
    page.get_by_role("checkbox", name="Compare long").click()
    page.wait_for_function(f"() => ({_READ})('train/loss').data.filter(one => one.name).length === 2")
    first, second = looking.traces("train/loss")
    assert (first["name"], second["name"]) == ("trained", "long") and first["color"] != second["color"]
    assert len(second["x"]) == 1250 and second["x"][-1] == 5000, "5,000 steps in buckets of four"

    box = page.locator("[data-metric='train/loss'] .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 82, steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => ({_READ})('train/grad_norm')._fullLayout.xaxis.range[0] > 2000")
    page.wait_for_function(f"() => ({_READ})('train/loss').data.at(-1).x.length < 600")
    (near,) = [trace for trace in looking.traces("train/loss") if trace["name"] == "long"]
    assert near["x"][1] - near["x"][0] == 1, "every step is there, once one looks closely"
    page.keyboard.press("r")
    page.wait_for_function(f"() => ({_READ})('train/loss').data.at(-1).x.length === 1250")
    assert "tick=trained&tick=long" in page.url and "log=1" in page.url
    looking.close()


def test_only_noisy_curves_are_smoothed(visit: Callable[..., Visit], root: Path) -> None:
    rows = [json.loads(text) for text in (root / "trained" / "metrics.jsonl").read_text().splitlines()]
    looking = visit("tab=curves&run=trained")
    for metric, is_exact in (("train/learning_rate", True), ("train/loss", False)):
        (drawn,) = looking.traces(metric)
        assert (drawn["y"] == pytest.approx([row[metric] for row in rows], rel=1e-4)) == is_exact, metric
    looking.close()


def test_new_rows_appear_automatically(visit: Callable[..., Visit], root: Path) -> None:
    looking = visit("tab=curves&run=copied&smooth=0")
    before = looking.traces("train/loss")[0]["x"]
    assert before[-1] == 12
    with (root / "copied" / "metrics.jsonl").open("a") as file:
        file.write(line(13, 0.0625))
    looking.page.wait_for_function(f"() => ({_READ})('train/loss').data.at(-1).x.at(-1) === 13", timeout=8000)
    assert looking.traces("train/loss")[0]["y"][-1] == 0.0625
    assert "loss 0.0625" in looking.page.locator("#list [aria-selected=true] .facts").inner_text()
    news = [url for url in looking.requests if "have=" in url]
    assert news and all(".12" in url or ".13" in url for url in news), "only what came after was asked for"
    looking.close()


def test_the_list_is_controlled_by_keys(visit: Callable[..., Visit]) -> None:
    looking = visit("tab=curves")
    page, names = looking.page, looking.names()
    assert sorted(names) == ["copied", "long", "trained"] and looking.looked_at() == names[0]
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    assert looking.looked_at() == names[2]
    page.keyboard.press("k")
    assert looking.looked_at() == names[1]
    page.keyboard.press("Space")
    assert page.locator("#list [aria-checked=true]").count() == 1
    page.keyboard.press("/")
    page.keyboard.type("trai")
    assert looking.names() == ["trained"]
    page.keyboard.press("Escape")
    assert looking.names() == names
    for key, tab in (
        ("2", "Samples"),
        ("3", "Settings"),
        ("4", "Log"),
        ("5", "Generation"),
        ("6", "Evaluation"),
        ("1", "Curves"),
    ):
        page.keyboard.press(key)
        assert page.locator("[role=tab][aria-selected=true]").inner_text() == tab
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    page.keyboard.press("/")
    page.keyboard.press("Tab")
    outline = "one => getComputedStyle(one).outlineStyle"
    assert page.locator("#list [aria-selected=true]").evaluate(outline) == "solid", "one sees that keys go to the list"
    looking.close()


def test_samples_by_slider_side_by_side_and_enlarged(visit: Callable[..., Visit]) -> None:
    looking = visit("tab=samples&run=trained")
    page = looking.page
    page.wait_for_selector(".tile img")
    assert page.locator(".tile").count() == 2 and page.locator(".track output").inner_text() == "step 12 · 3 of 3"
    newest = page.locator(".tile img").first.get_attribute("src")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelector('.track output').textContent === 'step 8 · 2 of 3'")
    assert page.locator(".tile img").first.get_attribute("src") == newest.replace("step_0000012", "step_0000008")
    page.get_by_label("Checkpoint", exact=True).fill("0")
    page.wait_for_function("() => document.querySelector('.track output').textContent === 'step 4 · 1 of 3'")

    page.select_option("select", "copied")
    page.wait_for_function("() => document.querySelectorAll('.tile img').length === 4")
    assert page.locator(".sides").inner_text() == "left: trained, step 4 · right: copied, step 4"
    page.locator(".tile button").first.click()
    assert page.locator("#viewer figure").count() == 2
    page.wait_for_function("() => document.querySelector('#viewer img').naturalWidth === 16")
    prompt = page.locator("#viewer .prompt").inner_text()
    assert prompt == page.locator(".tile figcaption").first.inner_text()
    page.wait_for_function("() => document.querySelector('#viewer .facts').textContent.includes('seed')")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('#viewer .facts').textContent.startsWith('step 8')")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("before => document.querySelector('#viewer .prompt').textContent !== before", arg=prompt)
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()
    page.wait_for_function("() => document.querySelector('.track output').textContent === 'step 8 · 2 of 3'")

    page.keyboard.press("w")
    page.wait_for_selector(".sample-grid img")
    assert page.locator(".sample-grid button").count() == 6 and page.locator(".sample-grid img").count() == 12
    assert page.locator(".sample-grid > span").all_inner_texts() == ["4", "8", "12"]
    assert page.locator(".sides").inner_text() == "above: trained · below: copied"
    page.locator(".sample-grid button").nth(2).click()
    page.wait_for_function("() => document.querySelector('#viewer .facts').textContent.startsWith('step 12')")
    page.keyboard.press("Escape")
    page.keyboard.press("w")
    page.select_option("select", "")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.goto(f"{looking.board.address}/#tab=samples&run=long")
    page.reload()
    page.wait_for_selector(".tile img")
    assert page.locator(".tile figcaption").all_inner_texts() == PROMPTS and "owned" not in page.title()
    looking.close()


def test_runs_side_by_side_pair_equal_prompts(browser: Any, tmp_path: Path) -> None:
    root = tmp_path / "results"
    for name in ("first", "second", "other"):
        write_run(root / name)
    for name in ("first", "second"):
        for text in (root / name / "samples").glob("*/*_prompt*.txt"):
            text.write_text("unconditional")
    images = ".tile img:nth-child({})"
    with running_board(root, tmp_path / "cache") as board:
        looking = Visit(browser, board, "tab=samples&run=first&beside=second&tick=never")
        page = looking.page
        page.wait_for_function("() => document.querySelectorAll('.tile img').length === 8")
        left, right = (
            page.locator(images.format(side)).evaluate_all("all => all.map(one => one.src)") for side in (1, 2)
        )
        assert len(set(right)) == 4 and [address.replace("second", "first") for address in right] == left
        page.select_option("select", "other")
        page.wait_for_function("() => document.querySelector('.sides').textContent.includes('none of these prompts')")
        assert "beside=other" in page.url and "never" not in page.url
        shutil.rmtree(root / "other")
        page.wait_for_function("() => document.querySelectorAll('.tile img').length === 4", timeout=8000)
        assert "beside" not in page.url
        page.goto("about:blank")
        page.goto(f"{board.address}/#tab=samples&run=first&beside=other")
        page.wait_for_selector(".tile img")
        looking.close()


def test_images_of_a_generation_load_when_they_are_visible(visit: Callable[..., Visit]) -> None:
    looking = visit("tab=generation")
    page = looking.page
    page.wait_for_selector("#view .images img")
    assert page.locator(".totals b").all_inner_texts()[:2] == ["698", "2"]
    assert page.locator(".gpu .facts").all_inner_texts()[0].startswith("349 images · 1 failed")
    assert page.locator(".gpu.sum .facts").inner_text() == "700 of 1,000 · 2 failed"
    assert page.locator(".gpu.sum .bar").get_attribute("aria-valuemax") == "1000"
    assert page.locator(".reasons li").inner_text() == "2 × out of memory"
    assert page.locator("#view .images figure").count() < 100, "only those near the screen exist"
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#view .images img')].some(one => one.alt === 'image 699')"
    )
    assert page.locator("#view .images figure").count() < 100
    page.locator("#view .images button").last.click()
    page.wait_for_function("() => document.querySelector('#viewer .facts').textContent.includes('698 of 698')")
    assert page.locator("#viewer .prompt").inner_text() == "image 699"
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelector('#viewer .prompt').textContent === 'image 698'")
    page.keyboard.press("Escape")
    page.get_by_text("Settings", exact=True).last.click()
    assert page.locator("details .settings tr").inner_text().split() == ["steps", "20"]
    page.keyboard.press("6")
    assert page.locator(".scores tbody td b").first.inner_text() == "20"
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="open the report").click()
    assert opened.value.locator("p").inner_text() == "The report"
    looking.close()


@pytest.mark.parametrize("width", [1400, 400])
def test_settings_differences_and_log(visit: Callable[..., Visit], root: Path, width: int) -> None:
    looking = visit("tab=settings&run=copied", viewport={"width": width, "height": 800})
    page = looking.page
    value = page.locator("tr", has=page.get_by_role("rowheader", name="learning_rate", exact=True)).locator("td")
    assert value.all_inner_texts() == ["8e-5"], "as people write it"
    assert page.locator(".sections h2").all_inner_texts()[:2] == ["Data", "Model"]
    assert page.locator("label", has_text="compare with").locator("option").all_inner_texts()[0] == "choose a run"
    page.get_by_label("Compare with").select_option("trained")
    page.wait_for_selector(".sections thead")
    assert page.locator(".sections tr").all_inner_texts() == ["\tcopied\ttrained", "optim.learning_rate\t8e-5\t0.001"]
    page.get_by_label("Compare with").select_option("long")
    page.wait_for_function("() => document.querySelectorAll('.sections .differs').length > 1")
    assert page.get_by_role("rowheader", name="data.path").count() == 1
    assert page.get_by_role("rowheader", name="data.caption").count() == 0, "null, as if it were not there"
    page.get_by_label("Compare with").select_option("trained")
    page.get_by_role("button", name="differences only").click()
    page.wait_for_function("() => document.querySelectorAll('.sections tbody tr').length > 50")
    assert page.locator(".sections .differs").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == width

    page.get_by_role("tab", name="Log").click()
    page.wait_for_function("() => document.querySelector('.log').innerText.includes('Finished at step 12.')")
    log = page.locator(".log")
    assert log.evaluate("one => one.scrollTop + one.clientHeight > one.scrollHeight - 2"), "the end is visible"
    with (root / "copied" / "logs" / "train.log").open("a") as file:
        file.write("<b>not HTML</b> `code`\n")
    page.wait_for_function("() => document.querySelector('.log').innerText.endsWith('<b>not HTML</b> `code`')")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    looking.close()


def test_ticks_are_written_as_people_write_them(visit: Callable[..., Visit]) -> None:
    looking = visit("tab=curves&run=long")
    looking.traces("train/data_wait_fraction")
    ticks = "[data-metric='{}'] .ytick text"
    written = looking.page.locator(ticks.format("train/learning_rate")).all_text_contents()
    assert {"8e-4", "1e-3"} <= set(written) <= {"8e-4", "9e-4", "1e-3", "1.1e-3", "1.2e-3"}
    looking.page.keyboard.press("l")
    looking.page.wait_for_function(f"() => ({_READ})('train/loss')._fullLayout.yaxis.type === 'log'")
    assert looking.page.locator(ticks.format("train/loss")).all_text_contents() == ["0.001", "0.01", "0.1", "1"]
    assert "0.5%" in looking.page.locator(ticks.format("train/data_wait_fraction")).all_text_contents()
    looking.close()


@pytest.mark.parametrize("width", [1400, 400])
def test_a_grid_of_any_number_of_prompts_and_checkpoints(browser: Any, tmp_path: Path, width: int) -> None:
    samples = write_run(tmp_path / "results" / "run", checkpoints=60) / "samples"
    for text in list(samples.glob("*/gpu_0_prompt.txt")):
        for number in range(5, 31):
            text.with_name(f"gpu_0_prompt_{number}.txt").write_text(f"prompt {number}")
            (text.parent / f"gpu_0_sample_{number}.png").hardlink_to(text.parent / "gpu_0_sample.png")
    with running_board(tmp_path / "results", tmp_path / "cache") as board:
        looking = Visit(browser, board, "tab=samples&whole=1", viewport={"width": width, "height": 800})
        page = looking.page
        last = "() => document.querySelector('[aria-label=\"Enlarge: {}\"] img')?.src.includes('step_{:07d}')"
        page.wait_for_selector(".sample-grid img")
        assert page.locator(".sample-grid > p").all_inner_texts()[:2] == PROMPTS[:2]
        assert page.locator(".sample-grid > p").count() == 30 and page.locator(".sample-grid > span").count() == 60
        box = page.locator(".sample-grid > span").last.bounding_box()
        assert box["x"] + box["width"] <= width, "the newest checkpoint is visible"
        page.locator(".sample-grid").evaluate("one => one.scrollTo(0, one.scrollHeight)")
        page.wait_for_function(last.format("prompt 30", 10))
        assert page.locator(".sample-grid button").count() < 250, "of 1,800"
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.keyboard.press("w")
        page.wait_for_function("() => document.querySelectorAll('.tile img').length === 30")
        looking.close()


def test_a_phone_in_the_dark(visit: Callable[..., Visit]) -> None:
    looking = visit(
        "tab=curves&run=trained", viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True
    )
    page = looking.page
    for tab in ("Samples", "Settings", "Log", "Generation", "Evaluation", "Curves"):
        page.get_by_role("tab", name=tab).tap()
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, f"nothing sticks out of {tab}"
    for width in (800, 1000, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == width, "nor at widths in between"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert not page.locator("#list").is_visible()
    page.locator("#chooser").tap()
    page.locator("#list li", has_text="long").tap()
    assert not page.locator("#list").is_visible() and page.locator("#chooser span").inner_text() == "long"
    page.wait_for_function(f"() => ({_READ})('train/loss').data.at(-1).name === 'long'")
    dark = page.evaluate("document.querySelector('.xtick text').style.fill")
    page.emulate_media(color_scheme="light")
    page.wait_for_function("before => document.querySelector('.xtick text').style.fill !== before", arg=dark)
    looking.close()


def test_an_empty_folder_says_what_would_appear(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with running_board(tmp_path / "results", tmp_path / "cache") as board:
        looking = Visit(browser, board, "")
        assert "What muralist train writes into this folder appears here." in looking.page.locator("#list").inner_text()
        assert looking.page.locator("#list code").inner_text() == "muralist train"
        assert looking.page.locator(".note").inner_text().startswith("No runs yet.")
        write_run(tmp_path / "results" / "new")
        looking.page.wait_for_selector("#list .name", timeout=8000)
        assert looking.looked_at() == "new"
        (tmp_path / "results" / "new" / "heartbeats").mkdir()
        record = {"left": "failed", "message": "Out of memory: lower `--batch_size`."}
        (tmp_path / "results" / "new" / "heartbeats" / "rank_0.json").write_text(json.dumps(record))
        looking.page.wait_for_selector(".chip .message", timeout=8000)
        assert looking.page.locator(".chip code").inner_text() == "--batch_size"
        assert "`" not in looking.page.locator("body").inner_text()
        looking.close()
