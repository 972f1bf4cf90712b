"""Time generation on one GPU: the plain diffusers loop, batches, compiled batches and `muralist generate`.

python bench/generate_speed.py [--models wan hunyuan sdxl] [--budget SECONDS] [--name NAME] [--tiny]

Models have the published sizes and random weights. The result is written to bench/results/NAME.json after every stage;
stages that do not fit into the budget are listed as left out. --tiny runs small models, also on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.measure_training import RESULTS, hardware, versions
from bench.profile_kernels import profiled

from bench import full_hunyuan, full_sdxl, full_wan
from muralist.core.run_dir import atomic_write_json
from muralist.data.ledger_reader import read_lines
from muralist.generate.diffusers_patches import per_sample_noise
from muralist.generate.diffusers_pipeline import DiffusersPipeline
from muralist.generate.image_files import psnr
from muralist.generate.model_info import STEP_CACHING
from muralist.generate.optimizations import Optimizations
from muralist.generate.pipeline import SampleRequest, make_deterministic
from muralist.settings import GenerateSettings
from muralist.train.metrics import matmul_rate

STEPS, GUIDANCE = 20, 7.5
PLAIN_OPERATIONS = "TFLOP per image, plain"
PROMPT = "a quiet street with {} parked cars and {} trees in the rain"
PLAIN, EAGER, COMPILED, OURS, FAST = (
    "plain diffusers loop, one prompt at a time",
    "batch, eager",
    "batch, compiled",
    "muralist generate",
    "muralist generate --preset fast",
)


@dataclass(frozen=True)
class Model:
    """A model to measure."""

    build: Callable[[Path, bool], Path]
    operations: Callable[[int, int], dict[str, int]]
    pipeline: str
    size: tuple[int, int]
    batch: int
    goal: float  # times the plain loop, in exact mode


MODELS = {
    "wan": Model(full_wan.build_full_wan, full_wan.operations, "WanPipeline", (480, 832), 8, 4.0),
    "hunyuan": Model(
        full_hunyuan.build_full_hunyuan, full_hunyuan.operations, "HunyuanDiTPipeline", (1024, 1024), 4, 2.2
    ),
    "sdxl": Model(full_sdxl.build_full_sdxl, full_sdxl.operations, "StableDiffusionXLPipeline", (1024, 1024), 8, 2.5),
}


@dataclass
class Bench:
    """One run of this script: its options and its results so far."""

    device: torch.device
    tiny: bool
    deadline: float
    target: Path
    folder: Path
    content: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write the record."""
        atomic_write_json(self.target, self.content)

    def run_stage(self, stage: Stage, results: dict[str, Any]) -> None:
        """Run a stage if there is time; a failure does not end the others."""
        _, name, seconds, work = stage
        left = self.deadline - time.monotonic()
        if not self.tiny and left < seconds:
            results.setdefault("left out", {})[name] = f"{left:.0f} s were left; the stage takes about {seconds:.0f} s"
            print(f"  left out, {left:.0f} s are left", flush=True)
            return
        started = time.monotonic()
        try:
            result = work()
        except Exception as error:
            results.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:600]
            print(f"  FAILED: {error!r:.300}", flush=True)
        else:
            results[name] = result
            print(f"  {time.monotonic() - started:.0f} s: {json.dumps(result)[:700]}", flush=True)
        results.setdefault("seconds of each", {})[name] = round(time.monotonic() - started, 1)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.write()


class Stage(NamedTuple):
    """Something to measure, and its approximate duration."""

    priority: int
    name: str
    seconds: float
    work: Callable[[], Any]


class CommandRun(NamedTuple):
    """The result of one run of `muralist generate`."""

    seconds: float
    lines: list[dict[str, Any]]  # of its ledger
    written: list[float]  # seconds from the start to each image


