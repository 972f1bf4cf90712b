"""Compiled code: kept where only its owner can put any, found again by the next process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

import pytest

from muralist import compiled_code
from muralist.compiled_code import KERNELS, VARIABLE, keep, keep_bytecode


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(KERNELS, "")
    monkeypatch.delenv(KERNELS)
    return tmp_path


def test_the_usual_folder_is_the_users_own(home: Path) -> None:
    kept = keep()
    assert kept.folder.parent == home / "cache" / "muralist" / "compiled" and kept.note == ""
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert re.fullmatch(r"torch-[\w.+]+-python-3\.\d+\.\d+-\w+-[0-9a-f]{8}", kept.folder.name)
    assert os.environ[VARIABLE] == str(kept.folder)
    assert os.environ[KERNELS] == str(kept.folder / "triton")
    assert keep() == kept and not kept.holds_code


def test_folders_on_the_way_are_the_users_own_too_whatever_others_may_usually_do(home: Path) -> None:
    before = os.umask(0o002)
    try:
        kept = keep()
    finally:
        os.umask(before)
    assert kept.note == ""
    assert {place.stat().st_mode & 0o777 for place in (home / "cache", *kept.folder.parents[:2])} == {0o700}


def test_code_around_other_kernels_is_not_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.compiler import config

    keep()
    mine = config.cache_key_tag
    (home / "models" / "fused").mkdir(parents=True)
    (home / "models" / "fused" / "norm.py").write_text("another")
    monkeypatch.setattr(compiled_code, "__file__", str(home / "compiled_code.py"))
    keep()
    assert len(mine) == 16 and config.cache_key_tag not in ("", mine)


def test_another_processor_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = keep().folder
    monkeypatch.delenv(VARIABLE)
    (home / "cpuinfo").write_text("model name : another\nflags : amx\n\nmodel name : another\n")
    monkeypatch.setattr(compiled_code, "_PROCESSOR", home / "cpuinfo")
    assert keep().folder != here


def test_a_folder_that_was_named_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(home / "named"))
    assert keep().folder == home / "named" and not (home / "cache").exists()


def test_torchs_own_choice_is_nobodys(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{tempfile.gettempdir()}/torchinductor_somebody")
    assert keep().folder.is_relative_to(home / "cache")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_a_folder_that_others_can_write_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    (home / "shared").mkdir()
    (home / "shared").chmod(mode)
    monkeypatch.setenv(VARIABLE, str(home / "shared"))
    _not_used(home / "shared", f"others can write to {home / 'shared'}")


def test_nor_one_that_others_could_replace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "shared" / "mine").mkdir(parents=True, mode=0o700)
    (home / "shared").chmod(0o777)
    for name in ("mine", "link"):
        monkeypatch.setenv(VARIABLE, str(home / "shared" / name))
        _not_used(home / "shared" / name, f"others can write to {home / 'shared'}")
        (home / "own").mkdir(exist_ok=True, mode=0o700)
        (home / "shared" / "link").unlink(missing_ok=True)
        (home / "shared" / "link").symlink_to(home / "own")
    (home / "shared").chmod(0o1777)  # as /tmp: what is there stays its owner's
    monkeypatch.setenv(VARIABLE, str(home / "shared" / "mine"))
    assert keep().folder == home / "shared" / "mine"


def test_nor_one_of_somebody_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "theirs").mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(home / "theirs"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    kept = keep()
    assert kept.folder != home / "theirs" and f"{home / 'theirs'} belongs to somebody else" in kept.note


def test_a_file_in_its_place_is_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(home / "file"))
    _not_used(home / "file", f"{home / 'file'} cannot be used (File exists)")


def _not_used(folder: Path, why: str) -> None:
    kept = keep()
    assert kept.folder != folder and kept.folder.name.startswith("muralist-compiled-")
    assert kept.folder.stat().st_mode & 0o777 == 0o700 and os.environ[VARIABLE] == str(kept.folder)
    assert kept.note == f"They are not kept: {why}. Name a folder of your own with {VARIABLE}."
    kept.folder.rmdir()


@pytest.mark.slow
def test_the_second_start_finds_what_the_first_compiled(home: Path) -> None:
    import torch
    from torch._dynamo.utils import counters

    kept, said = keep(), []
    assert not kept.holds_code
    for _ in range(2):
        torch._dynamo.reset()  # as good as another process: it compiles everything anew
        counters.clear()
        assert kept.words() == ""
        torch.compile(lambda x: x @ x)(torch.ones(8, 8))  # no C++ is built for it
        said.append(kept.words())
    assert kept.holds_code
    assert said == [
        f"1 parts of the model were compiled. They are kept in {kept.folder}: the next start is a quick one.",
        f"All 1 parts of the model had been compiled before and were found in {kept.folder}.",
    ]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that came without bytecode, in torch's place, in a process that may not write any."""
    (tmp_path / "libraries" / "torch").mkdir(parents=True)
    source = tmp_path / "libraries" / "torch" / "__init__.py"
    source.write_text("answer = 42\n")
    other = tmp_path / "libraries" / "numpy.py"
    other.write_text("")
    os.utime(other, (1e9, 1e9))  # it came at another time
    origins = {"torch": str(source), "numpy": str(other)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=origins[name]))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return source


