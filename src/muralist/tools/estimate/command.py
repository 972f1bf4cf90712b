"""`muralist estimate`: measure or read a speed, print tables of cost and scaling, and draw the scaling curve."""

from __future__ import annotations

import math
import textwrap
import time
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muralist.core.errors import UserError
from muralist.core.formatting import format_bytes, format_count, format_duration, parse_count
from muralist.core.run_dir import atomic_write
from muralist.models import configs
from muralist.settings import EstimateSettings
from muralist.tools.estimate.model import (
    Cost,
    Links,
    MeasuredSpeed,
    Scaling,
    TrainingEstimate,
    read_measured,
    scale,
)

_NETWORKS = {"InfiniBand, 200 Gbit/s per GPU": 25e9, "Ethernet, 100 Gbit/s per GPU": 12.5e9,
             "Ethernet, 25 Gbit/s per GPU": 3.125e9}  # fmt: skip
_COLORS = ("#20222a", "#2f6f9f", "#b5542c", "#8a8d96")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 860, 420, 60, 64, 96, 30
_TABLE_WIDTH = 120
_BAR_WIDTH = 12


def run(settings: EstimateSettings) -> int:
    """Print the estimate, and write the plot if one is requested."""
    plot = Path(settings.plot).expanduser() if settings.plot else None
    if plot and plot.suffix not in (".html", ".svg"):
        raise UserError(
            f"--plot {settings.plot} has an unknown file type.", fix="Give a name that ends in .html or .svg."
        )
    measured = _measure(settings)
    found = TrainingEstimate(settings, measured, _token_budgets(settings, measured))
    console = Console(width=None if Console().is_terminal else _TABLE_WIDTH, highlight=False)
    _print_origin(console, found)
    console.print(_cost_table(found))
    if found.scenarios[0].costs[0].kilowatt_hours is None:
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
    configs.check_image_size(configs.parse_jit_name(model)[1], side)
    from muralist.tools.estimate.probe import probe

    return probe(model, side, settings.batch_size or 64, settings.seconds, time.perf_counter)


def _token_budgets(settings: EstimateSettings, measured: MeasuredSpeed) -> list[float]:
    if not settings.images:
        return [parse_count(text) for text in settings.tokens]
    if "tokens" in settings.model_fields_set:
        raise UserError("--tokens and --images cannot both be given.", fix="Leave one of them out.")
    _, patch = configs.parse_jit_name(settings.model or measured.model)
    per_image = configs.tokens_per_image(patch, settings.img_size or measured.img_size)
    return [parse_count(text) * per_image for text in settings.images]


def _print_origin(console: Console, found: TrainingEstimate) -> None:
    measured = found.measured
    low, medium, high = map(format_count, measured.per_gpu())
    gpu = f"{measured.gpus} x {measured.gpu}" if measured.gpus > 1 else measured.gpu
    console.print(
        f"Measured: {measured.model} at {measured.img_size} px, batch {measured.batch_size} per GPU, {gpu}: "
        f"{low}, {medium}, {high} tokens/s per GPU "
        f"(low, medium, high of {len(measured.readings)} readings; {measured.origin})."
    )
    if found.batch_size != measured.batch_size:
        console.print(f"Assumed: batch {found.batch_size} per GPU has the speed of batch {measured.batch_size}.")
    if measured.gpus == 1 < found.gpus:
        device = "process without a GPU" if measured.gpu == "CPU" else "GPU"
        console.print(f"One {device} was measured; several are predicted by the model below the second table.")
    if (found.model, found.img_size) != (measured.model, measured.img_size):
        console.print(f"Assumed: {found.model} at {found.img_size} px reaches the same FLOPs per second.")
    console.print()


def _cost_table(found: TrainingEstimate) -> Table:
    table = Table(title=f"{found.title}, {found.gpus} GPUs", title_justify="left")
    table.add_column("scenario")
    table.add_column(f"tokens/s, {found.gpus} GPUs", justify="right")
    for cost in found.scenarios[0].costs:
        images = format_count(cost.tokens / found.tokens_per_image)
        table.add_column(f"{format_count(cost.tokens)} tokens ({images} images)", justify="right")
    for scenario in found.scenarios:
        table.add_row(scenario.name, format_count(scenario.tokens_per_second), *map(_format_cost, scenario.costs))
    return table


