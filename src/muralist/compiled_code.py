"""Where torch keeps what it compiles: a folder of the user's own, so that the second start of a model is a quick one.

torch's own choice is a folder under /tmp, which a cluster empties after every job and shares with other users. What lies in
such a folder is run. So ours can be written by nobody else, and one that others can write, or own, is not used: then code
is compiled into a folder that ends with the command. Many processes may use it at once: torch writes every file aside and
renames it, under a name that depends on the code, the GPU, and the versions of torch, CUDA and Triton.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

from muralist.machine import user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
KERNELS = "TRITON_CACHE_DIR"
_GRAPHS = "fxgraph"  # torch's own name for the folder of whole graphs
_PROCESSOR = Path("/proc/cpuinfo")
_OPERATIONS = ("models/fused/*.py", "generate/fused.py", "generate/turned*.py")


@dataclass(frozen=True)
class Kept:
    """Where compiled code goes."""

    folder: Path
    note: str = ""
    """A sentence where that is not where it would be found again."""

    @property
    def holds_code(self) -> bool:
        """Whether earlier starts, of whatever model, left something."""
        return (self.folder / _GRAPHS).is_dir()

    def words(self) -> str:
        """What this process compiled and what it found; nothing where it did neither."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # where nothing is compiled, it need not be loaded
        if dynamo is None:
            return ""
        counters = dynamo.counters
        found, compiled = (counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss"))
        if not found + compiled:
            return ""
        if not compiled:
            told = f"All {found} parts of the model had been compiled before and were found in {self.folder}."
        else:
            more = f", {found} were found there" if found else ""
            kept = self.note or f"They are kept in {self.folder}{more}: the next start is a quick one."
            told = f"{compiled} parts of the model were compiled. {kept}"
        return told


def keep() -> Kept:
    """Tell torch where to keep what it compiles: TORCHINDUCTOR_CACHE_DIR if it is set, else the user's cache folder."""
    folder, fault = _chosen()
    kept = Kept(folder)
    if fault:
        aside = Path(tempfile.mkdtemp(prefix="muralist-compiled-"))
        atexit.register(shutil.rmtree, aside, ignore_errors=True)
        kept = Kept(aside, f"They are not kept: {fault}. Name a folder of your own with {VARIABLE}.")
    os.environ[VARIABLE] = str(kept.folder)
    os.environ.setdefault(KERNELS, str(kept.folder / "triton"))  # our own are compiled before torch would say where
    _tell_kernels_apart()
    return kept


def keep_bytecode() -> None:
    """Have Python keep what it compiles as well, where it would compile torch anew at every start; before importing that.

    That takes twice as long as importing it. It is so where libraries came without bytecode, as in many images of
    containers, and Python can, or may, put none beside them.
    """
    torch, other = _source("torch"), _source("numpy")
    may = not sys.dont_write_bytecode and os.access(torch.parent, os.W_OK)
    if may or sys.pycache_prefix is not None or Path(importlib.util.cache_from_source(str(torch))).is_file():
        return
    folder, fault = _chosen()
    # In an image whose files are all as old, Python could not tell one of the next image from this one's by its age.
    alike = int(torch.stat().st_mtime) == int(other.stat().st_mtime)
    folder /= f"bytecode-{_installed()}" if alike else "bytecode"
    if not (fault or _unusable(folder)):
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def _source(library: str) -> Path:
    found = importlib.util.find_spec(library)
    assert found and found.origin  # a dependency
    return Path(found.origin)


def _installed() -> str:
    """All that is installed, by the hashes of its files that came with it, and our own source."""
    whole = hashlib.sha256(sys.version.encode())  # its own library lies there, too
    for found in sorted(found.read_text("RECORD") or found.read_text("METADATA") or "" for found in distributions()):
        whole.update(found.encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def _chosen() -> tuple[Path, str]:
    """The folder, made if need be, and why it cannot be used."""
    named = os.environ.get(VARIABLE)
    if named and named.startswith(f"{tempfile.gettempdir()}/torchinductor_"):
        named = None  # torch's own choice, which it puts there when parts of it are imported
    folder = Path(named).absolute() if named else user_cache() / "compiled" / _this_kind()
    return folder, _unusable(folder)


def _unusable(folder: Path) -> str:
    """Make a folder if need be; why code that is run cannot be kept there, if so."""
    try:
        for place in reversed(folder.parents):  # mkdir's own `parents` would make them with the usual mode
            if not place.exists():
                place.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        fault = _untrusted(folder)
        if not fault and not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} cannot be written"
    except OSError as error:
        fault = f"{error.filename or folder} cannot be used ({error.strerror})"
    return fault


@contextmanager
def readied(wanted: bool) -> Iterator[None]:
    """While something else waits for a device: import what compiles, and tell versions apart by their source.

    torch needs both before it finds anything that is kept; they take as long as tracing a network.
    """
    thread = threading.Thread(target=_make_ready, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        if wanted:
            thread.join()


def _make_ready() -> None:
    with suppress(Exception):  # torch does the same again where it compiles, and what fails is told there
        from torch._inductor import codecache, compile_fx  # noqa: F401
        from torch._inductor.runtime.triton_compat import triton_key

        codecache.torch_key()
        triton_key()


def _tell_kernels_apart() -> None:
    """Make the source of our own kernels part of what is kept: torch does not look into the operations they are."""
    from torch.compiler import config

    sources = sorted(file for pattern in _OPERATIONS for file in Path(__file__).parent.glob(pattern))
    config.cache_key_tag = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def _this_kind() -> str:
    """Versions and processor: code for one may not run on another, and a home folder may be that of many machines."""
    try:
        lines = _PROCESSOR.read_text(errors="replace").split("\n\n", 1)[0].splitlines()
        told = "".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        told = platform.processor()
    processor = hashlib.sha256(told.encode()).hexdigest()[:8]
    return f"torch-{version('torch')}-python-{platform.python_version()}-{platform.machine()}-{processor}"


def _untrusted(folder: Path) -> str:
    """Why code in a folder may be somebody else's, if so: they own it or a folder above it, or may write there."""
    real = folder.resolve()
    for place in (real, *real.parents, *folder.parents):
        found = place.stat()
        if found.st_uid not in (os.geteuid(), 0) or (place == real and found.st_uid != os.geteuid()):
            return f"{place} belongs to somebody else"
        others = found.st_mode & (stat.S_IWOTH if found.st_uid == found.st_gid else stat.S_IWOTH | stat.S_IWGRP)
        if others and (place == real or not found.st_mode & stat.S_ISVTX):
            return f"others can write to {place}"
    return ""
