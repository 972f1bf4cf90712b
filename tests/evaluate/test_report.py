from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.evaluate import page
from muralist.evaluate.page import _evenly_spaced, write_report
from muralist.evaluate.report import MetricScore, find_best, format_score, read_runs, score_decimals
from tests.support.evaluations import HOSTILE, content, write_evaluation


class Page(HTMLParser):
    """What a browser would make of the page: its elements, and the texts of each section."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.scripts: list[str] = []
        self._section, self._tag = "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._tag = tag
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts[-1] += data
        self.texts[self._section] = f"{self.texts.get(self._section, '')}{data}\n"

    def all(self, tag: str, name: str) -> list[str]:
        return [found[name] or "" for kind, found in self.elements if kind == tag and name in found]

    def section(self, name: str) -> str:
        return " ".join(self.texts.get(name, "").split())


def test_the_page_shows_all_results(tmp_path: Path) -> None:
    made = {"model": "Wan 2.1", "num_inference_steps": 20, "guidance_scale": 7.5}
    folder = write_evaluation(tmp_path / "run", generation=made)
    path = write_report([folder], tmp_path / "run" / "report")
    assert path == tmp_path / "run" / "report" / "index.html"
    page = Page(path)
    sections = ["scores", "images", "distributions", "failures", "speed", "settings"]
    assert page.all("section", "id") == sections
    head = page.section("")
    assert "Wan 2.1 on reference: evaluation" in head, "the title is the model and the data"
    facts = "12 images · 20 steps · guidance 7.5 · against data/reference (5,000 images) · measured in 1 min 01 s"
    assert facts in head
    scores = page.section("scores")
    assert "Distance from the reference FID ↓ lower is better 20.0 19.5 – 20.5" in scores
    assert "Fidelity and diversity Precision ↑ higher is better 0.50 0.40 – 0.60" in scores
    assert "1 warning FID of so few images says little." in scores
    assert "Not measured: CMMD, Recall CMMD, Recall : no weights were given" in scores
    assert (
        "FID Distance from the reference in Inception's features; 0: the same. Fewer images, larger. few images"
        in scores
    )
    assert "all 12 images" in page.section("images") and "A red car number 3" in page.section("images")
    assert "1 prompt has no image. " in page.section("failures")
    assert "lost 7 <b>Nothing</b> out of memory 1" in page.section("failures")
    assert "1 image could not be read: half.png." in page.section("failures")
    assert page.section("speed") == "Speed 2.75 images per second on 2 GPUs GPU 0 1.5 GPU 1 1.25"
    settings = page.section("settings")
    assert "sizes.batch 8" in settings and "version of torch 2.13.0" in settings and "time taken 1 min 01 s" in settings


def test_each_thumbnail_is_embedded_once_with_a_link_to_the_original(tmp_path: Path) -> None:
    page = Page(write_report([write_evaluation(tmp_path / "run", 30)], tmp_path / "run" / "report"))
    embedded = json.loads(page.scripts[0])
    assert len(embedded) == len(set(embedded)) == 30
    assert all(thumbnail.startswith("data:image/webp;base64,") for thumbnail in embedded)
    shown = [int(number) for number in page.all("img", "data-image")]
    assert len(shown) == 16 + 30 and set(shown) == set(range(30)), "some beside the scores, and all"
    assert page.all("img", "data-about")[-1] == "0029_seed71.png"
    assert page.all("img", "data-original")[-1] == "../images/0029_seed71.png"
    assert json.loads(page.all("figure", "data-scores")[-1]) == {"clip_score": 27.9}
    assert not page.all("img", "src"), "nothing is loaded from elsewhere"


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    name = '<img src=x onerror=alert(1)>"&'
    folder = write_evaluation(tmp_path / name, warnings=["</p><script>1</script>"], settings={name: name})
    report_file = folder / "report.json"
    changed = json.loads(report_file.read_text())
    changed["per_image"]["file"][2] = '"><svg onload=alert(1)>.png'
    changed["per_image"]["prompt"][4] = "half a character: \ud83d"
    changed["speed"]["</script>"] = {"images": 1, "images_per_second": 1.0}
    Image.new("RGB", (8, 8)).save(folder / "images" / '"><svg onload=alert(1)>.png')
    report_file.write_text(json.dumps(changed))
    page = Page(write_report([folder], tmp_path / "report"))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3 and tags.count("svg") == 1 and "b" in tags
    assert not [found for _, found in page.elements if {"onerror", "onload"} & set(found)]
    assert HOSTILE in page.section("images") and "half a character: ?" in page.section("images")
    assert "</p><script>1</script>" in page.section("scores") and name in page.section("settings")
    assert "GPU </script>" in page.section("speed")
    originals = page.all("img", "data-original")
    assert any(address.endswith("/images/%22%3E%3Csvg%20onload%3Dalert%281%29%3E.png") for address in originals)


def test_the_page_size_is_bounded(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", 3)
    write_noise(folder / "images" / "noise.png", 448)
    per_image = content(folder, 30_000)["per_image"] | {"file": ["noise.png"] * 30_000, "clip_score": None}
    write_changed(folder, per_image=per_image)
    path = write_report([folder], tmp_path / "report")
    assert 4_000_000 < path.stat().st_size < 10_000_000
    text = path.read_text()
    assert "200 of 30,000 images, evenly chosen" in text
    grid = text[text.index('<div class="grid"') :]
    numbers = [int(number) for number in re.findall(r'<p class="prompt">A \w+ \w+(?: number)? (\d+)</p>', grid)]
    assert [number // 150 for number in numbers] == list(range(200)), "one of each equal part"
    classes = Counter(number % 10 for number in numbers)
    assert len(classes) == 10 and max(classes.values()) <= 30, "in a table of classes in turn, all are shown"


def write_noise(path: Path, side: int) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return path


def test_thumbnails_share_the_byte_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page._MAX_BYTES * 4 / 3 < 9_500_000
    noise = write_noise(tmp_path / "noise.png", 448)  # nothing is harder to make small
    monkeypatch.setattr(page, "_MAX_BYTES", 20_000)
    sizes = []
    for count in (1, 3):
        found = [thumbnail or "" for thumbnail in page.encode_thumbnails([noise] * count)]
        data = [base64.b64decode(text.partition(",")[2]) for text in found]
        assert sum(map(len, data)) <= 20_000
        sizes.append(Image.open(io.BytesIO(data[0])).size)
    assert sizes == [(192, 192), (128, 128)]


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    runs = [write_evaluation(tmp_path / name / "scores", 8, shift) for name, shift in (("old", 0.0), ("new", -3.0))]
    page = Page(write_report(runs, tmp_path / "report"))
    scores = page.section("scores")
    assert "Score old/scores new/scores Intervals" in scores
    assert "FID ↓ lower is better 20.0 19.5 – 20.5 17.0 ★ best 16.5 – 17.5" in scores
    assert "Precision ↑ higher is better 0.50 ★ best, not clearly 0.40 – 0.60 0.47" in scores
    green = [place for place, (tag, found) in enumerate(page.elements) if (tag, found.get("class")) == ("td", "best")]
    clear = [place for place, (_, found) in enumerate(page.elements) if found.get("title") == "best"]
    assert len(green) == len(clear) == 1, "FID's, and no best that is within noise"
    assert scores.count("FID of so few images says little.") == 1 and "not measured in the same way" not in scores
    assert "images: 2 runs on reference" in page.section(""), "both folders are called images"
    alike = write_evaluation(tmp_path / "alike", 8, -3.01)
    scores = Page(write_report([*runs, alike], tmp_path / "report")).section("scores")
    assert "17.0 16.5 – 17.5 17.0 16.5 – 17.5" in scores, "no star for a difference that is not shown"
    rows = [found for tag, found in page.elements if tag == "div" and found.get("class") == "row"]
    assert len(rows) == 8
    assert "A red car number 3 old/scores A red car number 3 new/scores" in page.section("side-by-side")
    assert page.all("img", "data-about")[2:4] == ["old/scores · 0001_seed43.png", "new/scores · 0001_seed43.png"]
    # FID: 16.5 to 20.5 with a margin of 6% on both sides; the interval of the second run begins at its left end.
    whiskers = [style for style in page.all("i", "style") if "width" in style][:2]
    assert whiskers == ["left:72.32%;width:22.32%", "left:5.36%;width:22.32%"]


def test_runs_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    """Two images of a prompt are averaged first; prompts that only one run has are left out."""
    values = {"a": [20.0, 22.0, 30.0, 25.0, 40.0], "b": [23.0, 23.0, 33.0, 24.0, 99.0]}
    prompts = {"a": ["one", "one", "two", "three", "only a"], "b": ["one", "one", "two", "three", "only b"]}
    folders = []
    for name in values:
        folder = write_evaluation(tmp_path / name, 5)
        per_image = content(folder, 5)["per_image"] | {"prompt": prompts[name], "clip_score": values[name]}
        write_changed(folder, per_image=per_image, settings={})
        folders.append(folder)
    write_report(folders, tmp_path / "report")
    (found,) = json.loads((tmp_path / "report" / "comparison.json").read_text())
    assert (found["run"], found["baseline"], found["metric"], found["prompts"]) == ("b", "a", "clip_score", 3)
    assert found["difference"]["value"] == pytest.approx((2 + 3 - 1) / 3)
    assert found["difference"]["low"] == -1 and found["difference"]["high"] == 3, "all three, or none of them"
    assert found["win_rate"]["value"] == pytest.approx(2 / 3)
    section = Page(tmp_path / "report" / "index.html").section("comparison")
    assert "CLIP score b against a +1.3 −1.0 to 3.0 67% 0% – 100% 3 too few prompts" in section
    write_changed(folders[1], settings={"clip_sha256": "another CLIP"})
    write_report(folders, tmp_path / "report")
    assert json.loads((tmp_path / "report" / "comparison.json").read_text()) == []
    write_report(folders[:1], tmp_path / "alone")
    assert not (tmp_path / "alone" / "comparison.json").exists()


def test_scores_of_images_and_categories_are_read_from_parquet(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", 4)
    table = {"image": [f"000{i}_seed{42 + i}.png" for i in range(4)], "pickscore": [20.0, 21.0, None, 23.0]}
    table |= {"category": ["Animals", "People", "Animals", None], "aesthetic": [1.0, 2.0, 3.0, 4.0]}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "scores.parquet")
    means = {"Animals": (2, 20.0, None, None), "People": (1, 21.0, 20.5, 21.5)}
    categories = {
        name: {"count": count, "scores": {"pickscore": {"value": value, "low": low, "high": high}}}
        for name, (count, value, low, high) in means.items()
    }
    scores = content(folder, 4)["scores"] | {"pickscore": {"value": 21.0}}  # the column aesthetic is the table's own
    write_changed(folder, categories={"category": categories}, scores=scores)
    page = Page(write_report([folder], tmp_path / "report"))
    assert "By category PickScore Animals 2 20.0 People 1 21.0 20.5 – 21.5" in page.section("categories")
    assert page.all("td", "style") == ["--heat:6%", "--heat:70%"]
    assert [json.loads(text) for text in page.all("figure", "data-scores")][1:3] == [
        {"clip_score": 25.1, "pickscore": 21.0}, {"clip_score": 25.2}
    ]  # fmt: skip
    assert json.loads(page.all("figure", "data-categories")[0]) == ["category=Animals"]
    assert page.all("option", "value")[:3] == ["", "category=Animals", "category=People"]
    # A file about other images is ignored; a damaged one is refused.
    table["image"][0] = "other.png"
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "scores.parquet")
    assert "PickScore" not in Page(write_report([folder], tmp_path / "report")).section("images")
    (folder / "scores.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="scores.parquet is damaged"):
        write_report([folder], tmp_path / "report")


@pytest.mark.parametrize(
    ("change", "starred"),
    [
        ({}, True),
        ({"reference": {"path": "elsewhere/reference", "count": 5000, "sha256": "a"}}, False),
        ({"reference": {"path": "data/reference", "count": 50_000}}, False),
        ({"settings": {"resizing": "as clean-fid does"}}, False),
        ({"settings": {"inception_sha256": "other"}}, False),
    ],
)
def test_no_run_is_best_across_references_or_protocols(
    change: dict[str, object], starred: bool, tmp_path: Path
) -> None:
    runs = read_runs([write_evaluation(tmp_path / "a", 3), write_evaluation(tmp_path / "b", 3, -3.0, **change)])
    assert bool(find_best("fid", runs)) is starred
    if "sha256" in str(change.get("reference")):  # the same reference, once moved
        moved = {"path": "data/reference", "count": 5000, "sha256": "a"}
        runs = read_runs([write_evaluation(tmp_path / "c", 3, reference=moved), tmp_path / "b"])
        assert find_best("fid", runs) == (1, True)


def test_scores_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    """A row that failed in one run does not matter."""
    scores = [{"clip_score": {"value": value, "low": 29.0, "high": 31.0}} for value in (30.0, 30.5)]
    runs = [
        write_evaluation(tmp_path / name, count, shift, scores=of_run)
        for name, count, shift, of_run in zip("ab", (12, 11), (0.0, 3.0), scores, strict=True)
    ]
    assert find_best("clip_score", read_runs(runs)) == (1, False)
    prompts = [f"another {number}" if number < 2 else text for number, text in enumerate(read_runs(runs)[1].prompts)]
    write_changed(runs[1], per_image=content(runs[1], 11, 3)["per_image"] | {"prompt": prompts})
    assert find_best("clip_score", read_runs(runs)) is None
    report = Page(write_report(runs, tmp_path / "report"))
    assert "These runs were not measured in the same way" in report.section("scores")
    (found,) = json.loads((tmp_path / "report" / "comparison.json").read_text())
    assert found["prompts"] == 9, "the prompts that both have are compared one by one"


def test_scores_of_other_weights_are_not_compared(tmp_path: Path) -> None:
    scores = [{"pickscore": {"value": value, "low": value, "high": value}} for value in (20.0, 21.0)]
    settings = [{"pickscore_sha256": name} for name in ("a", "a", "b")]
    one, same, other = (
        write_evaluation(tmp_path / str(number), 3, scores=scores[min(number, 1)], settings=settings[number])
        for number in range(3)
    )
    assert find_best("pickscore", read_runs([one, same])) == (1, True)
    assert find_best("pickscore", read_runs([one, other])) is None


def test_digits_follow_the_interval() -> None:
    def shown(*numbers: float | None) -> str:
        score = MetricScore(value=numbers[0], low=numbers[1], high=numbers[2])
        value, interval = format_score(score, score_decimals([score]))
        return f"{value} {interval}"

    assert shown(0.04, -0.0, 0.15) == "0.04 ('0.00', '0.15')"
    assert shown(-1e-9, -2e-4, 1e-4) == "0.00000 ('-0.00020', '0.00010')"
    assert shown(347.123, 331.4, 366.6) == "347 ('331', '367')"
    assert shown(68.2344, 68.1, 68.35) == "68.23 ('68.10', '68.35')"
    assert shown(1.0, 1.0, 1.0) == "1.000 None" and shown(0.0, 0.0, 0.0) == "0.00 None"
    assert shown(12345.678, None, None) == "12,346 None" and shown(0.0123456, None, None) == "0.01235 None"
    both = [MetricScore(value=20.0, low=19.5, high=20.5), MetricScore(value=152.0, low=140.0, high=160.0)]
    assert [format_score(score, score_decimals(both))[0] for score in both] == ["20.0", "152.0"], (
        "a column of one format"
    )


def test_the_clip_histogram_includes_both_ends(tmp_path: Path) -> None:
    run = write_evaluation(tmp_path / "run", count=4)
    per_image = content(run, 4)["per_image"] | {"clip_score": [0.0, 0.0, 0.0, 3.0]}
    write_changed(run, per_image=per_image)
    page = Page(write_report([run], tmp_path / "report"))
    (outline,) = page.all("path", "d")  # 30 steps; three of four images in the first, one in the last
    assert outline.startswith("M0,40V1.00H3.33V40.00H6.67V40.00") and outline.endswith("V27.00H100.00V40")
    assert page.section("distributions") == "Distributions CLIP score 0.00 3.00"
    write_changed(run, per_image=per_image | {"clip_score": [100.0] * 4})
    section = Page(write_report([run], tmp_path / "report")).section("distributions")
    assert section == "Distributions CLIP score 100", "one score has one label"


def test_negative_numbers_have_one_minus_and_no_zero_below_zero(tmp_path: Path) -> None:
    runs = [write_evaluation(tmp_path / name, 7) for name in ("a", "b")]
    for run, values in zip(runs, ([0.0] * 7, [1, -1.0, 1, -1, 1, -1, 1e-6]), strict=True):
        write_changed(run, per_image=content(run, 7)["per_image"] | {"clip_score": values})
    report = Page(write_report(runs, tmp_path / "report"))
    assert report.section("distributions") == "Distributions CLIP score −1.00 1.00"
    assert "b against a 0.0 −0." in report.section("comparison"), "a difference that reads 0 has no sign"
    write_changed(runs[0], per_image=content(runs[0], 7)["per_image"] | {"clip_score": [-0.001, 1, 2, 3, 4, 5, 6]})
    report = Page(write_report(runs[:1], tmp_path / "report"))
    assert report.section("distributions") == "Distributions CLIP score 0.00 6.00"


def test_differently_measured_runs_are_marked(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "a", 4)
    second = write_evaluation(tmp_path / "b", 6, warnings=["only here"], missing=[])
    changed = content(second, 6)["per_image"] | {"prompt": [f"another {number}" for number in range(6)]}
    write_changed(second, per_image=changed)
    page = Page(write_report([first, second], tmp_path / "report"))
    assert "2 warnings These runs were not measured in the same way" not in page.section("scores")
    assert "3 warnings These runs were not measured in the same way" in page.section("scores")
    assert "CLIP score" in page.section("scores") and page.section("scores").count("★") == 1, "FID of 4 images and of 6"
    assert "b only here" in page.section("scores") and "a CMMD" in page.section("scores")
    assert page.section("side-by-side") == "", "no prompt is shared"
    differing = [tag for tag, found in page.elements if tag == "tr" and found.get("class") == "differs"]
    assert len(differing) == 2, "the folder and the number of images"


def write_changed(folder: Path, **changes: object) -> None:
    path = folder / "report.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_minimal_report_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "report.json").write_text('{"fid": 3.25, "scores": {"kid": null, "own": {"value": NaN}}}')
    page = Page(write_report([tmp_path / "bare"], tmp_path / "report"))
    assert "FID ↓ lower is better 3.250" in page.section("scores")
    assert "KID" not in page.section("scores") and "own" not in page.section("scores")
    assert page.all("section", "id") == ["scores", "settings"]


def test_images_are_found_in_a_moved_folder_or_marked_as_missing(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", 5, images={"folder": "images", "count": 5})
    (folder / "images" / "0002_seed44.png").unlink()
    (folder / "images" / "0003_seed45.png").write_bytes(b"not an image")
    page = Page(write_report([folder], folder / "report"))
    assert page.section("images").count("This image could not be read.") == 2
    assert len(json.loads(page.scripts[0])) == 3
    assert page.all("img", "data-original")[-1] == "../images/0004_seed46.png"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "report.json is damaged. It is not JSON"),
        ("[1]", "not a report of an evaluation"),
        ('{"scores": [1]}', "scores is invalid"),
        ('{"per_image": {"file": ["a"], "prompt": []}}', "1 files but 0 of prompt"),
        ('{"speed": {"0": {"images_per_second": "fast"}}}', "speed.0.images_per_second is invalid"),
    ],
)
def test_a_damaged_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=message):
        write_report([tmp_path], tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        write_evaluation(tmp_path / name, 2)
    assert main(["report", "a", "b", "--output_dir", "page", "c"]) == 0
    assert capsys.readouterr().out == "page/index.html: open it in a browser.\n"
    assert "images: 3 runs" in (tmp_path / "page" / "index.html").read_text()
    assert main(["report", "a"]) == 0 and (tmp_path / "report" / "index.html").is_file()
    assert main(["report", "d"]) == 1 and "The folder d was not found." in capsys.readouterr().err
    assert main(["report"]) == 1 and "Missing argument FOLDERS." in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 16, 200])
def test_selected_images_are_distinct_and_of_all_parts(count: int) -> None:
    for length in range(2 * count + 30):
        chosen = _evenly_spaced(range(length), count)
        assert len(set(chosen)) == len(chosen) == min(count, length)
        assert chosen == sorted(chosen)
