"""Draw the FID curve of docs/evaluating.md from the record of bench/cifar_fid.py.

python scripts/draw_fid_curve.py docs       writes docs/cifar-fid.svg and the section of docs/evaluating.md
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent.parent / "bench" / "results" / "cifar_fid_h200.json"
FIGURE, PAGE = "cifar-fid.svg", "evaluating.md"
HEADING, NEXT = "## FID during training", "## Limits of the metrics"
HALVED = (
    "Inception ran with weights rounded to float16 (`scripts/halve_inception.py`), which changes FID by about 0.01."
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 48, 64, 56
PAPER, INK, FAINT, LINE, COLOR = "#faf8f4", "#20222a", "#6b6d76", "#e4e0d6", "#2f6f9f"


def draw(measured: dict[str, Any]) -> str:
    """Draw FID from 0 over the images seen, on a logarithmic axis."""
    rows = measured["checkpoints"]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    first, last = math.log2(rows[0]["images"]), math.log2(rows[-1]["images"])
    step = _round_step(max(row["fid"] for row in rows))
    most = step * math.ceil(max(row["fid, 95%"][1] for row in rows) / step)

    def across(images: float) -> float:
        return LEFT + 24 + (wide - 24) * (math.log2(images) - first) / max(1e-9, last - first)

    def down(fid: float) -> float:
        return TOP + high * (1 - fid / most)

    title = f"FID of {measured['model']} on CIFAR-10, by images seen in training"
    parts = [label(LEFT, 26, title, INK, "start", 15)]
    for fid in range(0, most + 1, step):
        y = down(fid)
        parts.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{WIDTH - RIGHT}" y2="{y:.0f}" stroke="{LINE}"/>')
        parts.append(label(LEFT - 8, y + 4, str(fid), anchor="end"))
    points = [(across(row["images"]), down(row["fid"])) for row in rows]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOR}" stroke-width="2"/>')
    for row, (x, y) in zip(rows, points, strict=True):
        top, bottom = (down(fid) for fid in reversed(row["fid, 95%"]))
        parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{COLOR}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOR}"/>')
        parts.append(label(x, y - 12, f"{row['fid']:.0f}", INK))
        parts.append(label(x, HEIGHT - BOTTOM + 20, f"{row['images']:,}"))
    count, gpu = rows[0]["generated images"], measured["hardware"].get("gpu", "CPU")
    below = (
        f"images seen; {count:,} images per point, bars are 95% intervals; {gpu}, torch {measured['versions']['torch']}"
    )
    parts.append(label(LEFT, HEIGHT - 14, below, anchor="start", size=11))
    return svg(title, WIDTH, HEIGHT, parts)


def section(measured: dict[str, Any]) -> str:
    """Return the section of the page, starting with its heading."""
    rows = measured["checkpoints"]
    first, last = rows[0], rows[-1]
    guidance = f"guidance {measured['guidance']:g}" if measured["guidance"] != 1 else "no guidance"
    table = [
        f"| {row['images']:,} | {row['seconds of steps']:.0f} s | {row['val/loss']:.4f} | {row['fid']:.1f} "
        f"({row['fid, 95%'][0]:.1f} to {row['fid, 95%'][1]:.1f}) | {row['kid']:.4f} |"
        for row in rows
    ]
    gpu, torch = measured["hardware"].get("gpu", "CPU"), measured["versions"]["torch"]
    lines = [
        HEADING,
        "",
        f"![FID of a JiT on CIFAR-10, checkpoint by checkpoint]({FIGURE})",
        "",
        f"*FID falls from {first['fid']:.1f} to {last['fid']:.1f}: {measured['model']} "
        f"on {last['reference images']:,} images of CIFAR-10, batch {measured['total batch']}, constant learning rate.",
        f"{last['generated images']:,} images per checkpoint, generated with its EMA weights, "
        f"{measured['solver steps']} steps, {guidance}.",
        f"{gpu}, torch {torch}, {measured['seconds of all'] / 60:.1f} minutes in total: `bench/cifar_fid.py`.*",
        "",
        "| images seen | training time | held-out loss | FID (95%) | KID |",
        "|---|---|---|---|---|",
        *table,
        "",
        "The reference is the training set, and a model that copied it would have a low FID: the held-out loss is listed",
        "for that reason. FID of so few images is higher than published values, which use 50,000.",
        *([HALVED] if measured["inception in 16 bits"] else []),
        "",
        "",
    ]
    return "\n".join(lines)


def replace_section(page: str, heading: str, following: str, text: str) -> str:
    """Insert a section before the heading that follows it, in place of an earlier version of the section."""
    without = re.sub(
        rf"^{re.escape(heading)}\n.*?(?=^{re.escape(following)}\n)", "", page, flags=re.DOTALL | re.MULTILINE
    )
    before, after = without.split(f"{following}\n")
    return f"{before}{text}{following}\n{after}"


def _round_step(most: float) -> int:
    """Return a round axis step that gives about five ticks."""
    return next(step for step in (10, 20, 50, 100, 200) if most / step <= 6)


def svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """Return a complete SVG image."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>', *parts, "</svg>", ""])


def label(x: float, y: float, text: str, color: str = FAINT, anchor: str = "middle", size: int = 12) -> str:
    """Return an SVG text element."""
    style = f'fill="{color}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text, quote=False)}</text>'


def write(folder: Path, figures: dict[str, str], name: str, heading: str, following: str, text: str) -> None:
    """Write figures, and a section of a page, into the folder of pages."""
    for figure, content in figures.items():
        (folder / figure).write_text(content, encoding="utf-8")
    page = folder / name
    page.write_text(replace_section(page.read_text(encoding="utf-8"), heading, following, text), encoding="utf-8")


def main(folder: Path) -> None:
    """Write the figure and the section into the folder of pages."""
    measured = json.loads(RECORD.read_text(encoding="utf-8"))
    write(folder, {FIGURE: draw(measured)}, PAGE, HEADING, NEXT, section(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
