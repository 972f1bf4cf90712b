"""`muralist estimate`: the tables of guides 1 and 2, computed."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muralist.errors import UserError
from muralist.models import variants
from muralist.scale.communication import assumptions
from muralist.scale.estimate import Bill, Estimate, estimate
from muralist.scale.measured import Measured, read_measured
from muralist.scale.scaling_picture import check_plot, write_plot
from muralist.settings import EstimateSettings
from muralist.words import amount, duration, gigabytes, short

_WIDTH = 120
_BAR = 12
_GUIDE_2 = {2: "1.8-1.9x", 4: "3.5-3.8x", 8: "6.5-7.0x"}


def run(settings: EstimateSettings) -> int:
    """Measure or read a speed, and print what follows from it."""
    if settings.plot:
        check_plot(settings.plot)
    measured = _measured(settings)
    found = estimate(settings, measured, _budgets(settings, measured))
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    _say_origin(console, found)
    console.print(_time_table(found, settings))
    if found.scenarios[0].bills[0].kilowatt_hours is None:
        console.print("Energy is left out: --watts tells the power of a card that is not known here.")
    console.print(_scaling_table(found))
    console.print(f"[dim]{assumptions(found.links, found.gradients, found.step_seconds)}[/]\n")
    _say_memory(console, found)
    if settings.plot:
        write_plot(found, check_plot(settings.plot))
        console.print(f"{settings.plot}: the scaling curve; open it in a browser.")
    return 0


def _measured(settings: EstimateSettings) -> Measured:
    if settings.source != "probe":
        return read_measured(Path(settings.source).expanduser(), settings.batch_size)
    model, side = settings.model or "JiT-B/4", settings.img_size or 64
    variants.check_image_size(variants.parse_name(model)[1], side)
    from muralist.scale.probe import probe

    return probe(model, side, settings.batch_size or 64, settings.seconds, time.perf_counter)


def _budgets(settings: EstimateSettings, measured: Measured) -> list[float]:
    """Budgets in tokens."""
    if not settings.images:
        return [amount(text) for text in settings.tokens]
    if "tokens" in settings.model_fields_set:
        raise UserError("--tokens and --images cannot both be given.", fix="Leave one of them out.")
    _, patch = variants.parse_name(settings.model or measured.model)
    per_image = variants.tokens_per_image(patch, settings.img_size or measured.img_size)
    return [amount(text) * per_image for text in settings.images]


def _say_origin(console: Console, found: Estimate) -> None:
    measured = found.measured
    low, middle, high = measured.per_gpu()
    kind = f"{measured.gpus} x {measured.gpu}" if measured.gpus > 1 else measured.gpu
    console.print(
        f"Measured: {measured.model} at {measured.img_size} px, batch {measured.batch_size} per GPU, {kind}: "
        f"{short(low)}, {short(middle)}, {short(high)} tokens/s per GPU (low, middle, high of {len(measured.readings)} "
        f"readings; {measured.origin})."
    )
    if found.batch_size != measured.batch_size:
        console.print(f"Batch {found.batch_size} per GPU is taken to have the speed of {measured.batch_size}.")
    if measured.gpus == 1 < found.gpus:
        one = "process without a GPU" if measured.gpu == "CPU" else "GPU"
        console.print(f"One {one} was measured: what several make of it is a model, which the second table states.")
    if (found.model, found.img_size) != (measured.model, measured.img_size):
        console.print(f"{found.model} at {found.img_size} px is taken to reach the same part of the GPU's speed.")
    console.print()


def _time_table(found: Estimate, settings: EstimateSettings) -> Table:
    """Guide 1's table."""
    title = f"{found.model} at {found.img_size} px, {found.gpus} GPUs, batch {found.batch_size} per GPU"
    table = Table(title=title, title_justify="left")
    table.add_column("scenario")
    table.add_column(f"tokens/s, {found.gpus} GPUs", justify="right")
    patch = variants.parse_name(found.model)[1]
    per_image = variants.tokens_per_image(patch, found.img_size)
    for one in found.scenarios[0].bills:
        table.add_column(f"{short(one.tokens)} tokens ({short(one.tokens / per_image)} images)", justify="right")
    for scenario in found.scenarios:
        table.add_row(scenario.name, short(scenario.tokens_per_second), *map(_bill, scenario.bills))
    return table


def _bill(one: Bill) -> str:
    parts = [f"{one.gpu_hours:,.0f} GPU hours"]
    if one.cost is not None:
        parts.append(f"price {one.cost:,.0f}")
    if one.kilowatt_hours is not None:
        parts.append(f"{one.kilowatt_hours:,.0f} kWh")
    return f"{duration(one.seconds)}\n[dim]{', '.join(parts)}[/]"


def _scaling_table(found: Estimate) -> Table:
    """Guide 2's table."""
    table = Table(title="How it scales", title_justify="left")
    for name in (
        "GPUs",
        "speed-up",
        "efficiency",
        "communication",
        "exchange",
        "of it visible",
        "tokens/s",
        "guide 2 expects",
    ):
        table.add_column(name, justify="right", no_wrap=name != "guide 2 expects")
    table.add_column("")
    tokens = found.batch_size * variants.tokens_per_image(variants.parse_name(found.model)[1], found.img_size)
    for row in found.scaling:
        table.add_row(
            f"{row.gpus}",
            f"{row.speedup:.3g}x",
            f"{row.efficiency:.1%}",
            f"{row.communication:.1%}",
            f"{row.exchange * 1e3:.2f} ms",
            f"{row.visible * 1e3:.2f} ms",
            short(row.speedup * tokens / row.compute),
            _GUIDE_2.get(row.gpus, ""),
            "█" * round(_BAR * row.efficiency),
        )
    return table


def _say_memory(console: Console, found: Estimate) -> None:
    for strategy, need in found.needs.items():
        most = need.largest_batch(found.memory)
        assert need.per_image is not None
        how = "measured" if need.per_image == found.measured.image_bytes else "by formula"
        digits = 0 if need.per_image >= 1e7 else 1
        console.print(
            f"Memory, {strategy}: {gigabytes(need.state)} per GPU for weights, gradients, optimizer and averages, "
            f"{need.per_image / 1e6:.{digits}f} MB for each image (bf16, compiled; {how}): batch {found.batch_size} takes "
            f"{gigabytes(need.total(found.batch_size))} of {gigabytes(found.memory)}; the largest that fits is about "
            f"{most:,}."
        )
    if found.guessed_memory:
        console.print(f"{gigabytes(found.memory)} are a guess: --memory tells of a card that is not known here.")
    console.print(f"A checkpoint takes {gigabytes(found.needs['ddp'].checkpoint)} of disk.")
