"""Time, cost, energy, scaling and memory of a training, computed from a measured speed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muralist.core.errors import UserError
from muralist.models import configs
from muralist.models.spec import families_with, find_family
from muralist.settings import EstimateSettings, Strategy, TrainSettings
from muralist.settings.load import read_yaml
from muralist.train.preflight import MemoryEstimate, state_bytes

GPUS = tuple(2**power for power in range(11))
"""1 to 1024."""
SCENARIOS = {"conservative": 0.1, "medium": 0.5, "optimistic": 0.9}
"""Quantiles of the readings."""
BACKWARD_FRACTION = 2 / 3
BUCKET_BYTES = 25 * 2**20 // 2
"""Bytes of a DDP bucket in bf16: DDP fills 25 MB of float32."""
LINK_EFFICIENCY = 0.8
"""Fraction of the advertised speed of a link that a collective reaches."""
INTRA_NODE_LATENCY, INTER_NODE_LATENCY = 5e-6, 20e-6  # seconds per hop
STEP_JITTER = 0.01
"""Standard deviation of the step time of a GPU, as a fraction of the step time."""
_GRADIENT_BYTES = 2  # bf16
_PCIE = 25e9  # bytes per second
_DEFAULT_MEMORY = 80e9  # bytes
_WARMUP_FRACTION = 0.1  # of the readings of a run, in which caches fill and clocks rise
_BATCH_KEY = re.compile(r"batch (\d+)")
_CASE = re.compile(r"(.+)@(\d+)x(\d+)")  # of bench/train_speed.py: model, image size, batch size


@dataclass(frozen=True)
class GpuSpec:
    """Data sheet of a GPU."""

    name: str
    memory: float
    """Bytes."""
    watts: float
    link: float
    """Bytes per second to other GPUs of its machine in one direction, half of the advertised figure."""


GPU_SPECS = [
    GpuSpec("B200", 180e9, 1000.0, 900e9),
    GpuSpec("H200", 141e9, 700.0, 450e9),
    GpuSpec("H100", 80e9, 700.0, 450e9),
    GpuSpec("A100", 80e9, 400.0, 300e9),
    GpuSpec("V100", 32e9, 300.0, 150e9),
    GpuSpec("L40S", 48e9, 350.0, 25e9),
    GpuSpec("RTX 4090", 24e9, 450.0, 25e9),
]


@dataclass(frozen=True)
class MeasuredSpeed:
    """Measured training speed."""

    origin: str
    model: str
    img_size: int
    batch_size: int
    gpu: str
    gpus: int
    readings: tuple[float, ...]
    """Tokens per second of all GPUs together."""
    image_bytes: float | None = None
    """Memory per image, if it was measured."""

    def per_gpu(self) -> list[float]:
        """Tokens per second of one GPU in each scenario."""
        return [float(np.quantile(self.readings, quantile)) / self.gpus for quantile in SCENARIOS.values()]


def read_measured(path: Path, batch_size: int | None) -> MeasuredSpeed:
    """Read a run folder or a file of bench/results; of several batch sizes, choose the nearest to `batch_size`."""
    if (path / "metrics.jsonl").is_file():
        return _read_run(path)
    if path.is_file() and path.suffix == ".json":
        return _read_bench(path, batch_size)
    raise UserError(
        f"{path} is not a measurement.",
        "A run folder has a metrics.jsonl; a benchmark result is a .json file.",
        "Give one of them as --from, or `--from probe` to measure this machine.",
    )


def _read_run(run: Path) -> MeasuredSpeed:
    settings = read_yaml(TrainSettings, run / "config.yaml")
    _check_model(settings.model.name, run)
    readings: list[float] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            reading = float(json.loads(line)["train/tokens_per_second"])
        except (ValueError, KeyError, TypeError):
            continue  # a truncated line
        if readings[-1:] != [reading]:  # steps that were logged together share one reading
            readings.append(reading)
    if not readings:
        raise UserError(f"The run {run} has no metrics yet.", fix="Wait for its first steps.")
    warmup = int(_WARMUP_FRACTION * len(readings)) if len(readings) > 2 else 0
    log_file = run / "logs" / "train.log"
    log = log_file.read_text(errors="replace") if log_file.is_file() else ""
    gpus = int([1, *re.findall(r"Number of processes: (\d+)", log)][-1])
    batch = (settings.data.global_batch_size or settings.data.batch_size * gpus) // gpus
    gpu = ["GPU" if "Number of GPUs:" in log else "CPU", *re.findall(r" device +(.+)", log)][-1]
    side = configs.square(settings.model.img_size)
    return MeasuredSpeed(str(run), settings.model.name, side, batch, gpu, gpus, tuple(readings[warmup:]))


def _read_bench(file: Path, batch_size: int | None) -> MeasuredSpeed:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        hardware = content.get("hardware", {})
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None
    model, side, batch = _parse_command(str(content.get("command", "")))
    by_batch = {
        int(match[1]): value["tokens/s"]
        for key, value in content.items()
        if (match := _BATCH_KEY.fullmatch(key)) and isinstance(value, dict) and "tokens/s" in value
    }
    if cases := _parse_rows(content.get("rows")):
        (model, side), by_batch = next(iter(cases.items()))
    if by_batch:
        batch = min(by_batch, key=lambda size: abs(size - (batch_size or batch)))
        readings = by_batch[batch]
    elif "median train/tokens_per_second" in content:
        readings = content.get("tokens/s", [content["median train/tokens_per_second"]])
    else:
        raise UserError(f"{file} has no training speed (tokens/s).", fix="Choose another result.")
    gpu, gpus = str(hardware.get("gpu", hardware.get("cpu", "unknown"))), int(hardware.get("gpus") or 1)
    return MeasuredSpeed(str(file), model, side, batch, gpu, gpus, tuple(map(float, readings)))


def _parse_rows(rows: Any) -> dict[tuple[str, int], dict[int, list[float]]]:
    """Read the default training step from a result of bench/train_speed.py: readings by model and size, by batch."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows if isinstance(rows, list) else ():
        try:
            case, options = _CASE.fullmatch(row["case"]), row["variant"].split("+")
            best = 1e3 * row["K tokens/s"]
            second = best * row["ms a step"] / row["ms a step, the other row"]
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            continue  # a row of another benchmark, or a damaged one
        if case and options[0] == "fused" and "fp8" not in options:
            found.setdefault((case[1], int(case[2])), {})[int(case[3])] = [second, best]
    return found


