"""The GPUs of this machine as the driver's own program tells of them, which needs no CUDA context and takes no memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
_FAREWELL = 1.0  # seconds
_PLAIN = ("--format=csv,noheader,nounits",)
_MEGABYTE = 2**20
PATIENCE = 30.0  # seconds; a driver that nobody keeps awake takes several


@dataclass(frozen=True)
class Process:
    """A program that holds memory of a GPU."""

    number: int
    name: str
    bytes: int


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    uuid: str
    name: str
    total: int
    used: int
    driver: str
    capability: float
    processes: tuple[Process, ...] = ()

    @property
    def free(self) -> int:
        """Bytes that nobody holds."""
        return self.total - self.used


@dataclass(frozen=True)
class Gpus:
    """What the driver said: the GPUs by index, or why there is nothing to say."""

    listed: tuple[Gpu, ...] = ()
    cuda: str = ""
    """The newest CUDA this driver can run."""
    trouble: str = ""
    """Why the driver could not be asked, where it is there."""
    present: bool = field(default=True)
    """Whether there is a driver at all."""

    def visible(self, environment: Mapping[str, str], ids: Sequence[int] = ()) -> list[Gpu]:
        """The GPUs that a program may use, in its own order; `ids` choose among them."""
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            found = list(self.listed)
        else:
            found = []
            for entry in (entry.strip() for entry in chosen.split(",")):
                gpu = next(
                    (g for g in self.listed if entry == str(g.index) or (entry and g.uuid.startswith(entry))), None
                )
                if gpu is None:
                    break  # CUDA too ignores everything from the first entry on that is none
                found.append(gpu)
        return [found[number] for number in ids if number < len(found)] if ids else found


def ask_driver(patience: float = PATIENCE) -> Gpus:
    """Ask `nvidia-smi`; a machine without it has no NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus(present=False)
    about_gpus = f"--query-gpu={','.join(_FIELDS)}"
    about_processes = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    # Side by side: each may take a second, in which a command that is about to start does nothing else.
    asked = [_ask(program, about_gpus, *_PLAIN), _ask(program, about_processes, *_PLAIN), _ask(program)]
    until = time.monotonic() + patience
    try:
        rows, busy = (_rows(_answer(process, until)) for process in asked[:2])
        header, _ = asked[2].communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Gpus(trouble=f"nvidia-smi did not answer within {patience:g} s")
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        return Gpus(trouble=f"nvidia-smi ended with status {error.returncode}: {said[0] if said else 'no word'}")
    finally:
        for process in asked:
            _end(process)
    listed = [_gpu(row, busy) for row in rows if len(row) == len(_FIELDS)]
    version = re.search(r"CUDA Version:\s*(\d+\.\d+)", header)
    return Gpus(tuple(sorted(listed, key=lambda gpu: gpu.index)), version[1] if version else "")


def _ask(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str], until: float) -> str:
    said, complaint = process.communicate(timeout=max(0.0, until - time.monotonic()))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, said, complaint)
    return said


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # one that the driver holds cannot be ended by anybody
        process.wait(_FAREWELL)
    for stream in (process.stdout, process.stderr):
        assert stream
        stream.close()


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _gpu(row: list[str], busy: list[list[str]]) -> Gpu:
    index, uuid, name, total, used, driver, capability = row
    holders = tuple(
        Process(int(cells[1]), ",".join(cells[2:-1]), _megabytes(cells[-1]))
        for cells in busy
        if len(cells) >= 4 and cells[0] == uuid and cells[1].isdecimal()
    )
    return Gpu(int(index), uuid, name, _megabytes(total), _megabytes(used), driver, _number(capability), holders)


def _megabytes(cell: str) -> int:
    return int(_number(cell) * _MEGABYTE)


def _number(cell: str) -> float:
    """A number, or 0 for [N/A], as the parts of a divided GPU say."""
    try:
        return float(cell)
    except ValueError:
        return 0.0
