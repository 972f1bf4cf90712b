"""Records of measurements under bench/results: what was measured, on which hardware, with which versions and command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.measure_training import RESULTS, hardware, versions

from muralist.core.hardware import available_cpus
from muralist.core.run_dir import atomic_write_json


def write_record(name: str, command: str, content: dict[str, Any]) -> Path:
    """Write bench/results/NAME.json."""
    machine = hardware() | {"cpu": _cpu_model(), "cores": available_cpus(), "load": round(os.getloadavg()[2], 1)}
    path = RESULTS / f"{name}.json"
    atomic_write_json(path, {"command": command, "hardware": machine, "versions": versions(), **content})
    return path


def read_record(name: str) -> dict[str, Any]:
    """Return the content of bench/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text()
    return text.partition("model name")[2].partition("\n")[0].strip("\t :")
