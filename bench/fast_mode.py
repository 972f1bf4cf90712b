"""Quality and speed of fast mode on models that are trained here: FID, KID and PSNR to exact mode for each schedule.

python bench/fast_mode.py RECORD.json --weights INCEPTION [--seconds 90] [--images 2560]

Trains a small HunyuanDiT and a JiT on driving_world, 64 px, at the same time. Then each model generates the same prompts
and seeds with every schedule: step caching (`--preset fast`, `faster` and others), truncated guidance, and fewer steps.
The reference is driving_world itself, with numbers that training never saw. The record is written after every schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.standard import TREE, conditions

SIDE, SCENES, FIRST_HELD_OUT, SEED = 64, 8, 1_000_000, 7
GUIDANCE = 3.0
BATCH = 128
_HUNYUAN = ["hydit", "--image-size", SIDE, SIDE, "--batch-size", 256, "--lr", 1e-3, "--warmup-num-steps", 100,
            "--ckpt-latest-every", "none", "--at_epoch_end", "false", "--samples_per_gpu", 0,
            "--max_samples", 8192]  # fmt: skip
_JIT = ["train", "--data_path", "driving_world", "--img_size", SIDE, "--model", "JiT-S/4", "--enable_condition",
        "--use_amp", "--batch_size", 256, "--learning_rate", 1e-3, "--warmup_steps", 100, "--ckpt_latest_every", "none",
        "--at_epoch_end", "false", "--samples_per_gpu", 0, "--max_samples", 8192]  # fmt: skip
_FIRST_STEPS = re.compile(r"^\s*step [\d,]+/", re.MULTILINE)


class Schedule(NamedTuple):
    """One way to generate: a number of steps, guidance in the first of them, and step caching."""

    steps: int
    truncation: int | None = None
    caching: tuple[float, float, int] | None = None  # guided, beginning, interval of a StepCaching


HUNYUAN = {
    "exact, 20 steps": Schedule(20),
    "fast, 20 steps": Schedule(20, caching=(0.5, 0.2, 2)),
    "faster, 20 steps": Schedule(20, caching=(0.25, 0.15, 3)),
    "exact, 10 steps": Schedule(10),
    "exact, 6 steps": Schedule(6),
    "10 steps, 3 guided": Schedule(10, truncation=3),
    "8 steps, 4 guided": Schedule(8, truncation=4),
}
JIT = {f"Heun, {steps} steps": Schedule(steps) for steps in (50, 25, 12, 6)}


def scene(number: int) -> np.ndarray:
    """Draw a held-out scene; kinds take turns."""
    from muralist.demo.driving_world import draw_scene

    return draw_scene(number % SCENES, FIRST_HELD_OUT + number // SCENES, SIDE)


def prompt_of(model: str, number: int) -> str:
    """Return the caption of a held-out scene, or the name of its class."""
    from muralist.demo.driving_world import PROMPTS, caption

    kind = number % SCENES
    return PROMPTS[kind] if model == "jit" else caption(kind, FIRST_HELD_OUT + number // SCENES)


def train(words: list[Any], folder: Path, seconds: float, tiny: bool) -> Path:
    """Train one model for some seconds after its first steps, and return its run."""
    words = [*words, "--results_dir", folder, "--run_name", words[0]]
    if tiny:
        words = [{256: 8, 8192: 64, "JiT-S/4": "JiT-T/8"}.get(word, word) for word in words]
    command = [sys.executable, "-m", "muralist", *map(str, words)]
    log = folder / f"{words[0]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=TREE)
        # Compiling takes half a minute to two, depending on the host; a run without a step has no checkpoint.
        while process.poll() is None and not _FIRST_STEPS.search(log.read_text()):
            time.sleep(0.2)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGTERM)  # it saves a checkpoint and ends
        status = process.wait()
    lines = log.read_text().splitlines()
    print(words[0], "ended with status", status, *lines[-6:], sep="\n  ", flush=True)
    return folder / str(words[0])


class Generator:
    """A trained model that generates with one schedule after the other; it is compiled once."""

    def __init__(self, model: str, run: Path, device: Any) -> None:
        from muralist.generate.pipeline import load_pipeline, make_deterministic

        make_deterministic(device)
        self.model, self.run, self.dtype = model, run, "bf16" if device.type == "cuda" else "fp32"
        self.pipeline: Any = load_pipeline(self.settings(Schedule(20)), device)
        assert self.pipeline.supports_batching()

    def settings(self, schedule: Schedule) -> Any:
        """Return the settings of `muralist generate`."""
        from muralist.settings import GenerateSettings

        return GenerateSettings(
            prompt=["a"], output_dir="unused", model_path=str(self.run), num_inference_steps=schedule.steps,
            height=SIDE, width=SIDE, guidance_scale=GUIDANCE, cfg_truncation_step=schedule.truncation, dtype=self.dtype,
        )  # fmt: skip

    def generate(self, schedule: Schedule, images: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Return images and their speed: the median of the batches after the second."""
        from muralist.generate.model_info import StepCaching
        from muralist.generate.pipeline import SampleRequest

        self.pipeline.configure(self.settings(schedule))
        if self.model == "hunyuan":  # a schedule of its own instead of that of --preset
            self.pipeline._loop._step_caching = StepCaching(*schedule.caching) if schedule.caching else None
        made: list[np.ndarray] = []
        seconds = []
        requests = [SampleRequest(prompt_of(self.model, number), "", SEED + number) for number in range(images)]
        for start in range(0, images, BATCH):
            batch = requests[start : start + BATCH]
            self.pipeline.prepare(batch)
            started = time.perf_counter()
            made += self.pipeline.generate(batch, (SIDE, SIDE), lambda: None)
            seconds.append(time.perf_counter() - started)
        rate = BATCH / statistics.median(seconds[2:] or seconds)
        return np.stack(made), {"batches": len(seconds), "images/s": round(rate, 1)}


