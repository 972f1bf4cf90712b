"""The documentation builds without a warning, its pictures are what the code draws, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import draw_docs

from muralist.cli import COMMANDS
from muralist.data.sources import Source
from muralist.evaluate import evaluation, measures
from muralist.help import settings_help
from muralist.models.family import Family
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted([*DOCS.glob("*.md"), REPOSITORY / "README.md"])
PICTURES = (draw_docs.TRAINING, draw_docs.GENERATION, draw_docs.CHECKPOINT)
PLACES = (REPOSITORY, REPOSITORY / "src" / "muralist", REPOSITORY / "tests", DOCS)


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {page.with_suffix(".html").name for page in DOCS.glob("*.md")} <= pages
    outside = re.compile(r'(?:src|href)="(?:https?:)?//(?!www\.mkdocs\.org)')
    assert not [page for page in pages if outside.search((tmp_path / "site" / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_what_the_code_draws(picture: draw_docs.Picture) -> None:
    drawn = (DOCS / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert drawn == draw_docs.draw(picture), "`make docs` draws them again"
    for box in picture.boxes:
        assert list((REPOSITORY / "src" / "muralist").glob(box.home)), f"{box.title}: there is no {box.home}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w*.-]+\.(?:py|sh|yaml|json|md|npz))`", text))
    named = {name for name in named if name.split("/")[0] not in ("results", "data", "evaluation", "images", "report")}
    missing = [name for name in named if not any(list(place.glob(name)) for place in PLACES)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_that_a_page_shows_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in (line.split("#")[0] for block in blocks for line in block.splitlines()):
        if not (words := re.match(r"\s*muralist (\w+)\b(.*)", line)):
            continue
        command, rest = words.groups()
        assert command in COMMANDS, line
        if command == "doctor" and (plan := re.match(r"\s*(train|generate)\b(.*)", rest)):
            command, rest = plan.groups()
        if command in ("launch", "hydit"):
            continue
        entry = COMMANDS[command]
        known = settings_help(command, entry.settings, entry.positional)
        for flag in re.findall(r"--([\w-]+)", rest):
            assert re.search(rf"--(?:\w+\.)?(?:no_)?{flag}\b", known) or f"--{flag}" in known, f"{flag} in: {line}"


@pytest.mark.parametrize(
    ("page", "protocol"), [("adding-a-data-source", Source), ("adding-a-family", Family)], ids=["source", "family"]
)
def test_a_page_that_explains_how_to_add_something_names_every_member(page: str, protocol: type) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    members = {name for name in vars(protocol) if not name.startswith("_")} | set(protocol.__annotations__)
    assert {name for name in members if f"`{name}" not in text} == set()


def test_what_a_new_metric_needs_is_where_its_page_says() -> None:
    text = (DOCS / "adding-a-metric.md").read_text(encoding="utf-8")
    places = {"METRICS": evaluation, "MEASURES": measures, "_find_missing": evaluation.Evaluation}
    places |= {"_score_inception": evaluation.Evaluation, "_keep": evaluation.Evaluation}
    for name, place in places.items():
        file = f"evaluate/{place.__module__ if isinstance(place, type) else place.__name__}.py"
        assert hasattr(place, name) and name in text and file.replace("muralist.evaluate.", "") in text, name
