"""The standard benchmarks: muralist beside the official JiT code, plain diffusers and pytorch-fid, in alternating rounds.

    python bench/standard.py RECORD.json --official JIT_CHECKOUT --pytorch_fid CHECKOUT --weights INCEPTION [--items ...]
    python bench/standard.py RECORD.json --old TREE ...           beside another version of muralist as well

Every side of an item is a process that builds and compiles once and then waits for its rounds: ours, theirs, ours, theirs.
So all sides see the same machine, temperature and clocks; the second of two runs in sequence would be on a warmer GPU.
Each round records clocks, power, temperature and the matmul rate right before it. `muralist generate` is a command of its
own in every round. Medians and ratios are computed from the rounds. The record is written after every item, and items of
earlier runs are kept. --tiny tries the script with small models, also on a CPU. `scripts/benchmark_tables.py` writes the
tables of README and docs from the record.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TREE = Path(__file__).resolve().parents[1]
OURS, BASELINE, OLD, ONE_BY_ONE = "muralist", "baseline", "old", "muralist, one at a time"
SOLVER_STEPS, GENERATION_STEPS, GENERATION_GUIDANCE = 50, 20, 7.5
PROMPT = "a quiet street with {} parked cars and {} trees in the rain"
_GPU_FIELDS = "clocks.sm,power.draw,temperature.gpu"
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "numpy")


class Item(NamedTuple):
    """One benchmark: what is timed, on which model, image size and batch."""

    kind: str  # train, finetune, sample, generate, lengths (prompts of various lengths) or fid
    model: str
    size: tuple[int, int]
    batch: int
    calls: int  # of the timed work in a round; see `timed_calls`
    precision: str = "bf16"
    steps: int = GENERATION_STEPS
    guidance: float = GENERATION_GUIDANCE
    lora: int = 0  # rank of LoRA in fine-tuning; 0: all weights
    preset: str = "exact"  # of `muralist generate`; the plain loop is measured beside exact mode only


ITEMS = {
    "train-b4-256": Item("train", "JiT-B/4", (64, 64), 256, 30),
    "train-b4-256-fp8": Item("train", "JiT-B/4", (64, 64), 256, 30, "fp8"),
    "train-b4-64": Item("train", "JiT-B/4", (64, 64), 64, 60),
    "train-b16-128": Item("train", "JiT-B/16", (256, 256), 128, 30),
    "train-l16-64": Item("train", "JiT-L/16", (256, 256), 64, 30),
    "finetune-wan": Item("finetune", "Wan-2.1-1.3B, short text encoder", (480, 832), 8, 10),
    "finetune-sdxl": Item("finetune", "SDXL", (1024, 1024), 4, 8),
    "finetune-flux-lora": Item("finetune", "FLUX.1-dev", (1024, 1024), 1, 12, lora=16),
    "sample-b4-64": Item("sample", "JiT-B/4", (64, 64), 64, 2),
    "sample-b4-256": Item("sample", "JiT-B/4", (64, 64), 256, 1),
    "sample-b16-128": Item("sample", "JiT-B/16", (256, 256), 128, 1),
    "generate-wan": Item("generate", "Wan-2.1-1.3B", (480, 832), 8, 4),
    "generate-wan-fast": Item("generate", "Wan-2.1-1.3B", (480, 832), 8, 4, preset="fast"),
    "generate-wan-faster": Item("generate", "Wan-2.1-1.3B", (480, 832), 8, 4, preset="faster"),
    "generate-hunyuan": Item("generate", "HunyuanDiT-1.5B", (1024, 1024), 4, 3),
    "generate-sdxl": Item("generate", "SDXL", (1024, 1024), 8, 3),
    "lengths-zimage": Item("lengths", "Z-Image-6B", (512, 512), 16, 2, steps=9, guidance=0.0),  # as the Turbo model
    "lengths-qwen": Item("lengths", "Qwen-Image, 20 of 60 layers", (512, 512), 16, 2, steps=10, guidance=4.0),
    "fid-256": Item("fid", "Inception-v3", (256, 256), 50, 5000),
    "fid-32": Item("fid", "Inception-v3", (32, 32), 50, 50_000),
}
_BUILDERS = {"Wan-2.1-1.3B": "full_wan.build_full_wan", "HunyuanDiT-1.5B": "full_hunyuan.build_full_hunyuan",
             "Wan-2.1-1.3B, short text encoder": "full_wan.build_wan_for_training",
             "FLUX.1-dev": "full_flux.build_full_flux",
             "SDXL": "full_sdxl.build_full_sdxl", "Z-Image-6B": "full_zimage.build_full_zimage",
             "Qwen-Image, 20 of 60 layers": "full_zimage.build_full_qwen_image"}  # fmt: skip
_COMMAND_BATCHES = {"exact": 8, "fast": 13, "faster": 13}
"""By preset, of `muralist generate` in a round; the first two and the last are not timed."""
_LENGTHS = (18, 25, 31, 40, 52, 64, 80, 99)  # letters of prompts, which are their tokens
_WARM_SHARE = 0.2  # of the images of FID's features, before the rate is measured


def shrink(item: Item) -> Item:
    """Return a small version of an item, which tries the script itself."""
    model = {"train": "JiT-T/8", "sample": "JiT-T/8"}.get(item.kind, item.model)
    steps = 2 if item.kind in ("generate", "lengths") else item.steps
    return item._replace(model=model, size=(64, 64), batch=2, calls=200 if item.kind == "fid" else 2, steps=steps)


# The process of one side.


def serve(side: str, item: Item, options: argparse.Namespace) -> None:
    """Build the work of one side, then time one round for every line of standard input."""
    import torch

    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    run, images = build(side, item, options, "cuda:0" if on_gpu else "cpu")
    trains = item.kind in ("train", "finetune")
    first = [run() for _ in range(5)] if trains else [run()]
    answer: dict[str, Any] = {"seconds to build": round(time.perf_counter() - started, 1)}
    if trains:
        answer["losses of the first steps"] = [float(loss) for loss in first]
    run()
    _print(answer)
    calls = timed_calls(item, images)
    for _ in sys.stdin:
        rate = matmul_rate() if on_gpu else None
        if item.kind == "fid":
            _print(run() | {"matmul TFLOP/s": rate})
            continue
        run()  # raises the clocks, and fills the pipeline
        _synchronize(on_gpu)
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize(on_gpu)
        seconds = time.perf_counter() - begun
        memory = {"GiB at most": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if on_gpu and trains else {}
        _print({"images/s": round(calls * images / seconds, 4), "matmul TFLOP/s": rate} | memory)


def timed_calls(item: Item, images: int) -> int:
    """Return the calls of a round: four times as many where a call makes one image of a text length."""
    return item.calls * (4 if item.kind == "lengths" and images == 1 else 1)


def build(side: str, item: Item, options: argparse.Namespace, device: str) -> tuple[Callable[[], Any], int]:
    """Return the work of one side and the number of images of one call."""
    import torch

    if side == BASELINE:  # an older tree has no such module
        from bench import baselines
    where, side_length = torch.device(device), item.size[0]
    if item.kind == "train":
        from bench.train_speed import our_step

        if side == BASELINE:
            return baselines.official_step(options.official, item.model, side_length, item.batch), item.batch
        variant = (["graphs"] if device != "cpu" else []) + (["fp8"] if item.precision == "fp8" else [])
        return our_step(item.model, side_length, item.batch, where, variant), item.batch
    if item.kind == "finetune":
        from bench.train_speed import our_finetune_step

        if side == BASELINE:
            return baselines.plain_finetune_step(options.folder, item.size, item.batch, item.lora, where), item.batch
        return our_finetune_step(options.folder, item.size, item.batch, item.lora, where), item.batch
    if item.kind == "sample":
        from bench.jit_generate_speed import our_sampler

        if side == BASELINE:
            return baselines.official_sampler(options.official, item.model, side_length, item.batch), item.batch
        return our_sampler(item.model, side_length, item.batch, where, 2 if options.tiny else SOLVER_STEPS), item.batch
    if item.kind in ("generate", "lengths"):
        if side != BASELINE:
            batch = 1 if side == ONE_BY_ONE else item.batch
            return _our_batches(options.folder, item, where, batch), batch
        guidance = "true_cfg_scale" if item.model.startswith("Qwen") else "guidance_scale"
        settings = {"num_inference_steps": item.steps, guidance: item.guidance}
        settings |= {"negative_prompt": " "} if item.model.startswith("Qwen") else {}
        prompt = prompt_of if item.kind == "generate" else varied_prompt
        dtype = "bf16" if device != "cpu" else "fp32"
        return baselines.plain_diffusers(options.folder, item.size, settings, prompt, device, dtype), 1
    paths = sorted(options.folder.glob("*.png"))
    return (_their_features if side == BASELINE else _our_features)(paths, options), len(paths)


def _our_batches(folder: Path, item: Item, device: Any, batch: int) -> Callable[[], Any]:
    """Return the next batch of prompts of one text group; groups take turns, as in a table with all lengths."""
    from muralist.generate.pipeline import SampleRequest, load_pipeline, make_deterministic
    from muralist.settings import GenerateSettings

    make_deterministic(device)
    settings = GenerateSettings(
        prompt=["a"], output_dir="unused", model_path=str(folder), height=item.size[0], width=item.size[1],
        num_inference_steps=item.steps, guidance_scale=item.guidance, dtype="bf16" if device.type == "cuda" else "fp32",
    )  # fmt: skip
    pipeline = load_pipeline(settings, device)
    assert pipeline.supports_batching() and pipeline.groups_by_text()
    requests = [SampleRequest(varied_prompt(row), "", row) for row in range(item.batch * len(_LENGTHS))]
    groups: dict[str, list[Any]] = {}
    for request, group in zip(requests, pipeline.text_groups(requests), strict=True):
        groups.setdefault(group, []).append(request)
    batches = [rows[at : at + batch] for rows in groups.values() for at in range(0, len(rows) // batch * batch, batch)]
    batches = [*batches[::2], *batches[1::2]]
    number, pending = 0, None

    def work() -> None:
        nonlocal number, pending
        chosen = batches[number % len(batches)]
        number += 1
        pipeline.prepare(chosen)
        started = pipeline.generate_async(chosen, item.size, lambda: None)
        if pending is not None:
            pending.wait()
        pending = started

    return work


def _our_features(paths: list[Path], options: argparse.Namespace) -> Callable[[], dict[str, float]]:
    from muralist.core.hardware import select_devices
    from muralist.evaluate.encoders import InceptionEncoder
    from muralist.evaluate.features import compute_features, hash_files

    encoder = InceptionEncoder.from_file(options.weights)

    def work() -> dict[str, float]:
        marks = Marks()
        with tempfile.TemporaryDirectory() as cache:
            compute_features(encoder, hash_files(paths), select_devices(()), Path(cache), progress=marks.add)
        return marks.rate(len(paths))

    return work


def _their_features(paths: list[Path], options: argparse.Namespace) -> Callable[[], dict[str, float]]:
    from bench import baselines

    features = baselines.pytorch_fid(options.pytorch_fid / "src", options.weights)

    def work() -> dict[str, float]:
        marks = Marks()
        features(paths, marks.add)
        return marks.rate(len(paths))

    return work


class Marks:
    """Times at which numbers of images were done."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def add(self, done: int, total: int) -> None:
        """Note how many images are done now."""
        self.marks.append((time.perf_counter(), done))

    def rate(self, images: int) -> dict[str, float]:
        """Return the images per second after the first fifth of the images."""
        warm, last = next(mark for mark in self.marks if mark[1] >= _WARM_SHARE * images), self.marks[-1]
        return {"images/s": round((last[1] - warm[1]) / (last[0] - warm[0]), 1)}