class Case:
    """One model in all variants."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name, self.model = bench, name, MODELS[name]
        self.size = (64, 64) if bench.tiny else self.model.size
        self.batch = 2 if bench.tiny else self.model.batch
        self.steps = 4 if bench.tiny else STEPS
        self.dtype = "fp32" if bench.tiny else "bf16"
        self.path = bench.folder / name
        self.images: dict[str, list[np.ndarray]] = {}
        self.results: dict[str, Any] = {}
        bench.content["models"][name] = self.results
        self._record_setup()

    def stages(self) -> list[Stage]:
        """Return all stages; lower priorities run first, for all models."""
        compiled = Optimizations(compiled=not self.bench.tiny)
        variants = {
            EAGER: Optimizations(single_frame_2d=False, cudnn_attention=False, fused_gelu=False),
            "batch, compiled, without CUDA graphs": replace(compiled, cuda_graphs=False),
            "batch, compiled, separate GELU": replace(compiled, fused_gelu=False),
            "batch, compiled, without cuDNN attention": replace(compiled, cudnn_attention=False),
            "batch, compiled, VAE decode of diffusers": replace(compiled, single_frame_2d=False),
            "batch, compiled, separate QK norm and RoPE": replace(compiled, fused_qk_norm_rope=False),
        }
        return [
            Stage(0, "build", 30, self._build),
            Stage(0, PLAIN, 25, self._plain),
            Stage(0, OURS, 60, lambda: self._command("exact")),
            Stage(1 if self.name == "wan" else 6, FAST, 70, lambda: self._command("fast")),
            Stage(2, "accuracy", 30, self._accuracy),
            Stage(3, COMPILED, 50, lambda: self._batches(compiled, profile=True)),
            *(
                Stage(6, name, 60, functools.partial(self._batches, optimizations))  # each is compiled again
                for name, optimizations in variants.items()
            ),
        ]

    def _record_setup(self) -> None:
        operations = self.model.operations(*self.model.size)
        total = 2 * STEPS * operations["pass"] + operations["decoding"] + 2 * operations["text"]
        fast = STEP_CACHING["fast"]
        assert fast
        passes = sum(2 if step < fast.guided_steps(STEPS) else 1 for step in fast.computed_stages(STEPS))
        short = passes * operations["pass"] + operations["decoding"] + operations["text"]
        self.results |= {
            "size": list(self.size),
            "batch": self.batch,
            "TFLOP": {name: round(value / 1e12, 3) for name, value in operations.items()},
            PLAIN_OPERATIONS: round(total / 1e12, 1),
            "TFLOP per image, fast": round(short / 1e12, 1),
            "goal in exact mode, times the plain loop": self.model.goal,
        }
        print(self.name, self.results, flush=True)

    def _requests(self, count: int, first: int = 0) -> list[SampleRequest]:
        return [SampleRequest(PROMPT.format(i, i * i), "", 42 + i) for i in range(first, first + count)]

    def _load(self, dtype: str) -> Any:
        kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
        pipe: Any = DiffusionPipeline.from_pretrained(self.path, dtype=kinds[dtype], local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(self.bench.device)

    def _one(self, pipe: Any, request: SampleRequest) -> np.ndarray:
        """Generate an image as a plain script does, with our noise."""
        generators = [torch.Generator("cpu").manual_seed(request.seed)]
        frames = {"num_frames": 1} if self.model.pipeline == "WanPipeline" else {}
        binning = {"use_resolution_binning": False} if self.model.pipeline == "HunyuanDiTPipeline" else {}
        with per_sample_noise(generators):
            output = pipe(
                prompt=[request.prompt],
                negative_prompt=[request.negative_prompt],
                height=self.size[0],
                width=self.size[1],
                num_inference_steps=self.steps,
                guidance_scale=GUIDANCE,
                generator=generators,
                output_type="pil",
                **frames,
                **binning,
            )
        image = output.frames[0][0] if hasattr(output, "frames") else output.images[0]
        image.save(self.bench.folder / "plain.png")
        return np.asarray(image)

    def _build(self) -> dict[str, float]:
        started = time.perf_counter()
        self.model.build(self.path, self.bench.tiny)
        return {"seconds": round(time.perf_counter() - started, 1)}

    def _plain(self) -> dict[str, Any]:
        pipe = self._load(self.dtype)
        times: list[float] = []
        self.images[PLAIN] = []
        with _default_settings():
            rate = matmul_rate(self.bench.device, torch.bfloat16) / 1e12
            self._one(pipe, self._requests(1, 100)[0])
            for request in self._requests(4):
                started = time.perf_counter()
                self.images[PLAIN].append(self._one(pipe, request))
                times.append(time.perf_counter() - started)
        self.results["matmul rate, TFLOP/s"] = round(rate, 1)
        self.results["images/s at the matmul rate"] = round(rate / self.results[PLAIN_OPERATIONS], 3)
        return {"images/s": round(len(times) / sum(times), 4), "images": len(times)}

    def _settings(self, **changes: Any) -> GenerateSettings:
        return GenerateSettings(
            prompts_csv="",
            output_dir="",
            model_path=str(self.path),
            num_inference_steps=self.steps,
            guidance_scale=GUIDANCE,
            height=self.size[0],
            width=self.size[1],
            dtype=self.dtype,  # type: ignore[arg-type]
            **changes,
        )

    def _batches(self, optimizations: Optimizations, profile: bool = False) -> dict[str, Any]:
        """Time two batches in this process, including text and fetching, without writing files."""
        started = time.perf_counter()
        pipeline = DiffusersPipeline.load(self._settings(), self.bench.device, optimizations=optimizations)
        loaded = time.perf_counter()
        pipeline.generate(self._requests(self.batch, 50), self.size, _no_callback)
        result: dict[str, Any] = {
            "seconds to load": round(loaded - started, 1),
            "seconds of the first batch": round(time.perf_counter() - loaded, 1),
        }
        warm = time.perf_counter()
        pending = [
            pipeline.generate_async(self._requests(self.batch, self.batch * i), self.size, _no_callback)
            for i in range(2)
        ]
        images = [image for batch in pending for image in batch.wait()]
        result["images/s"] = round(len(images) / (time.perf_counter() - warm), 4)
        result["gpu_busy of the second"] = pending[1].gpu_busy
        if profile:
            requests = self._requests(self.batch)
            pipeline.prepare(requests)
            total = profiled(lambda: pipeline.generate(requests, self.size, _no_callback), self.bench.device)
            result["profile of a batch without text"] = total
            result["profile of its decoding"] = self._decoding(pipeline)
        if self.bench.device.type == "cuda":
            result["peak memory, GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        return result

    def _decoding(self, pipeline: DiffusersPipeline) -> dict[str, Any]:
        vae: Any = pipeline._pipe.vae
        dtype = next(vae.parameters()).dtype
        channels = vae.config.get("z_dim") or vae.config.latent_channels
        latents = torch.randn(self.batch, channels, self.size[0] // 8, self.size[1] // 8)
        if "z_dim" in vae.config:
            latents = latents[:, :, None]
        latents = latents.to(self.bench.device, dtype)
        with torch.no_grad():
            return profiled(lambda: vae.decode(latents), self.bench.device)

    def _run(self, preset: str, batches: int, folder: Path) -> CommandRun:
        """Run `muralist generate`; return only the images of this run."""
        table = folder / "prompts.csv"
        table.write_text(
            "prompt\n" + "".join(f'"{request.prompt}"\n' for request in self._requests(batches * self.batch))
        )
        settings = {
            "prompts_csv": table, "output_dir": folder / "images", "model_path": self.path, "batch_size": self.batch,
            "height": self.size[0], "width": self.size[1], "num_inference_steps": self.steps, "preset": preset,
            "guidance_scale": GUIDANCE, "dtype": self.dtype, "gpu_ids": 0,
        }  # fmt: skip
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        began, started = time.time(), time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-m", "muralist", "generate", *flags], capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
        if process.returncode:
            raise RuntimeError(process.stderr[-600:])
        lines = [line for line in read_lines(folder / "images" / "ledger.jsonl") if line["changed"] / 1e9 > began]
        return CommandRun(seconds, lines, sorted(line["changed"] / 1e9 - began for line in lines))

    def _command(self, preset: str) -> dict[str, Any]:
        """Return the rate of files on disk after a warm-up of two batches, or four in fast mode.

        The last batch is left out: a batch is fetched after the next one is launched, so the last one comes early.
        """
        warm, batches = (2, 11) if preset == "exact" else (4, 15)
        folder = Path(tempfile.mkdtemp(dir=self.bench.folder))
        first = self._run(preset, 1, Path(tempfile.mkdtemp(dir=self.bench.folder)))  # compiles
        seconds, lines, written = self._run(preset, batches, folder)
        after = written[warm * self.batch : -self.batch]
        busy = [line["gpu_busy"] for line in lines if "gpu_busy" in line]
        distances = [line["psnr_to_exact"] for line in lines if "psnr_to_exact" in line]
        if preset == "exact":
            files = sorted((folder / "images").glob("*.png"))[:4]
            self.images[OURS] = [np.asarray(Image.open(file)) for file in files]
        result: dict[str, Any] = {
            "images/s": round(len(after) / (after[-1] - written[warm * self.batch - 1]), 4),
            "images": len(lines),
            "seconds from start to end": round(seconds, 1),
            "seconds to the first batch, first start": round(first.written[-1], 1),
            "seconds to the first batch, second start": round(written[self.batch - 1], 1),
            "gpu_busy, mean after the first batch": round(float(np.mean(busy)), 4) if busy else None,
            "seconds to the last file of each batch": [
                round(when, 2) for when in written[self.batch - 1 :: self.batch]
            ],
        }
        if distances:
            result["PSNR to exact mode, dB"] = {"mean": round(float(np.mean(distances)), 2), "worst": min(distances)}
        return result

    def _accuracy(self) -> dict[str, Any]:
        """Compare the plain loop and ours with the same model in float32."""
        pipe = self._load("fp32")
        count = 1 if self.name == "hunyuan" else 2  # the slowest model
        exact = [self._one(pipe, request) for request in self._requests(count)]
        found: dict[str, Any] = {}
        for name in (PLAIN, OURS):
            near = [psnr(one, other) for one, other in zip(self.images.get(name, []), exact, strict=False)]
            found[f"{name}: PSNR to fp32, dB"] = [round(value, 2) for value in near]
        means = [float(np.mean(value)) for value in found.values() if value]
        if len(means) == 2:
            found["ours less plain, dB (at least -1)"] = round(means[1] - means[0], 2)
        return found


def _no_callback() -> None:
    """Do nothing after a denoising step."""


@contextmanager
def _default_settings() -> Iterator[None]:
    """Restore the non-deterministic defaults of torch, as in a plain script."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True


