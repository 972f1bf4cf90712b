"""`muralist estimate`: time, cost, energy, scaling and memory of a training, computed from a measured speed."""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes, format_count, format_duration, parse_count
from muralist.core.image_size import Size, format_size
from muralist.core.run_dir import atomic_write
from muralist.models import configs
from muralist.models.spec import families_with, find_family
from muralist.settings import EstimateSettings, Strategy, TrainSettings
from muralist.settings.load import read_yaml
from muralist.train.preflight import MemoryEstimate, state_bytes, with_critic

GPUS = tuple(2**power for power in range(11))  # 1 to 1024
SCENARIOS = {"conservative": 0.1, "medium": 0.5, "optimistic": 0.9}  # quantiles of the readings
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2")
BACKWARD_FRACTION = 2 / 3
BUCKET_BYTES = 25 * 2**20 // 2  # bytes of a DDP bucket in bf16: DDP fills 25 MB of float32
LINK_EFFICIENCY = 0.8  # fraction of the advertised speed of a link that a collective reaches
INTRA_NODE_LATENCY, INTER_NODE_LATENCY = 5e-6, 20e-6  # seconds per hop
STEP_JITTER = 0.01  # standard deviation of the step time of a GPU, as a fraction of the step time
_GRADIENT_BYTES = 2  # bf16
_WARMUP_FRACTION = 0.1  # of the readings of a run, in which caches fill and clocks rise
_NETWORKS = {
    "InfiniBand, 200 Gbit/s per GPU": 25e9,
    "Ethernet, 100 Gbit/s per GPU": 12.5e9,
    "Ethernet, 25 Gbit/s per GPU": 3.125e9,
}
_TABLE_WIDTH = 120
_BAR_WIDTH = 12


class GpuSpec(NamedTuple):
    """Data sheet of a GPU."""

    memory: float  # bytes
    watts: float | None
    link: float  # bytes per second to other GPUs of its machine in one direction, half of the advertised figure


GPU_SPECS = {
    "B200": GpuSpec(180e9, 1000.0, 900e9),
    "H200": GpuSpec(141e9, 700.0, 450e9),
    "H100": GpuSpec(80e9, 700.0, 450e9),
    "A100": GpuSpec(80e9, 400.0, 300e9),
    "V100": GpuSpec(32e9, 300.0, 150e9),
    "L40S": GpuSpec(48e9, 350.0, 25e9),
    "RTX 4090": GpuSpec(24e9, 450.0, 25e9),
}
_UNKNOWN_GPU = GpuSpec(80e9, None, 25e9)  # PCIe 4


class MeasuredNetwork(NamedTuple):
    """A network without formulas, as its run describes it."""

    tokens_per_image: int
    trained: float  # parameters
    frozen: float


@dataclass(frozen=True)
class MeasuredSpeed:
    """Measured training speed."""

    origin: str
    model: str
    img_size: Size
    batch_size: int
    gpu: str
    gpus: int
    readings: tuple[float, ...]  # tokens per second of all GPUs together
    image_bytes: float | None = None  # memory per image, if it was measured
    network: MeasuredNetwork | None = None  # None: formulas describe the network
    student_steps: int = 0  # of a distillation

    def per_gpu(self) -> list[float]:
        """Tokens per second of one GPU in each scenario."""
        return [float(np.quantile(self.readings, quantile)) / self.gpus for quantile in SCENARIOS.values()]


def read_measured(path: Path, batch_size: int | None) -> MeasuredSpeed:
    """Read a run folder or a file of bench/results; of several batch sizes, choose the nearest to `batch_size`."""
    if (path / "metrics.jsonl").is_file():
        return _read_run(path)
    if path.is_file() and path.suffix == ".json":
        return _read_bench(path, batch_size)
    problem = "is not a measurement" if path.exists() else "was not found"
    raise UserError(
        f"{path} {problem}.",
        "A run folder has a metrics.jsonl; a benchmark result is a .json file.",
        "Give one of them as --from, or `--from probe` to measure this machine.",
    )


