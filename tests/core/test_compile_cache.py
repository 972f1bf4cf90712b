"""Compiled code: kept where only its owner can put any, found again by the next process."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muralist.core import compile_cache
from muralist.core.compile_cache import INDUCTOR_VARIABLE, TRITON_VARIABLE, imports_without_gc, use_compile_cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(INDUCTOR_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(INDUCTOR_VARIABLE)
    monkeypatch.setenv(TRITON_VARIABLE, "")
    monkeypatch.delenv(TRITON_VARIABLE)
    return tmp_path


def test_the_usual_folder_is_the_users_own(home: Path) -> None:
    before = os.umask(0o002)
    try:
        kept = use_compile_cache()
    finally:
        os.umask(before)
    assert kept.folder.parent == home / "cache" / "muralist" / "compiled" and kept.note == ""
    assert {place.stat().st_mode & 0o777 for place in (kept.folder, *kept.folder.parents[:3])} == {0o700}
    assert re.fullmatch(r"torch-[\w.+]+-python-3\.\d+\.\d+-\w+-[0-9a-f]{8}", kept.folder.name)
    assert os.environ[INDUCTOR_VARIABLE] == str(kept.folder)
    assert os.environ[TRITON_VARIABLE] == str(kept.folder / "triton")
    assert use_compile_cache() == kept and not kept.is_warm


def test_code_around_other_kernels_is_not_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.compiler import config

    use_compile_cache()
    mine = config.cache_key_tag
    (home / "kernels").mkdir(parents=True)
    (home / "kernels" / "norm.py").write_text("another")
    monkeypatch.setattr(compile_cache, "__file__", str(home / "core" / "compile_cache.py"))
    use_compile_cache()
    assert len(mine) == 16 and config.cache_key_tag not in ("", mine)


def test_another_processor_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = use_compile_cache().folder
    monkeypatch.delenv(INDUCTOR_VARIABLE)
    (home / "cpuinfo").write_text("model name : another\nflags : amx\n\nmodel name : another\n")
    monkeypatch.setattr(compile_cache, "_CPU_INFO", home / "cpuinfo")
    assert use_compile_cache().folder != here


def test_a_folder_that_was_named_is_used_but_not_torchs_own_choice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "named"))
    assert use_compile_cache().folder == home / "named" and not (home / "cache").exists()
    monkeypatch.setenv(INDUCTOR_VARIABLE, f"{tempfile.gettempdir()}/torchinductor_somebody")
    assert use_compile_cache().folder.is_relative_to(home / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_a_folder_that_others_can_write_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    (home / "shared").mkdir()
    (home / "shared").chmod(mode)
    monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "shared"))
    _not_used(home / "shared", f"other users can write to {home / 'shared'}")
    (home / "file").write_text("")
    monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "file"))
    _not_used(home / "file", f"{home / 'file'} cannot be used (File exists)")


def test_nor_one_that_others_could_replace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "shared" / "mine").mkdir(parents=True, mode=0o700)
    (home / "shared").chmod(0o777)
    for name in ("mine", "link"):
        monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "shared" / name))
        _not_used(home / "shared" / name, f"other users can write to {home / 'shared'}")
        (home / "own").mkdir(exist_ok=True, mode=0o700)
        (home / "shared" / "link").unlink(missing_ok=True)
        (home / "shared" / "link").symlink_to(home / "own")
    (home / "shared").chmod(0o1777)  # as /tmp: what is there stays its owner's
    monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "shared" / "mine"))
    assert use_compile_cache().folder == home / "shared" / "mine"


def test_nor_one_of_somebody_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "theirs").mkdir(mode=0o700)
    monkeypatch.setenv(INDUCTOR_VARIABLE, str(home / "theirs"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    kept = use_compile_cache()
    assert kept.folder != home / "theirs" and f"{home / 'theirs'} belongs to another user" in kept.note


def _not_used(folder: Path, why: str) -> None:
    kept = use_compile_cache()
    assert kept.folder != folder and kept.folder.name.startswith("muralist-compiled-")
    assert kept.folder.stat().st_mode & 0o777 == 0o700 and os.environ[INDUCTOR_VARIABLE] == str(kept.folder)
    assert kept.note == f"They are not cached: {why}. Set {INDUCTOR_VARIABLE} to a private folder."
    kept.folder.rmdir()


def test_caches_of_other_versions_are_removed_a_month_after_their_last_use(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = use_compile_cache().folder
    compiled, month = current.parent, 31 * 86400
    old = "torch-2.9.0+cu128-python-3.11.4-x86_64-0123abcd"
    names = [old, old.replace("2.9.0", "2.10.0"), f"{current.name}/bytecode", f"{current.name}/bytecode-{'0a' * 8}",
             "torch-notes", f"{current.name}/fxgraph", "removed-abc_12"]  # fmt: skip
    for name in names:
        (compiled / name / "triton").mkdir(parents=True)
    (home / "elsewhere").mkdir()
    (compiled / old.replace("2.9.0", "2.8.0")).symlink_to(home / "elsewhere")
    for place in (*compiled.rglob("*"), current, home / "elsewhere"):
        os.utime(place, (time.time() - month,) * 2)
    os.utime(compiled / names[1] / "triton")  # in use
    monkeypatch.delenv(INDUCTOR_VARIABLE)  # as in another process
    kept = use_compile_cache()
    assert kept.removed == f"Removed 4 caches of other versions in {compiled}, unused for 30 days."
    assert kept.summary().endswith(kept.removed) and kept.folder == current
    left = {names[1], current.name, "torch-notes", old.replace("2.9.0", "2.8.0")}
    assert {place.name for place in compiled.iterdir()} == left and (home / "elsewhere").is_dir()
    assert [place.name for place in current.iterdir()] == ["fxgraph"]
    assert time.time() - current.stat().st_mtime < 60  # or another version would remove it
    monkeypatch.delenv(INDUCTOR_VARIABLE)
    assert use_compile_cache().removed == ""


def test_caches_of_somebody_else_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use_compile_cache().folder
    theirs = folder.with_name("torch-2.9.0-python-3.11.4-x86_64-0123abcd")
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert compile_cache._remove_unused(folder) == "" and theirs.is_dir()


@pytest.mark.slow
def test_the_second_start_finds_what_the_first_compiled(home: Path) -> None:
    import torch
    from torch._dynamo.utils import counters

    kept, said = use_compile_cache(), []
    assert not kept.is_warm
    for _ in range(2):
        torch._dynamo.reset()  # as good as another process: it compiles everything anew
        counters.clear()
        assert kept.summary() == ""
        torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # no C++ is built for it
        said.append(kept.summary())
    assert kept.is_warm
    assert said == [
        f"1 graphs were compiled. They are cached in {kept.folder}; the next start will be faster.",
        f"All 1 compiled graphs were found in the cache {kept.folder}.",
    ]


# -- imports without garbage collection


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_stays_out_of_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_for_good.py").write_text("kept = [[] for _ in range(1000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with imports_without_gc():
        assert not gc.isenabled()
        import imported_for_good  # type: ignore[import-not-found]
    assert gc.isenabled()
    looked_through = {id(thing) for thing in gc.get_objects()}
    assert not looked_through & {id(thing) for thing in imported_for_good.kept}
    del sys.modules["imported_for_good"]


def test_garbage_collection_is_as_before_without_new_imports_and_after_a_failed_one() -> None:
    gc.unfreeze()
    with imports_without_gc():
        import json  # noqa: F401
    assert gc.get_freeze_count() == 0 and gc.isenabled()
    with pytest.raises(ModuleNotFoundError), imports_without_gc():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with imports_without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