def table(content: dict[str, Any]) -> str:
    """Return a table of all variants with their ratio to the plain loop."""
    lines = [
        "| model | variant | images/s | times the plain loop | GPU busy | from exact mode |",
        "|---|---|---|---|---|---|",
    ]
    for name, results in content["models"].items():
        plain = results.get(PLAIN, {}).get("images/s")
        for variant, result in results.items():
            if isinstance(result, dict) and "images/s" in result:
                ratio = f"{result['images/s'] / plain:.2f}" if plain else ""
                busy = result.get("gpu_busy, mean after the first batch") or result.get("gpu_busy of the second")
                distance = result.get("PSNR to exact mode, dB", {}).get("mean")
                cells = (name, variant, f"{result['images/s']:.3f}", ratio, f"{100 * busy:.1f}%" if busy else "")
                lines.append(f"| {' | '.join(cells)} | {f'{distance} dB' if distance else ''} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--name", default="generate_speed_h200", help="name of the record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    make_deterministic(device)
    given.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, given.tiny, started + given.budget, given.output / f"{given.name}.json", Path(folder))
        bench.content = {
            "command": f"python bench/generate_speed.py {' '.join(arguments)}",
            "settings": f"{STEPS} steps, guidance {GUIDANCE}, bf16, random weights of the published sizes",
            "hardware": hardware(),
            "versions": versions(),
            "models": {},
        }
        cases = [Case(bench, name) for name in given.models]
        for priority in range(7):
            for case in cases:
                for stage in (stage for stage in case.stages() if stage.priority == priority):
                    print(f"{time.monotonic() - started:.0f} s: {case.name}, {stage.name}", flush=True)
                    bench.run_stage(stage, case.results)
        bench.content["seconds"] = round(time.monotonic() - started, 1)
        bench.write()
    print(table(bench.content), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