def test_bytecode_that_cannot_lie_beside_its_source_is_kept(bare: Path, home: Path) -> None:
    keep_bytecode()
    assert not sys.dont_write_bytecode
    assert sys.pycache_prefix is not None and Path(sys.pycache_prefix).parent == keep().folder
    SourceFileLoader("bare_library", str(bare)).load_module()
    (kept,) = (home / "cache").rglob("*.pyc")
    assert kept == Path(importlib.util.cache_from_source(str(bare)))
    assert not (bare.parent / "__pycache__").exists()


def test_bytecode_that_is_there_or_can_be_is_left_to_python(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    keep_bytecode()
    assert sys.pycache_prefix is None  # it may lie beside its source
    monkeypatch.setattr(os, "access", lambda *_: False)
    beside = Path(importlib.util.cache_from_source(str(bare)))
    beside.parent.mkdir()
    beside.touch()
    keep_bytecode()
    assert sys.pycache_prefix is None  # it does
    beside.unlink()
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    keep_bytecode()
    assert sys.pycache_prefix == "/elsewhere"  # somebody chose


def test_bytecode_of_an_image_in_which_all_files_are_as_old_is_told_apart_by_what_is_installed(
    bare: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python tells a file from its next version by age and size."""
    os.utime(bare, (1e9, 1e9))
    installed = home / "installed"
    (installed / "library-1.0.dist-info").mkdir(parents=True)
    record = installed / "library-1.0.dist-info" / "RECORD"
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    folders = []
    for content in ("library.py,sha256=one,10", "library.py,sha256=two,10", "library.py,sha256=one,10"):
        record.write_text(content)
        monkeypatch.setattr(sys, "pycache_prefix", None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        keep_bytecode()
        folders.append(sys.pycache_prefix)
    first, second, third = folders
    assert first == third != second and first and Path(first).parent == keep().folder


def test_bytecode_of_our_own_source_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "__file__", str(tmp_path / "compiled_code.py"))
    (tmp_path / "part.py").write_text("answer = 42\n")
    first = compiled_code._installed()
    (tmp_path / "part.py").write_text("answer = 43\n")
    assert compiled_code._installed() != first


def test_bytecode_has_a_folder_of_its_own_that_nobody_else_writes(
    bare: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "named" / "bytecode").mkdir(parents=True, mode=0o755)
    monkeypatch.setenv(VARIABLE, str(home / "named"))
    (home / "named" / "bytecode").chmod(0o777)
    keep_bytecode()
    assert sys.dont_write_bytecode and sys.pycache_prefix is None
    (home / "named" / "bytecode").rmdir()
    before = os.umask(0)
    try:
        keep_bytecode()
    finally:
        os.umask(before)
    assert sys.pycache_prefix == str(home / "named" / "bytecode")
    assert (home / "named" / "bytecode").stat().st_mode & 0o777 == 0o700


def test_bytecode_is_not_kept_where_others_can_write(bare: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "open").mkdir()
    (home / "open").chmod(0o777)
    monkeypatch.setenv(VARIABLE, str(home / "open"))
    keep_bytecode()
    assert sys.dont_write_bytecode and sys.pycache_prefix is None


def test_what_compiling_needs_is_there_when_something_else_has_been_waited_for() -> None:
    script = """
import sys
from muralist import compiled_code
with compiled_code.readied(False):
    pass
print("torch._inductor.compile_fx" in sys.modules)
with compiled_code.readied(True):
    pass
print("torch._inductor.compile_fx" in sys.modules)
from torch._inductor import codecache
codecache.build_code_hash = None
print(len(codecache.torch_key()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "32"], done.stderr


def test_what_cannot_be_made_ready_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.triton_compat", None)
    with compiled_code.readied(True):
        pass
    assert not failed
