"""The folder of a run, and atomic writes: files are written aside, flushed and renamed, so none is ever partial."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from muralist.core.errors import UserError
from muralist.core.lock import hold_lock

_TORCH_WRITE_ERRORS = ("inline_container.cc", "PytorchStreamWriter")


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file completely or not at all: aside, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with aside.open("xb") as file:  # fails on an existing link instead of following it
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk does not name the file
        raise
    finally:
        aside.unlink(missing_ok=True)


def open_no_follow(path: Path, mode: str, encoding: str | None = None, buffering: int = -1) -> IO[Any]:
    """Open a file for appending; refuse a symbolic link, which a folder from elsewhere may contain."""
    return open(path, mode, buffering, encoding=encoding, opener=_open_no_follow)


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def atomic_write_json(path: Path, content: Any) -> None:
    """Write a readable JSON file atomically."""
    atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def fsync_dir(path: Path) -> None:
    """Flush a folder, so that renames inside it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is flushed to disk and renamed to `final` at the end; after an error nothing is left.

    Its files get the permissions of new files: libraries such as safetensors write files that only the owner may read.
    With `replace`, an existing folder is replaced, and put back if the rename fails.
    """
    final = final.absolute()
    temporary, old = (final.with_name(f".{final.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for path in temporary.rglob("*"):
            if path.is_dir():
                fsync_dir(path)
                continue
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_dir(temporary)
        if final.exists() and replace:
            final.replace(old)
        temporary.replace(final)
        fsync_dir(final.parent)
    except UserError:
        raise
    except Exception as error:
        if old.exists() and not final.exists():
            old.replace(final)
        raise disk_write_error(find_os_error(error), final) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)


def find_os_error(error: BaseException) -> OSError:
    """Return the OSError behind an error of safetensors or torch; re-raise any other error, which is a bug."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError):
            return behind
        if found := re.search(r"\(os error (\d+)\)", str(behind)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        behind = behind.__cause__ or behind.__context__
    if any(text in str(error) for text in _TORCH_WRITE_ERRORS):  # from another process, without its cause
        return OSError(errno.EIO, "incomplete write")
    raise error


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error means a full disk or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_write_error(error: OSError, path: Path) -> UserError:
    """Return the error message for a failed write."""
    if is_disk_full(error):
        return UserError(
            f"No space left on the disk that holds {path}.",
            "The file was not written; everything written before it is intact.",
            "Free some space and run the same command again to resume.",
        )
    return UserError(f"Cannot write {path}: {error.strerror}.", fix="Check that the folder exists and is writable.")


def sanitize_name(text: str) -> str:
    """Replace characters that a run's name may not contain by dashes."""
    return re.sub(r"[^\w.+=@-]+", "-", text).lstrip(".")


@dataclass(frozen=True)
class RunDir:
    """The folder of one run and the paths inside it."""

    root: Path

    @classmethod
    def named(cls, results_dir: str, name: str) -> RunDir:
        """Return the folder of a run; raise if the name is not a plain folder name."""
        if not name or sanitize_name(name) != name:
            raise UserError(
                f"--run_name {name!r} is not a valid folder name.", fix="Use letters, digits and . _ + = @ - only."
            )
        return cls(Path(results_dir) / name)

    @property
    def config(self) -> Path:
        """The settings, readable by `--config`."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, and `latest`, a text file with the name of one."""
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        """The samples of every checkpoint."""
        return self.root / "samples"

    @property
    def log(self) -> Path:
        """The log."""
        return self.root / "logs" / "train.log"

    @property
    def metrics(self) -> Path:
        """One JSON object per optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def heartbeats(self) -> Path:
        """One heartbeat file per rank."""
        return self.root / "heartbeats"

    @property
    def shapes(self) -> Path:
        """Height and width of every image, measured for --multireso."""
        return self.root / "picture_shapes.npz"

    @property
    def forecast(self) -> Path:
        """The time estimate of the run, and its error at the end."""
        return self.root / "forecast.json"

    @property
    def profile(self) -> Path:
        """Profiler traces of --profile."""
        return self.root / "profile"

    @property
    def save_request(self) -> Path:
        """Touch this file to request a checkpoint at the next step."""
        return self.root / "save"

    def create(self) -> None:
        """Create the folders."""
        try:
            for folder in (self.checkpoints, self.samples, self.log.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_write_error(error, self.root) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against a second trainer; the lock ends with its process."""

        def in_use(owner: str) -> UserError:
            return UserError(
                f"The run {self.root} is being trained by {owner}.",
                fix="Wait for it, stop it, or use another --run_name.",
            )

        path = self.root / "lock"
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_lock(path, in_use))
            except OSError as error:
                raise disk_write_error(error, path) from None
            yield
