"""Draw the loss curves of docs/training-jit.md from the record of bench/loss_curves.py.

python scripts/draw_loss_curves.py docs     writes docs/loss-curves.svg and the section of docs/training-jit.md
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from scripts.draw_fid_curve import FAINT, INK, LINE, label, svg, write

RECORD = Path(__file__).parent.parent / "bench" / "results" / "loss_curves_h200.json"
FIGURE, PAGE = "loss-curves.svg", "training-jit.md"
HEADING, NEXT = "## Loss in FP8", "## Memory"
WIDTH, HEIGHT, LEFT, RIGHT, TOP = 760, 460, 64, 24, 56
UPPER, LOWER, BETWEEN = 210, 90, 44  # heights of the loss panel, the difference panel and the gap
SMOOTHED = 20  # steps averaged per point
COLORS = {"fp32": "#20222a", "bf16": "#2f6f9f", "fp8": "#c2571a"}


def draw(measured: dict[str, Any]) -> str:
    """Draw the losses over steps and, below, the difference of bf16 and fp8 from fp32."""
    curves = {name: smooth(measured["loss"][name]) for name in COLORS}
    points = len(curves["fp32"])
    steps = [SMOOTHED * (number + 0.5) for number in range(points)]
    difference = {
        name: [100 * (ours / exact - 1) for ours, exact in zip(curves[name], curves["fp32"], strict=True)]
        for name in ("bf16", "fp8")
    }
    title = f"Loss of {measured['model']} in fp32, bf16 and fp8, same images and noise"
    parts = [label(LEFT, 26, title, INK, "start", 15)]
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    parts += panel(TOP, UPPER, low, high, steps, curves, "{:.2f}", measured["steps"])
    # Symmetric around zero and at least 0.2%, so that small differences look small.
    most = max(0.2, math.ceil(10 * max(abs(value) for values in difference.values() for value in values)) / 10)
    below = TOP + UPPER + BETWEEN
    parts.append(label(LEFT, below - 10, "difference from fp32, %", anchor="start", size=11))
    parts += panel(below, LOWER, -most, most, steps, difference, "{:+.1f}", measured["steps"])
    for number, (name, color) in enumerate(COLORS.items()):
        x = WIDTH - RIGHT - 150 + 52 * number
        parts.append(f'<line x1="{x}" y1="42" x2="{x + 14}" y2="42" stroke="{color}" stroke-width="3"/>')
        parts.append(label(x + 18, 46, name, anchor="start", size=11))
    gpu, torch = measured["hardware"].get("gpu", "CPU"), measured["versions"]["torch"]
    foot = f"steps of {measured['batch']} images; points are means of {SMOOTHED} steps; {gpu}, torch {torch}"
    parts.append(label(LEFT, HEIGHT - 12, foot, anchor="start", size=11))
    return svg(title, WIDTH, HEIGHT, parts)


def panel(
    top: float, high: float, least: float, most: float, steps: list[float],
    curves: dict[str, list[float]], number_format: str, last_step: int,
) -> list[str]:  # fmt: skip
    """Draw curves in one panel with its axes."""

    def across(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def down(value: float) -> float:
        return top + high * (most - value) / max(1e-9, most - least)

    parts = []
    for value in (least, (least + most) / 2, most):
        y = down(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{WIDTH - RIGHT}" y2="{y:.0f}" stroke="{LINE}"/>')
        parts.append(label(LEFT - 8, y + 4, number_format.format(value), anchor="end", size=11))
    for step in range(0, last_step + 1, max(1, last_step // 5)):
        parts.append(label(across(step), top + high + 18, f"{step:,}", FAINT, size=11))
    for name, values in curves.items():
        line = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in zip(steps, values, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[name]}" stroke-width="1.6"/>')
    return parts


def smooth(losses: list[float]) -> list[float]:
    """Average groups of consecutive steps."""
    return [
        sum(losses[start : start + SMOOTHED]) / SMOOTHED for start in range(0, len(losses) - SMOOTHED + 1, SMOOTHED)
    ]


def section(measured: dict[str, Any]) -> str:
    """Return the section of the page, starting with its heading."""
    means, difference = measured["mean loss of the last steps"], measured["from fp32"]
    rows = [f"| fp32 | {means['fp32']:.4f} | |"]
    for name in ("bf16", "fp8"):
        mean, error = difference[name]["of the mean"], difference[name]["standard error"]
        rows.append(f"| {name} | {means[name]:.4f} | {mean:+.2%} (± {error:.2%}) |")
    gpu, torch = measured["hardware"].get("gpu", "CPU"), measured["versions"]["torch"]
    compared = "smaller" if measured["fp8 is within chance"] else "larger"
    lines = [
        HEADING,
        "",
        f"![Loss in fp32, bf16 and fp8, step by step]({FIGURE})",
        "",
        f"*{measured['model']} on {measured['images']:,} images of CIFAR-10, batch {measured['batch']}: the same weights,",
        f"images, noise and times at every step. {gpu}, torch {torch}: `bench/loss_curves.py`.*",
        "",
        f"| | mean loss of the last {measured['window']} steps | difference from fp32 |",
        "|---|---|---|",
        *rows,
        "",
        f"Another seed in bf16 ends {measured['from seed to seed']:.2%} from the first;",
        f"the difference between fp8 and fp32 is {compared}.",
        "These are single runs: they would show a divergence, but cannot resolve differences this small.",
        "",
        "",
    ]
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Write the figure and the section into the folder of pages."""
    measured = json.loads(RECORD.read_text(encoding="utf-8"))
    write(folder, {FIGURE: draw(measured)}, PAGE, HEADING, NEXT, section(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
