"""docs/reliability.md and docs/security.md: every promise names a test that exists; tables of figures match records."""

from __future__ import annotations

import ast
import re

import pytest

from tests import test_load
from tests.conftest import REPOSITORY
from tests.faults import many
from tests.support.records import read_record

PAGES = {"reliability": 3, "security": 5}
"""The pages and how many tables of tests each has."""
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _text(page: str) -> str:
    return (REPOSITORY / "docs" / f"{page}.md").read_text(encoding="utf-8")


def _rows_of_tests(page: str) -> list[list[str]]:
    """Return the tables whose last column is `test`, each as its rows."""
    tables = re.findall(r"^\|.*\| test \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", _text(page), re.MULTILINE)
    return [table.splitlines() for table in tables]


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = _NAMED.findall(_text(page))
    assert len(named) > 20
    for file, name in named:
        tree = ast.parse((REPOSITORY / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_names_a_test(page: str) -> None:
    tables = _rows_of_tests(page)
    assert len(tables) == PAGES[page]
    untested = [row for rows in tables for row in rows if not _NAMED.search(row.rpartition(" | ")[2])]
    assert not untested


def test_table_of_random_schedules_matches_its_record() -> None:
    assert f"\n{many.table(read_record(many.RECORD))}\n" in _text("reliability")
    _assert_names_its_origin("reliability", many.RECORD)


def test_sentence_on_random_schedules_matches_its_record() -> None:
    record = read_record(many.RECORD)
    assert many.sentence(record) in " ".join(_text("reliability").split())
    assert record["schedules that went wrong"] == 0


def test_table_of_loads_matches_its_record() -> None:
    rows = read_record(test_load.RECORD)["table"]
    shown = re.search(
        r"^\| input \| CPU time \| memory \|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", _text("security"), re.MULTILINE
    )
    assert shown and [line.rpartition(" | ")[0] for line in shown[1].splitlines()] == [
        f"| {row['input']} | {row['CPU time']} | {row['memory']}" for row in rows
    ]
    _assert_names_its_origin("security", test_load.RECORD)


def _assert_names_its_origin(page: str, name: str) -> None:
    """The page names the record, its command, hardware and versions."""
    record, text = read_record(name), " ".join(_text(page).split())
    assert f"`bench/results/{name}.json`" in text and f"`{record['command']}`" in text
    machine, versions = record["hardware"], record["versions"]
    wanted = f"{machine['cores']} cores of an {machine['cpu']} (load {machine['load']})"
    assert f"{wanted}, muralist {versions['muralist']}, torch {versions['torch']}, Python {versions['python']}" in text
