"""Test the documentation: it builds without warnings, its diagrams are up to date, and everything it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import draw_docs

from muralist.cli import COMMANDS
from muralist.data.source import Source
from muralist.evaluate import command, report
from muralist.models.spec import ModelSpec
from muralist.settings.load import settings_help
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted([*DOCS.glob("*.md"), REPOSITORY / "README.md"])
DIAGRAMS = draw_docs.DIAGRAMS
PLACES = (REPOSITORY, REPOSITORY / "src" / "muralist", REPOSITORY / "tests", DOCS)


def test_pages_build_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {page.with_suffix(".html").name for page in DOCS.glob("*.md")} <= pages
    outside = re.compile(r'(?:src|href)="(?:https?:)?//(?!www\.mkdocs\.org)')
    assert not [page for page in pages if outside.search((tmp_path / "site" / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.name)
def test_diagrams_are_up_to_date(diagram: draw_docs.Diagram) -> None:
    drawn = (DOCS / f"{diagram.name}.svg").read_text(encoding="utf-8")
    assert drawn == draw_docs.draw(diagram), "run `make docs`"
    for box in diagram.boxes:
        assert list((REPOSITORY / "src" / "muralist").glob(box.file)), f"{box.title}: {box.file} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w*.-]+\.(?:py|sh|yaml|json|md|npz))`", text))
    named = {name for name in named if name.split("/")[0] not in ("results", "data", "evaluation", "images", "report")}
    missing = [name for name in named if not any(list(place.glob(name)) for place in PLACES)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in (line.split("#")[0] for block in blocks for line in block.splitlines()):
        if not (shown := re.match(r"\s*muralist (\w+)\b(.*)", line)):
            continue
        command, rest = shown.groups()
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
    ("page", "protocol"), [("adding-a-data-source", Source), ("adding-a-model", ModelSpec)], ids=["source", "family"]
)
def test_adding_pages_name_every_member_of_the_protocol(page: str, protocol: type) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    members = {name for name in vars(protocol) if not name.startswith("_")} | set(protocol.__annotations__)
    assert {name for name in members if f"`{name}" not in text} == set()


def test_adding_a_metric_names_the_right_places() -> None:
    text = (DOCS / "adding-a-metric.md").read_text(encoding="utf-8")
    places = {"METRICS": report, "_why_missing": command.Evaluation, "_score_inception": command.Evaluation}
    places |= {"_add": command.Evaluation}
    for name, place in places.items():
        file = f"evaluate/{place.__module__ if isinstance(place, type) else place.__name__}.py"
        assert hasattr(place, name) and name in text and file.replace("muralist.evaluate.", "") in text, name
