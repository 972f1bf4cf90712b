"""Two versions of the code in alternating turns on one GPU: training steps, JiT sampling, `muralist generate` with Wan.

    python bench/compare_versions.py bench/results/NAME.json --old OLD_TREE --new NEW_TREE [--items train256 wan ...]

Each tree is a checkout with its own `src` and `bench`. A tree's process builds and compiles once and then waits for its
turns, so that both versions see the same machine, temperature and clocks. The record is written after every item. With
--tiny, small models try the script itself on a CPU.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRAINING = {"train256": ("JiT-B/4", 64, 256), "train64": ("JiT-B/4", 64, 64)}
SAMPLING = {"sample64": ("JiT-B/4", 64, 64), "sample256": ("JiT-B/4", 64, 256)}
WAN = "wan"
TINY = ("JiT-T/8", 32, 2)
_SAMPLER_STEPS, _TRAINING_STEPS, _SAMPLER_BATCHES, _FIRST_LOSSES = 50, 30, 2, 5
_WAN_BATCH, _WAN_BATCHES = 8, 7
_GPU_FIELDS = "clocks.sm,power.draw,temperature.gpu"
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "numpy")


def worker(item: str, tiny: bool) -> None:
    """Build one item, then time one turn for every line of standard input."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if item in TRAINING:
        from bench.train_speed import our_step

        model, size, batch = TINY if tiny else TRAINING[item]
        options = ["graphs"] if device.type == "cuda" else []  # as `muralist train` on one GPU
        run, count = our_step(model, size, batch, device, options), _TRAINING_STEPS
        more = {"losses": [float(run()) for _ in range(_FIRST_LOSSES)]}
    else:
        from bench.jit_generate_speed import our_sampler

        model, size, batch = TINY if tiny else SAMPLING[item]
        run, count = our_sampler(model, size, batch, device, _SAMPLER_STEPS), _SAMPLER_BATCHES
        more = {}
    for _ in range(2):
        run()
    _answer(more)
    for _ in sys.stdin:
        run()  # raises the clocks
        _finish(device)
        started = time.perf_counter()
        for _ in range(count):
            run()
        _finish(device)
        seconds = (time.perf_counter() - started) / count
        _answer({"images/s": round(batch / seconds, 3), "ms": round(1000 * seconds, 3)})


