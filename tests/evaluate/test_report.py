from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.evaluate import report as page
from muralist.evaluate.report import write_report
from tests.support.evaluations import HOSTILE, content, write_evaluation


@pytest.fixture(autouse=True)
def short_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts' program out where a test does not need it: it is 5 MB of the page."""
    monkeypatch.setattr(page, "_plotly", lambda: "")


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
    folder = write_evaluation(tmp_path / "run")
    path = write_report([folder], tmp_path / "run" / "report")
    assert path == tmp_path / "run" / "report" / "index.html"
    page = Page(path)
    assert page.all("section", "id") == ["scores", "extremes", "images", "failures", "speed", "settings"]
    scores = page.section("scores")
    assert "FID lower is better Distance from the reference in Inception's features" in scores
    assert "20.00 19.50 – 20.50 few images" in scores and "0.5000 0.4000 – 0.6000" in scores
    assert "Not measured CMMD, Recall : no weights were given" in scores
    assert "FID of so few images says little." in scores
    assert "all 12 images" in page.section("images") and "A red car number 3" in page.section("images")
    assert "1 prompt has no image. " in page.section("failures")
    assert "lost 7 <b>Nothing</b> out of memory 1" in page.section("failures")
    assert "1 image could not be read: half.png." in page.section("failures")
    assert page.section("speed") == "Speed 2.750 images per second on 2 GPUs"
    settings = page.section("settings")
    assert "sizes.batch 8" in settings and "version of torch 2.13.0" in settings and "time taken 1 min 01 s" in settings
    assert "12 images · against data/reference (5,000 images) · measured in 1 min 01 s" in page.section("")


def test_each_thumbnail_is_embedded_once_with_a_link_to_the_original(tmp_path: Path) -> None:
    page = Page(write_report([write_evaluation(tmp_path / "run", 30)], tmp_path / "run" / "report"))
    embedded = json.loads(page.scripts[0])
    assert len(embedded) == len(set(embedded)) == 30
    assert all(thumbnail.startswith("data:image/webp;base64,") for thumbnail in embedded)
    shown = [int(number) for number in page.all("img", "data-image")]
    assert len(shown) == 12 + 12 + 30 and set(shown) == set(range(30))
    first = page.all("img", "data-about")[0]
    assert first == "0029_seed71.png · CLIP score 27.90", "the best comes first"
    assert page.all("img", "data-original")[0] == "../images/0029_seed71.png"
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
    assert tags.count("script") == 4 and "svg" not in tags and "b" in tags
    assert not [found for _, found in page.elements if {"onerror", "onload"} & set(found)]
    assert HOSTILE in page.section("images") and "half a character: ?" in page.section("images")
    assert "</p><script>1</script>" in page.section("scores") and name in page.section("settings")
    assert "</script>" in json.loads(page.scripts[1])[1]["data"][0]["x"][2].replace("&lt;", "<").replace("&gt;", ">")
    originals = page.all("img", "data-original")
    assert any(address.endswith("/images/%22%3E%3Csvg%20onload%3Dalert%281%29%3E.png") for address in originals)


def test_the_page_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the charts' program
    folder = write_evaluation(tmp_path / "run", 3)
    write_noise(folder / "images" / "noise.png", 48)
    per_image = content(folder, 30_000)["per_image"] | {"file": ["noise.png"] * 30_000, "clip_score": None}
    write_changed(folder, per_image=per_image)
    path = write_report([folder], tmp_path / "report")
    assert 4_000_000 < path.stat().st_size < 10_000_000
    text = path.read_text()
    assert "200 of 30,000 images, evenly chosen" in text
    numbers = [int(number) for number in re.findall(r'<p class="prompt">A \w+ \w+(?: number)? (\d+)</p>', text)]
    assert len(numbers) == 200 and set(np.diff(numbers)) == {150}


def write_noise(path: Path, side: int) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return path


def test_thumbnails_share_the_byte_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page._MAX_BYTES * 4 / 3 + 4_900_000 < 9_500_000, "room for images, and for the charts' program"
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
    assert "old/scores new/scores FID" in scores
    assert "20.00 19.50 – 20.50 few images 17.00 16.50 – 17.50 few images ★ best Precision" in scores
    assert "0.5000 0.4000 – 0.6000 ★ best, not clearly 0.4700" in scores
    assert scores.count("FID of so few images says little.") == 1 and "not measured in the same way" not in scores
    rows = [found for tag, found in page.elements if tag == "div" and found.get("class") == "row"]
    assert len(rows) == 8
    assert "A red car number 3 25.30 old/scores A red car number 3 22.30 new/scores" in page.section("side-by-side")
    assert [about.split(" · ")[:2] for about in page.all("img", "data-about")[2:4]] == [
        ["old/scores", "0001_seed43.png"],
        ["new/scores", "0001_seed43.png"],
    ]
    charts = json.loads(page.scripts[1])
    fid = charts[0]["data"][0]
    assert fid["y"] == [20.0, 17.0] and fid["error_y"]["array"] == [0.5, 0.5] and fid["customdata"][1] == "new/scores"
    assert len(charts) == 3 + 2 and charts[-1]["data"][1]["y"] == [1.5, 1.25]


def test_the_clip_histogram_includes_both_ends(tmp_path: Path) -> None:
    run = write_evaluation(tmp_path / "run", count=4)
    per_image = content(run, 4)["per_image"] | {"clip_score": [0.0, 0.0, 0.0, 3.0]}
    write_changed(run, per_image=per_image)
    charts = json.loads(Page(write_report([run], tmp_path / "report")).scripts[1])
    spread = charts[0]["data"][0]  # 30 bars of 0.1 from the lowest score to the highest, and nothing beside them
    assert spread["x"][:2] == [-0.05, 0.05] and spread["x"][-2:] == [2.95, 3.05]
    assert spread["y"][:2] == [0.0, 75.0] and spread["y"][-2:] == [25.0, 0.0] and sum(spread["y"]) == 100.0


def test_differently_measured_runs_are_marked(tmp_path: Path) -> None:
    first = write_evaluation(tmp_path / "a", 4)
    second = write_evaluation(tmp_path / "b", 6, warnings=["only here"], missing=[])
    changed = content(second, 6)["per_image"] | {"prompt": [f"another {number}" for number in range(6)]}
    write_changed(second, per_image=changed)
    page = Page(write_report([first, second], tmp_path / "report"))
    assert "These runs were not measured in the same way" in page.section("scores")
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
    assert "FID lower is better" in page.section("scores") and "3.250" in page.section("scores")
    assert "KID" not in page.section("scores") and "own" not in page.section("scores")
    assert page.all("section", "id") == ["scores", "failures", "settings"]


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
    assert "3 runs side by side" in (tmp_path / "page" / "index.html").read_text()
    assert main(["report", "a"]) == 0 and (tmp_path / "report" / "index.html").is_file()
    assert main(["report", "d"]) == 1 and "The folder d was not found." in capsys.readouterr().err
    assert main(["report"]) == 1 and "Missing argument FOLDERS." in capsys.readouterr().err