def _read_run(run: Path) -> MeasuredSpeed:
    settings = read_yaml(TrainSettings, run / "config.yaml")
    by_hardware: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    hardware = 1, "CPU"
    tokens_per_image = 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
            reading = float(row["train/tokens_per_second"])
            tokens_per_image = reading / float(row.get("train/samples_per_second", reading))
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue  # a truncated line
        hardware = row.get("world_size"), row.get("device")
        if by_hardware[hardware][-1:] != [reading]:  # steps that were logged together share one reading
            by_hardware[hardware].append(reading)
    if not by_hardware:
        raise UserError(f"The run {run} has no metrics yet.", fix="Wait for its first steps.")
    readings = by_hardware[hardware]  # a resumed run may have continued on other GPUs
    warmup = int(_WARMUP_FRACTION * len(readings)) if len(readings) > 2 else 0
    gpus, gpu = hardware if None not in hardware else _read_log(run / "logs" / "train.log")
    batch = (settings.data.global_batch_size or settings.data.batch_size * gpus) // gpus
    network = None
    if not find_family(settings.model.name).has_formulas:
        network = MeasuredNetwork(round(tokens_per_image), *_read_parameters(run / "logs" / "train.log"))
    size = settings.model.img_size
    origin = f"{run}, a distillation, with the passes of its teacher" if settings.distill.teacher else str(run)
    steps = settings.distill.steps if settings.distill.teacher else 0
    seen = tuple(readings[warmup:])
    return MeasuredSpeed(origin, settings.model.name, size, batch, gpu, gpus, seen, None, network, steps)


def _read_parameters(file: Path) -> tuple[float, float]:
    """Trained and frozen parameters in the run summary of a log."""
    log = file.read_text(errors="replace") if file.is_file() else ""
    found = re.findall(r"([\d.]+)M (?:of ([\d.]+)M )?parameters", log)
    if not found:
        raise UserError(f"{file} does not name the number of parameters.", fix="Give a run whose log is complete.")
    trained, total = found[-1]
    return 1e6 * float(trained), 1e6 * max(0.0, float(total or trained) - float(trained))


def _read_log(file: Path) -> tuple[int, str]:
    """Number of processes and device of a run of version 0.1, whose metrics do not name them."""
    log = file.read_text(errors="replace") if file.is_file() else ""
    processes, device = re.findall(r"Number of processes: (\d+)", log), re.findall(r" device +(.+)", log)
    return int([1, *processes][-1]), ["GPU" if "Number of GPUs:" in log else "CPU", *device][-1]