def _format_cost(cost: Cost) -> str:
    parts = [f"{cost.gpu_hours:,.0f} GPU hours"]
    if cost.price is not None:
        parts.append(f"price {cost.price:,.0f}")
    if cost.kilowatt_hours is not None:
        parts.append(f"{cost.kilowatt_hours:,.0f} kWh")
    return f"{format_duration(cost.seconds)}\n[dim]{', '.join(parts)}[/]"


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
            f"{row.communication:.1%}",
            f"{row.all_reduce * 1e3:.2f} ms",
            f"{row.exposed * 1e3:.2f} ms",
            format_count(row.speedup * found.batch_size * found.tokens_per_image / row.compute),
            "█" * round(_BAR_WIDTH * row.efficiency),
        )
    return table


def _print_memory(console: Console, found: TrainingEstimate) -> None:
    available = format_bytes(found.gpu_memory)
    for strategy, need in found.memory.items():
        assert need.per_image is not None
        source = "measured" if need.per_image == found.measured.image_bytes else "by formula"
        digits = 0 if need.per_image >= 1e7 else 1
        console.print(
            f"Memory, {strategy}: {format_bytes(need.state)} per GPU for weights, gradients, optimizer and EMA, "
            f"{need.per_image / 1e6:.{digits}f} MB per image (bf16, compiled; {source}): batch {found.batch_size} "
            f"takes {format_bytes(need.total(found.batch_size))} of {available}; the largest batch that fits is about "
            f"{need.largest_batch(found.gpu_memory):,}."
        )
    if found.memory_is_default:
        console.print(f"{available} is a default: give --memory, the memory of this unknown GPU.")
    console.print(f"A checkpoint takes {format_bytes(found.memory['ddp'].checkpoint)} of disk space.")


def _curves(found: TrainingEstimate) -> dict[str, list[Scaling]]:
    """Scaling by the name of the network: the requested one, and others to compare with."""
    curves = {f"requested: {found.links.inter_node * 8 / 1e9:g} Gbit/s per GPU": found.scaling}
    for name, inter_node in _NETWORKS.items():
        links = Links(found.links.intra_node, inter_node, found.links.gpus_per_node)
        curves[name] = [scale(found.step_seconds, found.gradient_bytes, row.gpus, links) for row in found.scaling]
    return curves


def plot_svg(found: TrainingEstimate) -> str:
    """Draw the scaling curve; points have a tooltip in a browser."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    axis = _HEIGHT - _BOTTOM
    octaves = math.log2(found.scaling[-1].gpus)

    def position(gpus: int, efficiency: float) -> tuple[float, float]:
        return _LEFT + width * math.log2(gpus) / octaves, _TOP + height * (1 - efficiency)

    def text(x: float, y: float, content: str, color: str = "#6b6d76", anchor: str = "start", size: int = 12) -> str:
        style = f'fill="{color}" font-size="{size}" text-anchor="{anchor}"'
        return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(content, quote=False)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#faf8f4"/>',
        text(_LEFT, 24, f"{found.title}: scaling efficiency", _COLORS[0], size=15),
        text(_LEFT - 8, axis + 18, "GPUs", anchor="end"),
    ]
    for percent in range(0, 101, 25):
        y = position(1, percent / 100)[1]
        parts.append(f'<line x1="{_LEFT}" y1="{y:.0f}" x2="{_WIDTH - _RIGHT}" y2="{y:.0f}" stroke="#e4e0d6"/>')
        parts.append(text(_LEFT - 8, y + 4, f"{percent}%", anchor="end"))
    parts += [text(position(row.gpus, 0)[0], axis + 18, str(row.gpus), anchor="middle") for row in found.scaling]
    for index, ((name, rows), color) in enumerate(zip(_curves(found).items(), _COLORS, strict=True)):
        points = [position(row.gpus, row.efficiency) for row in rows]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for row, (x, y) in zip(rows, points, strict=True):
            tooltip = f"{row.gpus} GPUs: {row.efficiency:.1%}, {row.speedup:.1f}x, exposed {1e3 * row.exposed:.1f} ms"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{tooltip}</title></circle>')
        parts.append(text(_LEFT + 10, axis - 70 + 17 * index, name, color))
    for index, line in enumerate(textwrap.wrap(found.assumptions(), 128)):
        parts.append(text(_LEFT, axis + 42 + 15 * index, line, size=11))
    return "\n".join([*parts, "</svg>", ""])