def prompt_of(row: int) -> str:
    """Return the prompt of a row; all rows differ."""
    return PROMPT.format(row, row * row)


def varied_prompt(row: int) -> str:
    """Return the prompt of a row; every length occurs equally often."""
    words = f"{row} parked cars in the rain " * 8
    return words[: _LENGTHS[row % len(_LENGTHS)]]


def matmul_rate() -> float:
    """Return the TFLOP/s of a large bf16 matmul on random data, over about 0.2 s."""
    import torch

    side, count = 8192, 150
    one, two = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one @ two
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        one @ two
    end.record()
    torch.cuda.synchronize()
    return round(2 * side**3 * count / start.elapsed_time(end) / 1e9, 1)


def _synchronize(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


def _print(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


# Rounds.


class Side:
    """A process that waits for its rounds."""

    def __init__(self, name: str, item: str, tree: Path, flags: list[str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", name, "--items", item, *flags]
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

    def round(self) -> dict[str, Any]:
        """Time one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        with gpu_state() as state:
            answer = self.read()
        return answer | {"GPU": state}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class GenerateCommand:
    """`muralist generate` of one tree, started anew in every round; the first one fills its compile cache."""

    def __init__(self, tree: Path, model: Path, item: Item, tiny: bool) -> None:
        self.tree, self.model, self.item, self.tiny = tree, model, item, tiny
        self.folder, self.rounds = Path(tempfile.mkdtemp()), 0
        self.table = self.folder / "prompts.csv"
        rows = "".join(f'"{prompt_of(row)}"\n' for row in range(item.batch * _COMMAND_BATCHES[item.preset]))
        self.table.write_text("prompt\n" + rows)

    def read(self) -> dict[str, Any]:
        """Compile: the first start."""
        return {"first start": self.round()}

    def round(self) -> dict[str, Any]:
        """Generate all rows into a new folder."""
        self.rounds += 1
        output, item = self.folder / str(self.rounds), self.item
        settings = {"prompts_csv": self.table, "output_dir": output, "model_path": self.model, "gpu_ids": 0,
                    "batch_size": item.batch, "height": item.size[0], "width": item.size[1],
                    "num_inference_steps": item.steps, "guidance_scale": item.guidance,
                    "dtype": "fp32" if self.tiny else "bf16", "preset": item.preset}  # fmt: skip
        command = [sys.executable, "-m", "muralist", "generate"]
        command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        started = time.time()
        with gpu_state() as state:
            done = subprocess.run(
                command, cwd=self.tree, env=tree_environment(self.tree), capture_output=True, text=True, check=False
            )
        ended = time.time()
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        first = re.search(r"the first after ([\d.]+) s", done.stdout + done.stderr)
        quality = [line["psnr_to_exact"] for line in _ledger(output) if "psnr_to_exact" in line]
        written = sorted(file.stat().st_mtime - started for file in output.glob("*.png"))
        batches = [round(seconds, 2) for seconds in written[item.batch - 1 :: item.batch]]
        # From the second batch to the last but one: the last is fetched early, because no batch follows it.
        warm = (len(batches) - 3) * item.batch / (batches[-2] - batches[1])
        busy = [line["gpu_busy"] for line in _ledger(output) if "gpu_busy" in line]
        return {
            "images/s": round(warm, 4),
            "images/s, whole command": round(len(written) / (ended - started), 4),
            "seconds to the first image, as the command says": float(first[1]) if first else None,
            "seconds to the last file of each batch": batches,
            "PSNR to exact mode, dB": round(statistics.mean(quality), 2) if quality else None,
            "share of the time in which a kernel ran": round(statistics.mean(busy), 4) if busy else None,
            "GPU": state,
        }

    def images(self) -> Path:
        """Return the folder of the last round."""
        return self.folder / str(self.rounds)

    def close(self) -> None:
        """Remove the images."""
        shutil.rmtree(self.folder)


def _ledger(output: Path) -> list[dict[str, Any]]:
    lines = []
    for line in (output / "ledger.jsonl").read_text().splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def tree_environment(tree: Path) -> dict[str, str]:
    """Return the environment that makes a tree's source win, with compile caches of its own."""
    paths = [str(tree / "src"), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    digest = hashlib.sha256(str(tree.resolve()).encode()).hexdigest()[:8]
    cache = Path(tempfile.gettempdir()) / f"standard-{digest}"
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


# Items.


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one item: start all sides, which compile at the same time, then alternate."""
    item = shrink(ITEMS[name]) if options.tiny else ITEMS[name]
    trees = {OURS: TREE} | ({OLD: options.old.resolve()} if options.old else {})
    flags = ["--tiny"] if options.tiny else []
    for flag in ("official", "pytorch_fid", "weights"):
        if value := getattr(options, flag):
            flags += [f"--{flag}", str(value.resolve())]
    has_baseline = {"train": options.official, "sample": options.official, "fid": options.pytorch_fid}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        flags += ["--folder", temporary]
        sides: dict[str, Side | GenerateCommand] = {}
        if item.model in _BUILDERS:
            module, function = _BUILDERS[item.model].split(".")
            code = f"from pathlib import Path; from bench import {module}; "
            code += f"{module}.{function}(Path({temporary!r}), {options.tiny})"
            subprocess.run([sys.executable, "-c", code], env=tree_environment(TREE), cwd=TREE, check=True)
        if item.kind == "generate":
            sides = {side: GenerateCommand(tree, folder, item, options.tiny) for side, tree in trees.items()}
        elif item.kind == "lengths":
            trees = {OURS: TREE, ONE_BY_ONE: TREE}
        elif item.kind == "fid":
            with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as writers:
                list(writers.map(partial(write_image, folder, item.size[0]), range(item.calls), chunksize=50))
            trees = {OURS: TREE}
        if item.kind != "generate":
            sides = {side: Side(side, name, tree, flags) for side, tree in trees.items()}
        if has_baseline.get(item.kind, True) and (item.precision, item.preset) == ("bf16", "exact"):
            sides[BASELINE] = Side(BASELINE, name, TREE, flags)
        with ThreadPoolExecutor(len(sides)) as pool:
            first = dict(zip(sides, pool.map(lambda each: each.read(), sides.values()), strict=True))
        rounds = [{"side": side} | each.round() for _ in range(options.rounds) for side, each in sides.items()]
        result: dict[str, Any] = item._asdict() | {"first": first, "rounds": rounds} | summarize(rounds)
        commands = [each for each in sides.values() if isinstance(each, GenerateCommand)]
        if len(commands) == 2:
            result["images, old beside new"] = compare_images(commands[0].images(), commands[1].images())
        for each in sides.values():
            each.close()
        if item.kind == "fid":
            result["whole command"] = whole_fid_commands(folder, options)
    return result


def write_image(folder: Path, side: int, number: int) -> None:
    """Write a PNG as hard to decode as a photograph: smooth shapes and a little noise."""
    from PIL import Image

    random = np.random.default_rng((side, number))
    soft = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(soft, np.float32) + random.normal(0, 5, (side, side, 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:06d}.png")


def whole_fid_commands(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time both complete commands for FID alone, from start to end, on two halves of the images in alternating rounds."""
    files = sorted(folder.glob("*.png"))
    for number, file in enumerate(files):
        half = folder / ("a" if number < len(files) // 2 else "b")
        half.mkdir(exist_ok=True)
        file.rename(half / file.name)
    one, two = str(folder / "a"), str(folder / "b")
    commands = {OURS: ["-m", "muralist", "evaluate", "--images", one, "--reference", two, "--inception_weights",
                       str(options.weights.resolve()), "--metrics", "fid", "--output_dir",
                       str(folder / "report")]}  # fmt: skip
    if options.pytorch_fid:
        package, weights = str(options.pytorch_fid.resolve() / "src"), str(options.weights.resolve())
        code = (
            "import sys; from pathlib import Path; from bench import baselines; "
            f"fid_score = baselines.import_pytorch_fid(Path({package!r}), Path({weights!r})); "
            f"sys.argv = ['pytorch_fid', {one!r}, {two!r}]; fid_score.main()"
        )
        commands[BASELINE] = ["-c", code]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    fids: dict[str, float] = {}
    for name, words in [*commands.items()] * options.rounds:
        shutil.rmtree(folder / "report", ignore_errors=True)  # with its cached features
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words], cwd=TREE, env=tree_environment(TREE), capture_output=True, text=True, check=False
        )
        seconds[name].append(time.perf_counter() - started)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        report = folder / "report" / "report.json"
        fids[name] = json.loads(report.read_text())["fid"] if name == OURS else float(done.stdout.split()[-1])
    return {"images": len(files)} | {
        name: {
            "seconds": round(statistics.median(each), 1),
            "rounds": [round(one, 1) for one in each],
            "images/s": round(len(files) / statistics.median(each), 1),
            "fid": fids[name],
        }
        for name, each in seconds.items()
    }


def compare_images(old: Path, new: Path) -> dict[str, int]:
    """Count the images that are equal to the last byte."""
    names = sorted(file.name for file in old.glob("*.png"))
    same, _, _ = filecmp.cmpfiles(old, new, names, shallow=False)
    return {"images": len(names), "same bytes": len(same)}


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and spread of every side, and the ratio of ours to each other side."""
    rates: dict[str, list[float]] = {}
    for row in rounds:
        rates.setdefault(row["side"], []).append(row["images/s"])
    medians = {side: round(statistics.median(values), 4) for side, values in rates.items()}
    return {
        "images/s, median": medians,
        "spread": {side: round((max(values) - min(values)) / medians[side], 4) for side, values in rates.items()},
        "ratio": {side: round(medians[OURS] / rate, 3) for side, rate in medians.items() if side != OURS},
    }


def conditions(options: argparse.Namespace | None) -> dict[str, Any]:
    """Return machine, versions and the command of a record, and the commits of the baselines."""
    code = (
        f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {_PACKAGES}}}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    project = (TREE / "pyproject.toml").read_text().splitlines()
    own = next(line for line in project if line.startswith("version")).split('"')[1]
    content: dict[str, Any] = {
        "machine": nvidia_smi("name,driver_version,memory.total,power.limit") or "no GPU",
        "cores": os.cpu_count(),
        "versions": {"python": sys.version.split()[0], **json.loads(found), "muralist": own},
        "command": " ".join(["python", "bench/standard.py", *sys.argv[1:]]),
    }
    from bench import baselines

    for name in ("official", "pytorch_fid"):
        if checkout := getattr(options, name, None):
            content[f"commit of {name}"] = baselines.commit(checkout)
    return content


def main() -> None:
    """Measure the items and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--official", type=Path, help="a checkout of the official JiT code")
    parser.add_argument("--pytorch_fid", type=Path, help="a checkout of pytorch-fid; needs torchvision and SciPy")
    parser.add_argument("--weights", type=Path, help="Inception weights (`make weights`)")
    parser.add_argument("--old", type=Path, help="another version of muralist")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        item = ITEMS[options.items[0]]
        serve(options.serve, shrink(item) if options.tiny else item, options)
        return
    if options.record is None:
        parser.error("give the path of the record")
    sys.path.insert(0, str(TREE))  # not in a side's process, where the tree of the side comes first
    content: dict[str, Any] = {"items": {}}
    if options.record.is_file():
        content = json.loads(options.record.read_text())
    for name in options.items:
        if ITEMS[name].kind == "fid" and not options.weights:
            print(f"{name}: left out, because --weights is not given", flush=True)
            continue
        started = time.monotonic()
        try:
            result = measure(name, options)
        except RuntimeError as error:  # the other items are measured all the same
            print(f"{name}: failed: {error}", flush=True)
            continue
        content["items"][name] = result | {"seconds": round(time.monotonic() - started)} | conditions(options)
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(json.dumps(content, indent=1) + "\n")
        print(name, result["images/s, median"], result["ratio"], f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