def _parse_command(command: str) -> tuple[str, int, int]:
    """Model, image size and batch size of a recorded command, with the defaults of train."""

    def value(pattern: str, default: Any) -> Any:
        match = re.search(pattern, command)
        return type(default)(match[1]) if match else default

    config = Path(value(r"--config[= ](\S+)", ""))
    settings = read_yaml(TrainSettings, config) if config.is_file() else TrainSettings()
    model = value(r"--model[= ](\S+)", settings.model.name)
    _check_model(model, command)
    side = value(r"--im(?:a)?ge?_size[= ](\d+)", configs.square(settings.model.img_size))
    return model, side, value(r"--batch_size[= ](\d+)", settings.data.batch_size)


def _check_model(model: str, source: object) -> None:
    if not find_family(model).has_formulas:
        known = families_with("has_formulas")
        raise UserError(
            f"{source} trains {model}; estimates exist for {known} only.", fix=f"Give a measurement of {known}."
        )


@dataclass(frozen=True)
class Links:
    """Bandwidth of a GPU in bytes per second, to GPUs of the same node and to other nodes."""

    intra_node: float
    inter_node: float
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Scaling:
    """Predicted step time on a number of GPUs, in seconds."""

    gpus: int
    all_reduce: float
    exposed: float
    """All-reduce time that does not overlap with the backward pass."""
    straggler: float
    """Wait for the slowest GPU."""
    compute: float

    @property
    def efficiency(self) -> float:
        """Speed on n GPUs divided by n times the speed of one."""
        return self.compute / (self.compute + self.exposed + self.straggler)

    @property
    def speedup(self) -> float:
        """Speed relative to one GPU."""
        return self.gpus * self.efficiency

    @property
    def communication(self) -> float:
        """Fraction of a step without computation."""
        return 1 - self.efficiency


