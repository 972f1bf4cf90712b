"""The compile cache: keep what torch.compile and Triton compile in a private folder of the user.

torch's default is a folder under /tmp, which clusters empty after every job and share among users. Code in the cache is
executed, so a cache folder that other users own or can write is refused; compiled code then goes to a temporary folder
that ends with the process. Several processes may share the cache: torch writes each file aside and renames it, under a
key made of the code, the GPU and the versions of torch, CUDA and Triton.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from muralist.core.hardware import cache_dir

INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
_CPU_INFO = Path("/proc/cpuinfo")
_UNUSED_DAYS = 30
# Of other versions of torch and Python or other processors; the bytecode of muralist 0.1; removals that were interrupted.
_OLD_CACHE = re.compile(r"torch-[\w.+]+-python-[\w.+]+-\w+-[0-9a-f]{8}|bytecode(-[0-9a-f]{16})?|removed-\w+")
_KERNEL_SOURCES = ("kernels/*.py", "generate/diffusers_patches.py")


@dataclass(frozen=True)
class CompileCache:
    """The folder that compiled code is kept in."""

    folder: Path
    note: str = ""  # why the folder is temporary, if it is
    removed: str = ""  # which old caches were removed, if any

    @property
    def is_warm(self) -> bool:
        """Whether earlier processes left compiled graphs."""
        return (self.folder / "fxgraph").is_dir()  # in which torch keeps compiled graphs

    def summary(self) -> str:
        """Say how many graphs this process compiled or found, and which old caches it removed; empty if none."""
        return " ".join(filter(None, (self._compiled(), self.removed)))

    def _compiled(self) -> str:
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported unless something was compiled
        if dynamo is None:
            return ""
        hits, misses = (dynamo.counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
        if not misses:
            return f"All {hits} compiled graphs were found in the cache {self.folder}." if hits else ""
        found = f", {hits} were found there" if hits else ""
        kept = self.note or f"They are cached in {self.folder}{found}; the next start will be faster."
        return f"{misses} graphs were compiled. {kept}"


def use_compile_cache() -> CompileCache:
    """Point torch and Triton to the cache: TORCHINDUCTOR_CACHE_DIR if set, else the user's cache folder."""
    chosen = os.environ.get(INDUCTOR_VARIABLE)
    if chosen and chosen.startswith(f"{tempfile.gettempdir()}/torchinductor_"):
        chosen = None  # torch sets its own default in the environment when some of its modules are imported
    folder = Path(chosen).absolute() if chosen else cache_dir() / "compiled" / _platform_key()
    if problem := _prepare(folder):
        folder = Path(tempfile.mkdtemp(prefix="muralist-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    note = f"They are not cached: {problem}. Set {INDUCTOR_VARIABLE} to a private folder." if problem else ""
    removed = "" if chosen or problem else _remove_unused(folder)
    os.environ[INDUCTOR_VARIABLE] = str(folder)
    os.environ.setdefault(TRITON_VARIABLE, str(folder / "triton"))  # our kernels compile before torch would set it
    _key_by_kernel_sources()
    return CompileCache(folder, note, removed)


def _remove_unused(current: Path) -> str:
    """Remove caches of other versions that were not used for a month; say so, or return an empty text.

    Renaming them aside first gives each to one of the processes that start together, and never half of one to any.
    """
    with suppress(OSError):
        os.utime(current)  # its last use: reading a cache leaves no other trace
    aside: Path | None = None
    removed = 0
    for folder in (*current.parent.iterdir(), *current.glob("bytecode*")):
        with suppress(OSError):
            status = folder.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and _OLD_CACHE.fullmatch(folder.name)
            if mine and folder != current and time.time() - _last_change(folder) > _UNUSED_DAYS * 86400:
                aside = aside or Path(tempfile.mkdtemp(prefix="removed-", dir=current.parent))
                folder.rename(aside / str(removed))
                removed += 1
    if aside:
        shutil.rmtree(aside, ignore_errors=True)
    caches = "cache" if removed == 1 else "caches"
    where = f"in {current.parent}, unused for {_UNUSED_DAYS} days"
    return f"Removed {removed} {caches} of other versions {where}." if removed else ""


def _last_change(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import without garbage collection and exclude imported objects from later collections.

    torch, transformers and diffusers create millions of objects that live until the process ends.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if enabled:
            gc.enable()


def _key_by_kernel_sources() -> None:
    """Add the source of our custom operators to torch's cache key: torch does not look inside them."""
    from torch.compiler import config

    package = Path(__file__).parents[1]
    sources = sorted(file for pattern in _KERNEL_SOURCES for file in package.glob(pattern))
    config.cache_key_tag = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def _platform_key() -> str:
    """Name versions and CPU: a home folder may be shared by machines that cannot run each other's code."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").split("\n\n", 1)[0].splitlines()
        cpu = "".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        cpu = platform.processor()
    digest = hashlib.sha256(cpu.encode()).hexdigest()[:8]
    return f"torch-{version('torch')}-python-{platform.python_version()}-{platform.machine()}-{digest}"


def _prepare(folder: Path) -> str:
    """Create the folder with mode 0700 if needed; return why it cannot hold code, or an empty text."""
    try:
        for place in (*reversed(folder.parents), folder):  # `parents=True` would create parents with the default mode
            if not place.is_dir():
                place.mkdir(mode=0o700, exist_ok=True)
        return _untrusted(folder) or ("" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable")
    except OSError as error:
        return f"{error.filename or folder} cannot be used ({error.strerror})"


def _untrusted(folder: Path) -> str:
    """Return why another user could have put code into the folder, or an empty text."""
    real = folder.resolve()
    for place in (real, *real.parents, *folder.parents):
        status = place.stat()
        if status.st_uid not in (os.geteuid(), 0) or (place == real and status.st_uid != os.geteuid()):
            return f"{place} belongs to another user"
        others = status.st_mode & (stat.S_IWOTH if status.st_uid == status.st_gid else stat.S_IWOTH | stat.S_IWGRP)
        if others and (place == real or not status.st_mode & stat.S_ISVTX):
            return f"other users can write to {place}"
    return ""
