"""The evaluation page in a real browser: it is clicked through as a person would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from muralist.evaluate.page import write_report
from muralist.evaluate.report import METRICS
from tests.support.evaluations import HOSTILE, write_evaluation

pytestmark = pytest.mark.slow
HOUSES = "Houses with gardens on both sides of a road that leads to the sea"


class Visit:
    """An open page, and everything it asked for or complained about."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        # Without smooth scrolling, a click has scrolled when it returns.
        self.page = browser.new_context(reduced_motion="reduce", **context).new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def seen(self, selector: str) -> Any:
        return self.page.locator(selector).locator("visible=true")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def close(self) -> None:
        """End the visit: nothing went wrong, and nothing but files was asked for."""
        away = [url for url in self.requests if not url.startswith(("file:", "data:"))]
        self.page.context.close()
        assert self.troubles == [] and away == []


@pytest.fixture
def visit(browser: Any) -> Callable[..., Visit]:
    return lambda path, **context: Visit(browser, path, **context)


def width(looking: Visit) -> int:
    return looking.page.evaluate("document.documentElement.scrollWidth")


def order(looking: Visit, selector: str) -> list[str]:
    return [badge.inner_text() for badge in looking.seen(f"{selector} .badge").all()]


def with_categories(folder: Path, shift: float = 0.0) -> Path:
    """Write an evaluation with two scores of images and a column of categories."""
    write_evaluation(folder, 12, shift)
    report = json.loads((folder / "report.json").read_text())
    names = ["Cars" if number % 2 else HOUSES for number in range(12)]
    scores = {
        "clip_score": report["per_image"]["clip_score"],
        "pickscore": [21 - number + shift for number in range(12)],
    }
    columns = {"image": report["per_image"]["file"], **scores, "category": names}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "scores.parquet")
    means = {key: {"value": 20.0, "low": 19.0, "high": 21.0} for key in scores}
    report["categories"] = {"category": {name: {"count": 6, "scores": means} for name in ("Cars", HOUSES)}}
    report["scores"]["pickscore"] = {"value": 15.5 + shift, "low": 14.0, "high": 17.0}
    report["scores"]["kid"] = {"value": 4e-5, "low": -2.1e-4, "high": 3.1e-4}  # the widest texts
    report["images"]["unreadable"] = [f"{'0' * 120}.png: truncated"]
    report["generation"] = {"model": "Wan 2.1"}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_one_run(visit: Callable[..., Visit], tmp_path: Path) -> None:
    looking = visit(
        write_report([with_categories(tmp_path / "run")], tmp_path / "run" / "report"),
        viewport={"width": 1400, "height": 900},
    )
    page = looking.page
    assert page.title() == "Wan 2.1 on reference: evaluation", "the script in a prompt did not run"
    assert looking.text("h1") == "Wan 2.1 on reference" and width(looking) == 1400
    last_score = page.locator(".scores tr").last
    assert last_score.bounding_box()["y"] < 900, "all scores are above the fold"
    assert looking.seen("#images figure").count() == 12 and looking.seen("#speed .bars i").count() == 2
    assert HOSTILE in looking.text("#images figure:nth-child(2)")
    assert looking.seen(".warnings li").count() == 0
    page.click(".warnings summary")
    assert looking.text(".warnings li") == "FID of so few images says little."

    page.get_by_role("searchbox").fill("CAR red")
    assert looking.seen("#images figure").count() == 5 and looking.text("#found") == "5 of 12 images"
    page.click("#images figure:nth-child(4) button")
    assert looking.text("#viewer .prompt") == "A red car number 3"
    assert looking.text("#viewer .about") == "0003_seed45.png · 1 of 5"
    assert looking.text("#viewer .chips").split("\n") == ["CLIP score 25.3", "PickScore 18.0"]
    page.keyboard.press("ArrowRight")
    assert looking.text("#viewer .prompt") == "A red car number 5", "only images that match the filter"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert looking.text("#viewer .about").endswith("5 of 5")
    page.click("#viewer .next")
    assert looking.text("#viewer .prompt") == "A red car number 3"
    page.wait_for_function("document.querySelector('#viewer img').naturalWidth === 32")
    assert page.locator("#viewer a").get_attribute("href") == "../images/0003_seed45.png"
    page.keyboard.press("Escape")
    assert looking.seen("#viewer").count() == 0
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Enlarge 0003_seed45.png"
    page.get_by_role("searchbox").fill("")
    assert looking.seen("#images figure").count() == 12 and looking.text("#found") == ""

    page.click("[data-worst]")
    assert order(looking, "#images")[:2] == ["25.0", "25.1"], "the worst cases are one click away"
    assert page.evaluate("document.querySelector('#images').getBoundingClientRect().top") < 100
    page.select_option("#metric", "pickscore")
    assert order(looking, "#images")[:2] == ["10.0", "11.0"], "image 11 is the worst by the other score"
    page.click("[data-order=best]")
    assert order(looking, "#images")[0] == "21.0"
    page.click("#categories .pick >> text=Cars")
    assert looking.seen("#images figure").count() == 6 and looking.text("#found") == "6 of 12 images"
    assert order(looking, "#images")[0] == "20.0"
    page.select_option("#category", "")
    page.click("[data-order='']")
    page.focus("#images figure:nth-child(2) button")
    page.keyboard.press("Enter")
    assert looking.text("#viewer .prompt") == HOSTILE
    page.click("#viewer .close")
    page.click("nav a[href='#settings']")
    assert page.evaluate("document.querySelector('#settings').getBoundingClientRect().top") < 880
    page.set_viewport_size({"width": 400, "height": 800})
    assert width(looking) == 400, "nothing sticks out"
    inside = "[...document.querySelectorAll('.scores td')].every((cell) => cell.getBoundingClientRect().right <= 384)"
    assert page.evaluate(inside), "the table of scores fits"
    assert page.evaluate("[-0.001, -0.06, 0].map((number) => text('pickscore', number))") == ["0.0", "−0.1", "0.0"]
    assert page.locator("[data-worst]").bounding_box()["x"] < 100, "the worst cases stay one click away"
    looking.close()


