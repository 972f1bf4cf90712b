"""Where the time of a batch of pictures goes: text, steps and decoding on the card, what the host does, where it waits.

python bench/batch_timeline.py NAME MODEL [--second] [--tiny]        a model of bench/generate_speed.py

Batches follow each other as in a worker: text is prepared, a batch handed to the card, the one before fetched. With --second
only loading and the first batch are timed: run it again, and what was compiled is found. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

started = time.perf_counter()

import torch  # noqa: E402

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.generate_speed import MODELS, Bench, Case, _no_beat  # noqa: E402
from bench.idle_places import idle_places  # noqa: E402
from bench.kernel_classes import profiled  # noqa: E402
from bench.measure_training import RESULTS, hardware  # noqa: E402
from bench.turns import alone  # noqa: E402

from muralist import compiled_code  # noqa: E402
from muralist.generate.diffusers_painter import DiffusersPainter  # noqa: E402
from muralist.generate.pipelines import settle  # noqa: E402
from muralist.generate.tuned import Tuning  # noqa: E402
from muralist.runfolder import write_json  # noqa: E402

IMPORTS = time.perf_counter() - started
BATCHES = 4


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until it returns, and what it returns."""
    begun = time.perf_counter()
    result = work()
    return round(time.perf_counter() - begun, 3), result


def places_of_waiting(work: Callable[[], Any]) -> dict[str, int]:
    """Where the host waits for the card: lines of Python, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in said if "synchroniz" in str(warning.message)]
    return dict(Counter(f"{Path(wait.filename).name}:{wait.lineno}" for wait in waits).most_common())


def timeline(case: Case, painter: DiffusersPainter) -> dict[str, Any]:
    """Batches one after the other, and one of them under the profiler."""
    device, size, count = case.bench.device, case.size, case.batch
    result: dict[str, Any] = {"batch": count}
    if device.type == "cuda":
        orders = case._orders(count, 200)
        result["the host waits in text"] = places_of_waiting(lambda: painter.prepare(orders))
        result["the host waits in a batch"] = places_of_waiting(lambda: painter.paint(orders, size, _no_beat))

    def batches(first: int) -> tuple[list[dict[str, float]], list[float]]:
        rows, flying, ends = [], None, []
        for number in range(first, first + BATCHES):
            orders = case._orders(count, 300 + number * count)
            text, _ = timed(lambda orders=orders: painter.prepare(orders))
            handed, begun = timed(lambda orders=orders: painter.begin(orders, size, _no_beat))
            fetched, _ = timed(flying.wait) if flying is not None else (0.0, None)
            rows.append({"text": text, "handed to the card": handed, "the one before fetched": fetched})
            flying = begun
            ends.append(time.perf_counter())
        assert flying is not None
        flying.wait()
        return rows, ends

    rows, ends = batches(0)
    result["seconds of each batch"] = rows
    result["images/s"] = round(count * (BATCHES - 2) / (ends[-1] - ends[1]), 4)
    if device.type == "cuda":
        result["the card idle"] = idle_places(lambda: batches(BATCHES))
    orders = case._orders(count)
    result["profile of its text"] = profiled(lambda: painter.prepare(orders), device)
    result["profile of a batch, text apart"] = profiled(lambda: painter.paint(orders, size, _no_beat), device)
    result["profile of its decoding"] = case._decoding(painter)
    return result


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--second", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    settle(device)
    compiled_code.keep()
    folder = Path(tempfile.gettempdir()) / "muralist-bench"
    folder.mkdir(exist_ok=True)
    target = RESULTS / f"{options.name}.json"
    content = {"command": " ".join(["python", *sys.argv]), "hardware": hardware(), "torch": torch.__version__}
    bench = Bench(device, options.tiny, float("inf"), target, folder, content | {"models": {}})
    case = Case(bench, options.model)
    if not case.path.exists():
        case._build()
    tuning = Tuning(compiled=not options.tiny)
    loading, painter = timed(lambda: DiffusersPainter.load(case._settings(), device, tuning=tuning))
    orders = case._orders(case.batch, 50)
    text, _ = timed(lambda: painter.prepare(orders))
    first, _ = timed(lambda: painter.paint(orders, case.size, _no_beat))
    found = {"importing": round(IMPORTS, 1), "loading": loading, "first text": text, "first batch": first}
    content["seconds"] = found
    if not options.second:
        with alone():
            content |= timeline(case, painter)
    write_json(target, content)
    print(content, flush=True)


if __name__ == "__main__":
    main()
