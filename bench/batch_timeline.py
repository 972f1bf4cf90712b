"""Profile a batch of generation: text, denoising and decoding on the GPU, host time and host synchronizations.

python bench/batch_timeline.py NAME MODEL [--second] [--tiny]        a model of bench/generate_speed.py

Batches follow each other as in a worker: prompts are encoded, a batch is launched, the previous one fetched. With
--second only loading and the first batch are timed, with the compile cache of an earlier run. Writes
bench/results/NAME.json.
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

from bench.generate_speed import MODELS, Bench, Case, _no_callback  # noqa: E402
from bench.idle_places import idle_places  # noqa: E402
from bench.kernel_classes import profiled  # noqa: E402
from bench.measure_training import RESULTS, hardware  # noqa: E402
from bench.turns import alone  # noqa: E402

from muralist.core import compile_cache  # noqa: E402
from muralist.core.run_dir import atomic_write_json  # noqa: E402
from muralist.generate.diffusers_pipeline import DiffusersPipeline  # noqa: E402
from muralist.generate.optimizations import Optimizations  # noqa: E402
from muralist.generate.pipeline import make_deterministic  # noqa: E402

IMPORTS = time.perf_counter() - started
BATCHES = 4


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    begun = time.perf_counter()
    result = work()
    return round(time.perf_counter() - begun, 3), result


def synchronizations(work: Callable[[], Any]) -> dict[str, int]:
    """Return the lines of Python at which the host synchronizes with the GPU, with counts."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return dict(Counter(f"{Path(wait.filename).name}:{wait.lineno}" for wait in waits).most_common())


def timeline(case: Case, pipeline: DiffusersPipeline) -> dict[str, Any]:
    """Time consecutive batches, and profile one."""
    device, size, count = case.bench.device, case.size, case.batch
    result: dict[str, Any] = {"batch": count}
    if device.type == "cuda":
        requests = case._requests(count, 200)
        result["synchronizations in text"] = synchronizations(lambda: pipeline.prepare(requests))
        result["synchronizations in a batch"] = synchronizations(
            lambda: pipeline.generate(requests, size, _no_callback)
        )

    def batches(first: int) -> tuple[list[dict[str, float]], list[float]]:
        rows, pending, ends = [], None, []
        for number in range(first, first + BATCHES):
            requests = case._requests(count, 300 + number * count)
            text, _ = timed(lambda requests=requests: pipeline.prepare(requests))
            handed, begun = timed(lambda requests=requests: pipeline.generate_async(requests, size, _no_callback))
            fetched, _ = timed(pending.wait) if pending is not None else (0.0, None)
            rows.append({"text": text, "launch": handed, "fetch of the previous batch": fetched})
            pending = begun
            ends.append(time.perf_counter())
        assert pending is not None
        pending.wait()
        return rows, ends

    rows, ends = batches(0)
    result["seconds of each batch"] = rows
    result["images/s"] = round(count * (BATCHES - 2) / (ends[-1] - ends[1]), 4)
    if device.type == "cuda":
        result["GPU idle"] = idle_places(lambda: batches(BATCHES))
    requests = case._requests(count)
    result["profile of its text"] = profiled(lambda: pipeline.prepare(requests), device)
    result["profile of a batch without text"] = profiled(
        lambda: pipeline.generate(requests, size, _no_callback), device
    )
    result["profile of its decoding"] = case._decoding(pipeline)
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
    make_deterministic(device)
    compile_cache.use_compile_cache()
    folder = Path(tempfile.gettempdir()) / "muralist-bench"
    folder.mkdir(exist_ok=True)
    target = RESULTS / f"{options.name}.json"
    content = {"command": " ".join(["python", *sys.argv]), "hardware": hardware(), "torch": torch.__version__}
    bench = Bench(device, options.tiny, float("inf"), target, folder, content | {"models": {}})
    case = Case(bench, options.model)
    if not case.path.exists():
        case._build()
    optimizations = Optimizations(compiled=not options.tiny)
    loading, pipeline = timed(lambda: DiffusersPipeline.load(case._settings(), device, optimizations=optimizations))
    requests = case._requests(case.batch, 50)
    text, _ = timed(lambda: pipeline.prepare(requests))
    first, _ = timed(lambda: pipeline.generate(requests, case.size, _no_callback))
    found = {"importing": round(IMPORTS, 1), "loading": loading, "first text": text, "first batch": first}
    content["seconds"] = found
    if not options.second:
        with alone():
            content |= timeline(case, pipeline)
    atomic_write_json(target, content)
    print(content, flush=True)


if __name__ == "__main__":
    main()