def test_all_scores_fit(visit: Callable[..., Visit], tmp_path: Path) -> None:
    """Above the fold and beside each other, in a table of every score by every category."""
    folder = write_evaluation(tmp_path / "run", 12)
    report = json.loads((folder / "report.json").read_text())
    wide = {"kid": (4e-5, -2.1e-4, 3.1e-4), "fd_dinov2": (1412.3, 1380.1, 1440.9), "pickscore": (21.13, 20.96, 21.3)}
    wide |= {"imagereward": (-0.2, -0.34, -0.07), "hpsv3": (-0.2, -0.34, -0.07), "precision": (1.0, 0.977, 1.0)}
    columns: dict[str, list[Any]] = {"image": report["per_image"]["file"], "category": ["Cars", HOUSES] * 6}
    for key in METRICS:
        ends = wide.get(key, (25.2, 24.1, 26.3))
        report["scores"][key] = dict(zip(("value", "low", "high"), ends, strict=True))
        if METRICS[key].encoder == "score" or key == "clip_score":
            columns[key] = [0.1 * number for number in range(12)]
    means = {key: report["scores"][key] for key in columns if key in METRICS}
    report["categories"] = {"category": {name: {"count": 6, "scores": means} for name in ("Cars", HOUSES)}}
    (folder / "report.json").write_text(json.dumps(report))
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "scores.parquet")
    looking = visit(write_report([folder], folder / "report"), viewport={"width": 1400, "height": 900})
    last = looking.page.locator(".scores tr").last.bounding_box()
    assert looking.seen(".scores td.value").count() == len(METRICS) and last["y"] + last["height"] < 900
    right = "[...document.querySelectorAll('{}')].map((cell) => cell.getBoundingClientRect().right)"
    assert len(means) == 10 and max(looking.page.evaluate(right.format(".heat td"))) <= 1262, "no column is cut off"
    looking.page.set_viewport_size({"width": 400, "height": 800})
    assert width(looking) == 400 and max(looking.page.evaluate(right.format(".scores td"))) <= 384
    heights = "[...document.querySelectorAll('.scores tbody th[scope=row]')].map((cell) => cell.clientHeight)"
    assert max(looking.page.evaluate(heights)) < 50, "no name takes more lines than a signed interval"
    looking.close()


def test_several_runs_are_compared_in_the_dark_and_on_a_phone(visit: Callable[..., Visit], tmp_path: Path) -> None:
    runs = [with_categories(tmp_path / name, shift) for name, shift in (("old", 0.0), ("<i>new", -3.0))]
    path = write_report(runs, tmp_path / "report")
    looking = visit(path, viewport={"width": 400, "height": 800}, color_scheme="dark")
    page = looking.page
    assert width(looking) == 400, "nothing sticks out"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    cells = page.locator(".scores tr:has-text('FID') td[data-run]")
    boxes = [cell.bounding_box() for cell in cells.all()]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"], "a line for each run, not a column"
    assert all(box["x"] + box["width"] <= 384 for box in boxes)
    assert "17.0" in cells.nth(1).inner_text() and "★" in cells.nth(1).inner_text()
    assert page.evaluate("getComputedStyle(document.querySelector('.scores td'), '::before').content") == '"old"'
    assert looking.seen(".scores .whisker .mean").count() == 5 * 2
    ends = "[...document.querySelectorAll('.scores .interval')].map((text) => text.getBoundingClientRect().right)"
    assert max(page.evaluate(ends)) <= 384, "no interval is cut off"
    assert looking.seen("#comparison .verdict").all_inner_texts() == ["worse", "worse"]
    assert looking.seen("#categories .heat").count() == 2, "a table for each score"
    ends = [cell.bounding_box() for cell in page.locator(".heat").first.locator("td").all()]
    assert all(box["x"] + box["width"] <= 384 for box in ends), "long names leave room for both runs"
    dark = page.evaluate("getComputedStyle(document.querySelector('.heat td')).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.querySelector('.heat td')).backgroundColor") != dark

    page.get_by_role("searchbox").fill("house 0004_")
    assert looking.seen(".row").count() == 1
    looking.seen(".row figure button").nth(0).click()
    assert looking.text("#viewer .about") == "old · 0004_seed46.png · 1 of 2"
    page.keyboard.press("ArrowRight")
    assert looking.text("#viewer .about") == "<i>new · 0004_seed46.png · 2 of 2"
    assert "CLIP score 22.4" in looking.text("#viewer .chips")
    image = page.locator("#viewer img").bounding_box()
    assert image["x"] >= 0 and image["x"] + image["width"] <= 400, "the enlarged image fits the phone"
    page.keyboard.press("Escape")
    assert looking.seen(".grid figure").count() == 0
    page.click("#images details:last-child summary")
    assert looking.seen(".grid figure").count() == 1
    page.set_viewport_size({"width": 1400, "height": 900})
    boxes = [cell.bounding_box() for cell in cells.all()]
    page.set_viewport_size({"width": 700, "height": 900})
    assert width(looking) == 700, "wide tables scroll by themselves"
    page.set_viewport_size({"width": 1400, "height": 900})
    assert width(looking) == 1400 and boxes[0]["y"] == boxes[1]["y"], "side by side where there is room"
    looking.close()