def ring_seconds(size: float, gpus: int, links: Links) -> float:
    """Seconds of a ring all-reduce of `size` bytes."""
    if gpus == 1:
        return 0.0
    local = min(gpus, links.gpus_per_node)
    nodes = -(-gpus // links.gpus_per_node)
    speed = LINK_EFFICIENCY * (links.intra_node if nodes == 1 else min(links.intra_node, links.inter_node))
    latency = 2 * (local - 1) * INTRA_NODE_LATENCY + 2 * math.ceil(math.log2(nodes)) * INTER_NODE_LATENCY
    return 2 * (gpus - 1) / gpus * size / speed + latency


def scale(compute: float, gradient_bytes: float, gpus: int, links: Links) -> Scaling:
    """Predict a step that takes `compute` seconds on one GPU."""
    all_reduce = ring_seconds(gradient_bytes, gpus, links)
    # The last bucket fills only when the backward pass ends.
    last_bucket = ring_seconds(min(gradient_bytes, BUCKET_BYTES), gpus, links)
    exposed = max(last_bucket, all_reduce - BACKWARD_FRACTION * compute)
    straggler = compute * STEP_JITTER * math.sqrt(2 * math.log(gpus)) if gpus > 1 else 0.0
    return Scaling(gpus, all_reduce, exposed, straggler, compute)


@dataclass(frozen=True)
class Cost:
    """Time, price and energy of a token budget."""

    tokens: float
    seconds: float
    gpu_hours: float
    price: float | None
    kilowatt_hours: float | None


@dataclass(frozen=True)
class Scenario:
    """Speed of all GPUs, and the cost of each budget at this speed."""

    name: str
    tokens_per_second: float
    costs: list[Cost]


def flops_per_token(model: str, img_size: int) -> float:
    """FLOPs of training on one token."""
    letter, patch = configs.parse_jit_name(model)
    return 3 * configs.forward_flops(letter, patch, img_size) / configs.tokens_per_image(patch, img_size)


def cost(tokens: float, speed: float, gpus: int, price: float | None, watts: float | None) -> Cost:
    """Compute the cost of a token budget at a speed of all GPUs together."""
    seconds = tokens / speed
    hours = gpus * seconds / 3600
    return Cost(tokens, seconds, hours, hours * price if price else None, hours * watts / 1000 if watts else None)


class TrainingEstimate:
    """Predictions for a training; `budgets` are in tokens."""

    def __init__(self, settings: EstimateSettings, measured: MeasuredSpeed, budgets: Sequence[float]) -> None:
        self.measured, self.gpus = measured, settings.gpus
        self.model, self.img_size = settings.model or measured.model, settings.img_size or measured.img_size
        self.batch_size = settings.batch_size or measured.batch_size
        letter, patch = configs.parse_jit_name(self.model)
        configs.check_image_size(patch, self.img_size)
        self.tokens_per_image = configs.tokens_per_image(patch, self.img_size)
        parameters = configs.parameter_count(letter, patch, 1)
        self.gradient_bytes = float(_GRADIENT_BYTES * parameters)
        spec = next((spec for spec in GPU_SPECS if spec.name in measured.gpu), None)
        intra_node = settings.link * 1e9 if settings.link else spec.link if spec else _PCIE
        self.links = Links(intra_node, settings.network / 8 * 1e9, settings.gpus_per_node)
        watts = settings.watts or (spec.watts if spec else None)
        self.scenarios = []
        for name, speed in zip(SCENARIOS, measured.per_gpu(), strict=True):
            row = self._predict(speed, settings.gpus)
            total_speed = row.speedup * self.batch_size * self.tokens_per_image / row.compute
            costs = [cost(budget, total_speed, settings.gpus, settings.price, watts) for budget in budgets]
            self.scenarios.append(Scenario(name, total_speed, costs))
        self.scaling = [self._predict(measured.per_gpu()[1], gpus) for gpus in GPUS]
        """For 1 to 1024 GPUs, at the medium speed."""
        self.memory_is_default = not (settings.memory or spec)
        self.gpu_memory = settings.memory * 1e9 if settings.memory else spec.memory if spec else _DEFAULT_MEMORY
        same = (self.model, self.img_size) == (measured.model, measured.img_size)
        per_image = (same and measured.image_bytes) or configs.activation_bytes(
            self.model, self.img_size, bf16=True, compiled=True
        )
        strategies: tuple[Strategy, ...] = ("ddp", "fsdp2")
        self.memory = {
            strategy: MemoryEstimate(parameters, state_bytes(strategy, parameters, 0, settings.gpus), per_image)
            for strategy in strategies
        }

    def _predict(self, speed: float, gpus: int) -> Scaling:
        """Scale the measured tokens per second of one GPU; another model is assumed to reach the same FLOP/s."""
        measured = self.measured
        speed *= flops_per_token(measured.model, measured.img_size) / flops_per_token(self.model, self.img_size)
        compute = self.batch_size * self.tokens_per_image / speed
        # A measurement of several GPUs already includes their communication.
        compute *= scale(compute, self.gradient_bytes, measured.gpus, self.links).efficiency
        return scale(compute, self.gradient_bytes, gpus, self.links)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step on one GPU, at the medium speed."""
        return self.scaling[0].compute

    @property
    def title(self) -> str:
        """Model, image size and batch size."""
        return f"{self.model} at {self.img_size} px, batch {self.batch_size} per GPU"

    def assumptions(self) -> str:
        """Describe the assumptions of the scaling table."""
        return (
            f"A step on one GPU takes {self.step_seconds * 1e3:.1f} ms, two thirds of it backward. A ring all-reduce "
            f"of {self.gradient_bytes / 1e9:.2f} GB of gradients runs at {LINK_EFFICIENCY:.0%} of "
            f"{self.links.intra_node / 1e9:.0f} GB/s inside a machine of {self.links.gpus_per_node} GPUs, and of "
            f"{self.links.inter_node / 1e9:g} GB/s per GPU between machines. It overlaps with the backward pass except "
            f"for the last {BUCKET_BYTES >> 20} MB. The step time of a GPU varies by {STEP_JITTER:.0%}. Data loading, "
            "checkpoints and samples are not included."
        )
