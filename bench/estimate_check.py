"""Accuracy of the estimates: probe this machine, train for real, and record the error of both.

python bench/estimate_check.py NAME [--model JiT-B/4 --img_size 64 --batch_size 64 --max_steps 2000 ...]

The first estimate is the probe: tokens per second before training. The second is the forecast of the run, made in its first
steps: its seconds, including checkpoints and samples. Both must be within 10%. Further flags are those of `muralist train`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure_training import RESULTS, hardware

from muralist.cli import main
from muralist.core.run_dir import atomic_write_json
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import load
from muralist.tools.probe import probe

LIMIT = 0.10
DEFAULTS = ["--data_path", "driving_world", "--max_samples", "4096", "--epochs", "100000", "--max_steps", "2000",
            "--ckpt_every", "500", "--use_amp", "--log_every", "50", "--run_name", "checked"]  # fmt: skip


def check(name: str, arguments: list[str]) -> int:
    """Estimate, train, compare; returns 1 if either estimate was off by more than the limit."""
    words = [*DEFAULTS, *arguments]
    settings = load(TrainSettings, words, TRAIN_FLAT_NAMES)
    assert isinstance(settings.model.img_size, int)
    probed = probe(settings.model.name, settings.model.img_size, settings.data.batch_size, 30.0, time.perf_counter)
    with tempfile.TemporaryDirectory() as results:
        if status := main(["train", *words, "--results_dir", results]):
            return status
        run = Path(results) / "checked"
        forecast: dict[str, Any] = json.loads((run / "forecast.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if "off" not in forecast:
        print("The run was stopped before its end: nothing to compare.", file=sys.stderr)
        return 1
    real = median(line["train/tokens_per_second"] for line in lines[len(lines) // 10 :])
    expected = probed.per_gpu()[1]
    off = {"probe": round(expected / real - 1, 4), "run": forecast["off"]}
    result = {
        "command": " ".join(["python bench/estimate_check.py", name, *arguments]),
        "hardware": hardware(),
        "tokens/s, probed": [round(value) for value in probed.per_gpu()],
        "tokens/s, trained": round(real),
        "forecast": forecast,
        "off": off,
        "limit": LIMIT,
    }
    atomic_write_json(RESULTS / f"{name}.json", result)
    print(json.dumps(result, indent=1))
    return int(max(map(abs, off.values())) > LIMIT)


if __name__ == "__main__":
    sys.exit(check(sys.argv[1], sys.argv[2:]))