def _read_bench(file: Path, batch_size: int | None) -> MeasuredSpeed:
    """Read the default training step from a result of bench/train_speed.py."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        hardware, rows = content.get("hardware", {}), content.get("rows")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None
    readings: dict[tuple[str, int, int], tuple[float, float]] = {}  # by model, image size and batch size
    for row in rows if isinstance(rows, list) else ():
        try:
            case, options = re.fullmatch(r"(.+)@(\d+)x(\d+)", row["case"]), row["variant"].split("+")
            best = 1e3 * row["K tokens/s"]
            second = best * row["ms a step"] / row["ms a step, the other row"]
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            continue  # a row of another benchmark, or a damaged one
        if case and options[0] == "fused" and "fp8" not in options:
            readings[case[1], int(case[2]), int(case[3])] = second, best
    if not readings:
        raise UserError(f"{file} has no training speed (tokens/s).", fix="Choose another result.")
    model, side, _ = next(iter(readings))
    _check_model(model, file)
    batches = [batch for *known, batch in readings if known == [model, side]]
    batch = min(batches, key=lambda batch: abs(batch - (batch_size or TrainSettings().data.batch_size)))
    gpu, gpus = str(hardware.get("gpu", hardware.get("cpu", "unknown"))), int(hardware.get("gpus") or 1)
    return MeasuredSpeed(str(file), model, side, batch, gpu, gpus, readings[model, side, batch])


def _no_formula(model: str, wanted: str) -> UserError:
    known = families_with("has_formulas")
    return UserError(
        f"The speed of {wanted} cannot be derived from this measurement.",
        f"Formulas for FLOPs exist for {known} only; {model} is estimated from a run of its own.",
        f"Train {wanted} for a minute (`muralist train --model {model} ... --max_steps 50`) and give its folder as --from.",
    )


def _check_model(model: str, source: object) -> None:
    if not find_family(model).has_formulas:
        known = families_with("has_formulas")
        fix = f"Give a measurement of {known}."
        raise UserError(f"{source} trains {model}; estimates exist for {known} only.", fix=fix)


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
    exposed: float  # all-reduce time that does not overlap with the backward pass
    straggler: float  # wait for the slowest GPU
    compute: float

    @property
    def efficiency(self) -> float:
        """Speed on n GPUs divided by n times the speed of one."""
        return self.compute / (self.compute + self.exposed + self.straggler)

    @property
    def speedup(self) -> float:
        """Speed relative to one GPU."""
        return self.gpus * self.efficiency


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
    straggler = compute * STEP_JITTER * math.sqrt(2 * math.log(gpus))
    return Scaling(gpus, all_reduce, exposed, straggler, compute)


def flops_per_token(model: str, img_size: Size) -> float:
    """FLOPs of training on one token."""
    letter, patch = configs.parse_jit_name(model)
    return 3 * configs.forward_flops(letter, patch, img_size) / configs.tokens_per_image(patch, img_size)


class TrainingEstimate:
    """Predictions for a training."""

    def __init__(self, settings: EstimateSettings, measured: MeasuredSpeed) -> None:
        self.measured, self.gpus, self.price = measured, settings.gpus, settings.price
        self.model, self.img_size = settings.model or measured.model, settings.img_size or measured.img_size
        self.batch_size = settings.batch_size or measured.batch_size
        per_image: float | None = None
        if network := measured.network:
            if (self.model, self.img_size) != (measured.model, measured.img_size):
                raise _no_formula(measured.model, f"{self.model} at {format_size(self.img_size)} px")
            self.tokens_per_image, parameters, frozen = network.tokens_per_image, int(network.trained), network.frozen
        else:
            if not find_family(self.model).has_formulas:
                raise _no_formula(self.model, self.model)
            (letter, patch), frozen = configs.parse_jit_name(self.model), 0.0
            configs.check_image_size(patch, self.img_size)
            self.tokens_per_image = configs.tokens_per_image(patch, self.img_size)
            parameters = configs.parameter_count(letter, patch, 1)
            same = (self.model, self.img_size) == (measured.model, measured.img_size)
            by_formula = configs.activation_bytes(self.model, self.img_size, bf16=True, compiled=True)
            per_image = (same and measured.image_bytes) or by_formula
        teacher = 0.0
        if measured.student_steps:
            parameters, per_image, teacher = with_critic(parameters, per_image, measured.student_steps)
        self.gradient_bytes = float(_GRADIENT_BYTES * parameters)
        spec = next((spec for name, spec in GPU_SPECS.items() if name in measured.gpu), _UNKNOWN_GPU)
        intra_node = settings.link * 1e9 if settings.link else spec.link
        self.links = Links(intra_node, settings.network / 8 * 1e9, settings.gpus_per_node)
        self.watts = settings.watts or spec.watts
        self.gpu_memory = settings.memory * 1e9 if settings.memory else spec.memory
        self.memory_is_default = not settings.memory and spec is _UNKNOWN_GPU
        speeds = measured.per_gpu()
        self.scaling = [self._predict(speeds[1], gpus) for gpus in GPUS]  # for 1 to 1024 GPUs, at the medium speed
        rows = [self._predict(speed, self.gpus) for speed in speeds]
        self.speeds = {name: self.tokens_per_second(row) for name, row in zip(SCENARIOS, rows, strict=True)}
        """Tokens per second of all GPUs together, by scenario."""
        self.memory = {
            strategy: MemoryEstimate(
                parameters, state_bytes(strategy, parameters, frozen, self.gpus) + teacher, per_image
            )
            for strategy in STRATEGIES
        }

    def _predict(self, speed: float, gpus: int) -> Scaling:
        """Scale the measured tokens per second of one GPU; another model is assumed to reach the same FLOP/s."""
        measured = self.measured
        if measured.network is None:
            speed *= flops_per_token(measured.model, measured.img_size) / flops_per_token(self.model, self.img_size)
        compute = self.batch_size * self.tokens_per_image / speed
        # A measurement of several GPUs already includes their communication.
        compute *= scale(compute, self.gradient_bytes, measured.gpus, self.links).efficiency
        return scale(compute, self.gradient_bytes, gpus, self.links)

    def tokens_per_second(self, row: Scaling) -> float:
        """Speed of all GPUs together."""
        return row.speedup * self.batch_size * self.tokens_per_image / row.compute

    def cost(self, tokens: float, speed: float) -> str:
        """Describe time, GPU hours, price and energy of a token budget at a speed of all GPUs together."""
        hours = self.gpus * tokens / speed / 3600
        parts = [f"{hours:,.0f} GPU hours"]
        if self.price is not None:
            parts.append(f"price {hours * self.price:,.0f}")
        if self.watts is not None:
            parts.append(f"{hours * self.watts / 1000:,.0f} kWh")
        return f"{format_duration(tokens / speed)}\n[dim]{', '.join(parts)}[/]"

    @property
    def title(self) -> str:
        """Model, image size and batch size."""
        return f"{self.model} at {format_size(self.img_size)} px, batch {self.batch_size} per GPU"

    def assumptions(self) -> str:
        """Describe the assumptions of the scaling table."""
        return (
            f"A step on one GPU takes {self.scaling[0].compute * 1e3:.1f} ms, two thirds of it backward. A ring "
            f"all-reduce of {self.gradient_bytes / 1e9:.2f} GB of gradients runs at {LINK_EFFICIENCY:.0%} of "
            f"{self.links.intra_node / 1e9:.0f} GB/s inside a machine of {self.links.gpus_per_node} GPUs, and of "
            f"{self.links.inter_node / 1e9:g} GB/s per GPU between machines. It overlaps with the backward pass except "
            f"for the last {BUCKET_BYTES >> 20} MB. The step time of a GPU varies by {STEP_JITTER:.0%}. Data loading, "
            "checkpoints and samples are not included."
        )


def run(settings: EstimateSettings) -> int:
    """Print the estimate, and write the plot if one is requested."""
    if settings.model_path:
        from muralist.tools import estimate_pipeline  # imports torch

        return estimate_pipeline.run(settings)
    plot = Path(settings.plot).expanduser() if settings.plot else None
    if plot and plot.suffix not in (".html", ".svg"):
        fix = "Give a name that ends in .html or .svg."
        raise UserError(f"--plot {settings.plot} has an unknown file type.", fix=fix)
    found = TrainingEstimate(settings, _measure(settings))
    console = Console(width=None if Console().is_terminal else _TABLE_WIDTH, highlight=False)
    budgets = _token_budgets(settings, found.tokens_per_image)
    _print_origin(console, found)
    console.print(_cost_table(found, budgets))
    if found.watts is None:
        console.print("No energy estimate: give --watts, the power of this unknown GPU.")
    console.print(_scaling_table(found))
    console.print(f"[dim]{found.assumptions()}[/]\n")
    _print_memory(console, found)
    if plot:
        svg = plot_svg(found)
        atomic_write(plot, svg if plot.suffix == ".svg" else f"<!doctype html>\n<html>\n{svg}</html>\n")
        console.print(f"{settings.plot}: the scaling curve; open it in a browser.")
    return 0


def _measure(settings: EstimateSettings) -> MeasuredSpeed:
    if settings.source != "probe":
        return read_measured(Path(settings.source).expanduser(), settings.batch_size)
    model, side = settings.model or "JiT-B/4", settings.img_size or 64
    if not find_family(model).has_formulas:
        raise _no_formula(model, model)
    if isinstance(side, tuple):
        raise UserError("The probe trains on squares.", fix="Give one number as --img_size.")
    configs.check_image_size(configs.parse_jit_name(model)[1], side)
    from muralist.tools.probe import probe  # imports torch

    return probe(model, side, settings.batch_size or 64, settings.seconds, time.perf_counter)


def _token_budgets(settings: EstimateSettings, tokens_per_image: int) -> list[float]:
    if not settings.images:
        return [parse_count(text) for text in settings.tokens]
    if "tokens" in settings.model_fields_set:
        raise UserError("--tokens and --images cannot both be given.", fix="Leave one of them out.")
    return [parse_count(text) * tokens_per_image for text in settings.images]


def _print_origin(console: Console, found: TrainingEstimate) -> None:
    measured = found.measured
    low, medium, high = map(format_count, measured.per_gpu())
    gpu = f"{measured.gpus} x {measured.gpu}" if measured.gpus > 1 else measured.gpu
    console.print(
        f"Measured: {measured.model} at {format_size(measured.img_size)} px, batch {measured.batch_size} per GPU, {gpu}: "
        f"{low}, {medium}, {high} tokens/s per GPU "
        f"(low, medium, high of {len(measured.readings)} readings; {measured.origin})."
    )
    if found.batch_size != measured.batch_size:
        console.print(f"Assumed: batch {found.batch_size} per GPU has the speed of batch {measured.batch_size}.")
    if measured.gpus == 1 < found.gpus:
        device = "process without a GPU" if measured.gpu == "CPU" else "GPU"
        console.print(f"One {device} was measured; several are predicted by the model below the second table.")
    if (found.model, found.img_size) != (measured.model, measured.img_size):
        console.print(f"Assumed: {found.model} at {format_size(found.img_size)} px reaches the same FLOPs per second.")
    console.print()


def _cost_table(found: TrainingEstimate, budgets: Sequence[float]) -> Table:
    table = Table("scenario", title=f"{found.title}, {found.gpus} GPUs", title_justify="left")
    table.add_column(f"tokens/s, {found.gpus} GPUs", justify="right")
    for tokens in budgets:
        images = format_count(tokens / found.tokens_per_image)
        table.add_column(f"{format_count(tokens)} tokens ({images} images)", justify="right")
    for scenario, speed in found.speeds.items():
        table.add_row(scenario, format_count(speed), *(found.cost(tokens, speed) for tokens in budgets))
    return table


def _scaling_table(found: TrainingEstimate) -> Table:
    table = Table(title="Scaling", title_justify="left")
    for name in ("GPUs", "speed-up", "efficiency", "communication", "all-reduce", "exposed", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in found.scaling:
        table.add_row(
            f"{row.gpus}",
            f"{row.speedup:.3g}x",
            f"{row.efficiency:.1%}",
            f"{1 - row.efficiency:.1%}",
            f"{row.all_reduce * 1e3:.2f} ms",
            f"{row.exposed * 1e3:.2f} ms",
            format_count(found.tokens_per_second(row)),
            "█" * round(_BAR_WIDTH * row.efficiency),
        )
    return table


def _print_memory(console: Console, found: TrainingEstimate) -> None:
    available = format_bytes(found.gpu_memory)
    for strategy, need in found.memory.items():
        state = f"Memory, {strategy}: {format_bytes(need.state)} per GPU for weights, gradients, optimizer and EMA"
        if need.per_image is None:
            console.print(f"{state}, plus frozen components and activations, for which {found.model} has no formula.")
            continue
        source = "measured" if need.per_image == found.measured.image_bytes else "by formula"
        digits = 0 if need.per_image >= 1e7 else 1
        console.print(
            f"{state}, {need.per_image / 1e6:.{digits}f} MB per image (bf16, compiled; {source}): batch {found.batch_size} "
            f"takes {format_bytes(need.total(found.batch_size))} of {available}; the largest batch that fits is about "
            f"{need.largest_batch(found.gpu_memory):,}."
        )
    if found.memory_is_default:
        console.print(f"{available} is a default: give --memory, the memory of this unknown GPU.")
    console.print(f"A checkpoint takes {format_bytes(found.memory['ddp'].checkpoint)} of disk space.")


def plot_svg(found: TrainingEstimate) -> str:
    """Draw the scaling curve of the requested network and of others; points have a tooltip in a browser."""
    networks = {f"requested: {found.links.inter_node * 8 / 1e9:g} Gbit/s per GPU": found.links.inter_node, **_NETWORKS}
    curves = {}
    for name, inter_node in networks.items():
        links = replace(found.links, inter_node=inter_node)
        curves[name] = [scale(found.scaling[0].compute, found.gradient_bytes, gpus, links) for gpus in GPUS]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "static"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    assumptions = textwrap.wrap(found.assumptions(), 128)
    template = environment.get_template("scaling.svg")
    return template.render(title=found.title, numbers_of_gpus=GPUS, curves=curves, assumptions=assumptions)
