"""How long the first and the second start of the same command take to their first picture or step, with an empty cache.

python bench/cold_start.py NAME generate --model_path hunyuan --height 1024 --width 1024 --batch_size 4
python bench/cold_start.py NAME train --data_path driving_world --model JiT-B/4 --img_size 64 ...

A --model_path that is a name of bench/generate_speed.py is built first, with random weights. What is compiled goes to a new
folder, and so does what is made; the second start finds the former only.
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

from muralist.runfolder import write_json

_LOOK = 0.02  # seconds
_ROWS, _STEPS = 8, 3


def first_sign(command: str, output: Path) -> bool:
    """Whether the first picture, or the first step's line, is there."""
    if command == "generate":
        return any(output.glob("*.png"))
    return any(path.stat().st_size for path in output.glob("*/metrics.jsonl"))


def start(command: str, flags: list[str], output: Path, cache: Path) -> dict[str, Any]:
    """Seconds from the start of the process to its first sign, and what it said about compiling."""
    words = [sys.executable, "-m", "muralist", command, *flags]
    if command == "generate":
        table = output.with_suffix(".csv")
        table.write_text("prompt\n" + "".join(f"a quiet street with {cars} parked cars\n" for cars in range(_ROWS)))
        words += ["--prompts_csv", str(table), "--output_dir", str(output)]
    else:
        words += ["--results_dir", str(output), "--max_steps", str(_STEPS), "--log_every", "1"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, env=environment, stdout=said, stderr=said)
        while process.poll() is None and not first_sign(command, output):
            time.sleep(_LOOK)
        waited = time.perf_counter() - begun
        status = process.wait()
        said.seek(0)
        text = said.read()
    if status:
        sys.exit(f"{text}\nThe command ended with status {status}.")
    own = re.search(r"the first after ([\d.]+) s", text)
    return {
        "seconds to the first": round(waited, 1),
        "as the command says, without starting Python": float(own[1]) if own else None,
        "compiling": [line.strip() for line in text.splitlines() if "compiled" in line.lower()],
    }


def main(name: str, command: str, flags: list[str]) -> None:
    """Start twice and write the result."""
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
    write_json(RESULTS / f"{name}.json", content)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
