"""Imports that the garbage collector does not look through."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muralist.lasting_imports import lasting_imports


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_stays_out_of_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_for_good.py").write_text("kept = [[] for _ in range(1000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with lasting_imports():
        assert not gc.isenabled()
        import imported_for_good  # type: ignore[import-not-found]
    assert gc.isenabled()
    looked_through = {id(thing) for thing in gc.get_objects()}
    assert not looked_through & {id(thing) for thing in imported_for_good.kept}
    del sys.modules["imported_for_good"]


def test_nothing_changes_where_nothing_is_new() -> None:
    gc.unfreeze()
    with lasting_imports():
        import json  # noqa: F401
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_collecting_goes_on_after_a_failed_import_and_stays_off_where_it_was() -> None:
    with pytest.raises(ModuleNotFoundError), lasting_imports():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with lasting_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
