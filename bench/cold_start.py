"""Time the first and the second start of a command to its first image or step, beginning with an empty compile cache.

python bench/cold_start.py NAME generate --model_path hunyuan --height 1024 --width 1024 --batch_size 4
python bench/cold_start.py NAME train --data_path driving_world --model JiT-B/4 --img_size 64 ...

A --model_path that is a name of bench/generate_speed.py is built first, with random weights. The compile cache and the
output are in new folders; the second start finds the cache only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.generate_speed import MODELS
from bench.measure_training import RESULTS, hardware, versions

from muralist.core.run_dir import atomic_write_json

_POLL = 0.02  # seconds
_ROWS, _STEPS = 8, 3


def has_output(command: str, output: Path) -> bool:
    """Return whether the first image, or the metrics of the first step, exist."""
    if command == "generate":
        return any(output.glob("*.png"))
    return any(path.stat().st_size for path in output.glob("*/metrics.jsonl"))


def start(command: str, flags: list[str], output: Path, cache: Path) -> dict[str, Any]:
    """Return the seconds from the start of the process to its first output, and its messages about compilation."""
    arguments = [sys.executable, "-m", "muralist", command, *flags]
    if command == "generate":
        table = output.with_suffix(".csv")
        table.write_text("prompt\n" + "".join(f"a quiet street with {cars} parked cars\n" for cars in range(_ROWS)))
        arguments += ["--prompts_csv", str(table), "--output_dir", str(output)]
    else:
        arguments += ["--results_dir", str(output), "--max_steps", str(_STEPS), "--log_every", "1"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log)
        while process.poll() is None and not has_output(command, output):
            time.sleep(_POLL)
        waited = time.perf_counter() - begun
        status = process.wait()
        log.seek(0)
        text = log.read()
    if status:
        sys.exit(f"{text}\nThe command ended with status {status}.")
    own = re.search(r"the first after ([\d.]+) s", text)
    return {
        "seconds to the first": round(waited, 1),
        "as the command says, without starting Python": float(own[1]) if own else None,
        "compiling": [line.strip() for line in text.splitlines() if "compiled" in line.lower()],
    }


def main(name: str, command: str, flags: list[str]) -> None:
    """Start the command twice and write the result."""
    given = " ".join(["python bench/cold_start.py", name, command, *flags])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for place, flag in enumerate(flags):
            if flag in MODELS and flags[place - 1] == "--model_path":
                MODELS[flag].build(folder / "model", False)
                flags[place] = str(folder / "model")
        starts = []
        for which in ("first", "second"):
            starts.append(start(command, flags, folder / which, folder / "compiled"))
            print(which, starts[-1], flush=True)
    content = {
        "command": given,
        "hardware": hardware(),
        "versions": versions(),
        "first start": starts[0],
        "second start": starts[1],
        "second / first": round(starts[1]["seconds to the first"] / starts[0]["seconds to the first"], 3),
    }
    atomic_write_json(RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