def features_of(images: np.ndarray, encoder: Any, device: Any) -> np.ndarray:
    """Return Inception's features of uint8 images."""
    import torch

    from muralist.evaluate.inception import preprocess

    rows = [encoder.compute(preprocess(torch.from_numpy(images[at : at + 64]).to(device))).float().cpu()
            for at in range(0, len(images), 64)]  # fmt: skip
    return torch.cat(rows).numpy()


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean over images of the PSNR, in dB."""
    errors = ((one.astype(np.float64) - other.astype(np.float64)) ** 2).mean(axis=(1, 2, 3))
    return round(float(np.mean(10 * np.log10(255**2 / np.maximum(errors, 1e-9)))), 2)


def main() -> None:
    """Train, generate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--weights", type=Path, required=True, help="Inception weights")
    parser.add_argument("--seconds", type=float, default=90, help="of training, after the first steps")
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--tiny", action="store_true", help="try the script itself, also on a CPU")
    parser.add_argument("--sheets", type=Path, help="folder for a contact sheet of each schedule")
    options = parser.parse_args()
    import torch

    from muralist.evaluate import metrics
    from muralist.evaluate.encoders import InceptionEncoder

    content: dict[str, Any] = conditions(None) | {"command": " ".join(["python", "bench/fast_mode.py", *sys.argv[1:]])}
    content |= {
        "side": SIDE,
        "batch": BATCH,
        "images": options.images,
        "seconds of training": options.seconds,
        "models": {},
    }
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(max(2, (os.cpu_count() or 2) - 4)) as pool:
        folder = Path(temporary)
        runs = {name: pool.submit(train, words, folder, options.seconds, options.tiny) for name, words in
                (("hunyuan", _HUNYUAN), ("jit", _JIT))}  # fmt: skip
        real = np.stack(list(pool.map(scene, range(options.images), chunksize=32)))
        encoder = InceptionEncoder.from_file(options.weights).load(device)
        real_rows = features_of(real, encoder, device)
        moments = metrics.compute_moments(real_rows)
        for model, schedules in (("hunyuan", HUNYUAN), ("jit", JIT)):
            generator, exact = Generator(model, runs[model].result(), device), None
            found = content["models"].setdefault(model, {})
            for name, schedule in schedules.items():
                images, speed = generator.generate(schedule, options.images)
                exact = images if exact is None else exact
                rows = features_of(images, encoder, device)
                fid = metrics.frechet_distance(metrics.compute_moments(rows), moments)
                kid = metrics.kid(rows, real_rows, seed=0, device=str(device))
                found[name] = speed | {
                    "fid": round(fid.value, 3), "kid": round(kid.value, 6),
                    "psnr to the first": psnr(images, exact), "schedule": schedule._asdict(),
                }  # fmt: skip
                print(model, name, found[name], flush=True)
                options.record.write_text(json.dumps(content, indent=1) + "\n")
                if options.sheets:
                    save_sheet(images[:32], options.sheets / f"{model}_{len(found)}.png")


def save_sheet(images: np.ndarray, path: Path) -> None:
    """Write 32 images in four rows."""
    from PIL import Image

    rows = [np.concatenate(list(images[at : at + 8]), axis=1) for at in range(0, len(images), 8)]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).save(path)


if __name__ == "__main__":
    main()