def _finish(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


class TreeWorker:
    """The process of one tree for one item."""

    def __init__(self, tree: Path, item: str, tiny: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", item, *(["--tiny"] if tiny else [])]
        self.process = subprocess.Popen(
            command, cwd=tree, env=tree_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.process.args!r} ended with status {self.process.wait()}")

    def turn(self) -> dict[str, Any]:
        """Time one turn."""
        assert self.process.stdin is not None
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        with gpu_state() as state:
            answer = self.read()
        return answer | {"GPU": state}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def tree_environment(tree: Path) -> dict[str, str]:
    """Return the environment that makes a tree's source win, with compile caches of its own."""
    paths = [str(tree / "src"), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    digest = hashlib.sha256(str(tree.resolve()).encode()).hexdigest()[:8]
    cache = Path(tempfile.gettempdir()) / f"compare-{digest}"
    caches = {
        "XDG_CACHE_HOME": cache,
        "TORCHINDUCTOR_CACHE_DIR": cache / "inductor",
        "TRITON_CACHE_DIR": cache / "triton",
    }
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | {name: str(path) for name, path in caches.items()}


def nvidia_smi(fields: str, options: str = "") -> str:
    """Ask for fields of the first GPU; empty without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={fields}", f"--format=csv,noheader{options}"]
    return next(iter(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()), "")


@contextmanager
def gpu_state() -> Iterator[dict[str, float]]:
    """Sample clocks, power and temperature meanwhile; medians are filled in at the end."""
    rows: list[list[float]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.3):
            if found := nvidia_smi(_GPU_FIELDS, ",nounits"):
                rows.append([float(value) for value in found.split(",")])

    thread = threading.Thread(target=sample)
    thread.start()
    state: dict[str, float] = {}
    try:
        yield state
    finally:
        ended.set()
        thread.join()
        for name, values in zip(_GPU_FIELDS.split(","), zip(*rows, strict=True), strict=False):
            state[name] = statistics.median(values)


def compare(item: str, trees: dict[str, Path], turns: int, tiny: bool) -> dict[str, Any]:
    """Compare training steps or sampling; both processes compile at the same time."""
    workers = {name: TreeWorker(tree, item, tiny) for name, tree in trees.items()}
    first = {name: each.read() for name, each in workers.items()}
    rows = [{"tree": name} | each.turn() for _ in range(turns) for name, each in workers.items()]
    for each in workers.values():
        each.close()
    model, size, batch = TINY if tiny else (TRAINING | SAMPLING)[item]
    result: dict[str, Any] = {"case": f"{model}@{size}x{batch}", "turns": rows}
    if item in TRAINING:
        result["losses of the first steps"] = {name: answer["losses"] for name, answer in first.items()}
    return result


def compare_wan(trees: dict[str, Path], turns: int, folder: Path, tiny: bool) -> dict[str, Any]:
    """Compare `muralist generate`; the first command of each tree fills its compile cache and is not counted."""
    model = folder / "wan"
    build = (
        f"from pathlib import Path; from bench import full_wan; full_wan.build_full_wan(Path({str(model)!r}), {tiny})"
    )
    subprocess.run([sys.executable, "-c", build], env=tree_environment(trees["new"]), cwd=trees["new"], check=True)
    table = folder / "prompts.csv"
    rows = "".join(f"street number {row} at dusk\n" for row in range(_WAN_BATCH * _WAN_BATCHES))
    table.write_text("prompt\n" + rows)
    results = []
    for turn in range(turns + 1):
        for name, tree in trees.items():
            found = _generate(name, tree, model, table, folder / f"{name}-{turn}", 64 if tiny else None)
            results += [found] if turn else []
    old, new = (folder / f"{name}-{turns}" for name in trees)
    names = sorted(file.name for file in old.glob("*.png"))
    same, _, _ = filecmp.cmpfiles(old, new, names, shallow=False)
    return {
        "case": f"{'tiny Wan' if tiny else 'Wan-2.1-1.3B@480x832'}x{_WAN_BATCH}",
        "turns": results,
        "images, old beside new": {"images": len(names), "same bytes": len(same)},
    }


def _generate(name: str, tree: Path, model: Path, table: Path, output: Path, side: int | None) -> dict[str, Any]:
    flags = {"prompts_csv": table, "output_dir": output, "model_path": model, "batch_size": _WAN_BATCH}
    flags |= {"height": side, "width": side} if side else {}
    command = [sys.executable, "-m", "muralist", "generate"]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    started = time.time()
    with gpu_state() as state:
        done = subprocess.run(
            command, cwd=tree, env=tree_environment(tree), capture_output=True, text=True, check=False
        )
    ended = time.time()
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    written = sorted(file.stat().st_mtime - started for file in output.glob("*.png"))
    batches = [round(seconds, 2) for seconds in written[_WAN_BATCH - 1 :: _WAN_BATCH]]
    return {
        "tree": name,
        "images/s": round(_WAN_BATCH * (len(batches) - 1) / (batches[-1] - batches[0]), 4),
        "seconds to the first batch": batches[0],
        "seconds from start to end": round(ended - started, 1),
        "seconds to the last file of each batch": batches,
        "GPU": state,
    }


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Add medians, their ratio, and the spread of each version's turns."""
    rates = {name: [row["images/s"] for row in result["turns"] if row["tree"] == name] for name in ("old", "new")}
    medians = {name: round(statistics.median(values), 4) for name, values in rates.items()}
    spread = {name: round((max(values) - min(values)) / medians[name], 4) for name, values in rates.items()}
    return result | {
        "images/s, median": medians,
        "new/old": round(medians["new"] / medians["old"], 4),
        "spread": spread,
    }


def tree_versions(tree: Path) -> dict[str, str]:
    """Return the versions of packages and of the tree."""
    code = (
        f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {_PACKAGES}}}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    own = next(line for line in (tree / "pyproject.toml").read_text().splitlines() if line.startswith("version"))
    return {"python": sys.version.split()[0], **json.loads(found), "muralist": own.split('"')[1]}


def main() -> None:
    """Compare the items and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--items", nargs="+", default=[*TRAINING, *SAMPLING, WAN])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.tiny)
        return
    if not (options.record and options.old and options.new):
        parser.error("give the record's path, --old and --new")
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    content: dict[str, Any] = {
        "about": "Two versions in alternating turns on one machine; see bench/compare_versions.py.",
        "machine": nvidia_smi("name,driver_version,memory.total,power.limit") or "no GPU",
        "versions": {name: tree_versions(tree) for name, tree in trees.items()},
        "command": "python " + " ".join(sys.argv),
        "items": {},
    }
    if options.record.is_file():
        content["items"] = json.loads(options.record.read_text())["items"]
    for item in options.items:
        if item == WAN:
            with tempfile.TemporaryDirectory() as folder:
                result = compare_wan(trees, max(2, options.turns - 1), Path(folder), options.tiny)
        else:
            result = compare(item, trees, options.turns, options.tiny)
        content["items"][item] = summarize(result)
        options.record.write_text(json.dumps(content, indent=1) + "\n")
        print(item, content["items"][item]["images/s, median"], content["items"][item]["new/old"], flush=True)


if __name__ == "__main__":
    main()
