"""docs/reliability.md: every test it names is there."""

from __future__ import annotations

import ast
import re

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reliability.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 20
    for file, name in named:
        tree = ast.parse((REPOSITORY / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
