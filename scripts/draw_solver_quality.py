"""Draw the solver section of docs/generating.md from the record of bench/solver_quality.py.

python -m scripts.draw_solver_quality docs     writes docs/solver-quality.svg and the section of docs/generating.md
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from scripts.draw_fid_curve import FAINT, INK, LINE, label, svg, write

RECORD = Path(__file__).parent.parent / "bench" / "results" / "solver_quality_two_cores.json"
FIGURE, PAGE = "solver-quality.svg", "generating.md"
HEADING, NEXT = "## JiT in fewer passes", "## Fast mode"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 190, 56, 64
COLORS = {
    "abm2": "#2f6f9f",
    "UniPC-2, log-SNR": "#5d8c3f",
    "DPM-Solver++ 2M, log-SNR": "#c2571a",
    "heun, log-SNR": "#8a63a8",
    "heun": INK,
    "euler": FAINT,
}
TICKS = (10, 20, 40, 80, 160)
ORDER = tuple(reversed(COLORS))
OFFICIAL = 99  # evaluations of 50 Heun steps
SHOWN = (5, 10, 20, 40, OFFICIAL)


def settings(measured: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the measured settings with their names, guided ones first."""
    found = [
        (f"{name.partition(',')[0]}, {_guidance(setting)}", setting)
        for name, model in measured["models"].items()
        for setting in model["settings"]
    ]
    return sorted(found, key=lambda item: item[1]["guidance"] == 1)


def _guidance(setting: dict[str, Any]) -> str:
    if setting["guidance"] == 1:
        return "no guidance"
    low, high = setting["interval"]
    return f"guidance {setting['guidance']:g} on [{low:g}, {high:g}]"


def draw(measured: dict[str, Any]) -> str:
    """Draw the PSNR to the exact solution over network passes, on a logarithmic axis, for the first setting."""
    name, setting = settings(measured)[0]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    rows = [row for row in setting["rows"] if row["solver"] in COLORS]
    first, last = math.log2(min(row["passes"] for row in rows)), math.log2(max(row["passes"] for row in rows))
    most = 10 * math.ceil(max(row["psnr"] for row in rows) / 10)

    def across(passes: float) -> float:
        return LEFT + wide * (math.log2(passes) - first) / (last - first)

    def down(value: float) -> float:
        return TOP + high * (1 - (value - 10) / (most - 10))

    title = f"JiT: distance to the exact solution by network passes ({name})"
    parts = [label(LEFT, 26, title, INK, "start", 15)]
    parts.append(label(LEFT - 8, TOP - 12, "dB", anchor="end"))
    for value in range(10, most + 1, 10):
        y = down(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{WIDTH - RIGHT}" y2="{y:.0f}" stroke="{LINE}"/>')
        parts.append(label(LEFT - 8, y + 4, str(value), anchor="end"))
    parts += [label(across(tick), HEIGHT - BOTTOM + 20, str(tick)) for tick in TICKS]
    for number, (solver, color) in enumerate(COLORS.items()):
        points = sorted((row["passes"], row["psnr"]) for row in rows if row["solver"] == solver)
        line = " ".join(f"{across(passes):.1f},{down(value):.1f}" for passes, value in points)
        width = 3 if solver == "abm2" else 1.5
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        parts += [
            f'<circle cx="{across(passes):.1f}" cy="{down(value):.1f}" r="3" fill="{color}"/>'
            for passes, value in points
        ]
        x, y = WIDTH - RIGHT + 12, TOP + 18 * number
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 14}" y2="{y}" stroke="{color}" stroke-width="3"/>')
        parts.append(label(x + 20, y + 4, solver, INK, "start", 11))
    foot = (
        f"network passes per image; PSNR in dB, mean of {measured['models'][name.partition(',')[0]]['images']} images; "
        f"torch {measured['versions']['torch']}"
    )
    parts.append(label(LEFT, HEIGHT - 14, foot, anchor="start", size=11))
    return svg(title, WIDTH, HEIGHT, parts)


def table(measured: dict[str, Any]) -> list[str]:
    """Return the table of PSNR: a line for each setting and number of evaluations."""
    titles = " | ".join(f"**{name}**" if name == "abm2" else name for name in ORDER)
    lines = [f"| model | passes | {titles} |", "|---|---|" + "---|" * len(ORDER)]
    for name, setting in settings(measured):
        measured_at = {row["evaluations"] for row in setting["rows"]}
        for evaluations in [count for count in SHOWN if count in measured_at]:
            # Heun has an odd number of evaluations: one less where the others have an even one.
            near = {
                row["solver"]: row for row in setting["rows"] if evaluations - 1 <= row["evaluations"] <= evaluations
            }
            passes = sorted({near[solver]["passes"] for solver in ORDER if solver in near})
            shown = " to ".join(str(count) for count in dict.fromkeys((passes[0], passes[-1])))
            shown += " (50 Heun steps)" if evaluations == OFFICIAL else ""
            cells = (_psnr(solver, near) for solver in ORDER)
            lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
    return lines


def _psnr(solver: str, rows: dict[str, dict[str, Any]]) -> str:
    if solver not in rows:
        return ""
    value = f"{rows[solver]['psnr']:.1f}"
    return (
        f"**{value}**" if rows[solver]["psnr"] == max(rows[name]["psnr"] for name in ORDER if name in rows) else value
    )


def section(measured: dict[str, Any]) -> str:
    """Return the section of the page, starting with its heading."""
    guided = next(setting for _, setting in settings(measured) if "kid" in setting["exact"])
    kids = {(row["solver"], row["evaluations"]): row for row in guided["rows"] if "kid" in row}
    official, best = kids["heun", OFFICIAL], kids["abm2", 10]
    twenty = next(row for row in guided["rows"] if row["solver"] == "abm2" and row["steps"] == 20)
    count = next(model["images"] for model in measured["models"].values())
    cores, torch = measured["hardware"]["cores"], measured["versions"]["torch"]
    lines = [
        HEADING,
        "",
        "```bash",
        "muralist generate --prompts_csv prompts.csv --output_dir images --model_path results/cifar10 \\",
        "    --scheduler abm2 --num_inference_steps 20",
        "```",
        "",
        "| `--scheduler`, `--sample_solver` of train | passes per step without and with guidance | times |",
        "|---|---|---|",
        "| `heun` (default: 50 steps) | 2 and 4; the last step 1 and 2 | equally spaced, as in the official sampler |",
        "| `abm2` (for 10 to 20 steps) | 1 and 2 | equally spaced in the log-SNR, up to t = 0.98 |",
        "| `euler` | 1 and 2 | equally spaced |",
        "",
        "`abm2` is the predictor-corrector method of Adams, Bashforth and Moulton of second order: it extrapolates the",
        "velocity of the last two steps, and corrects each step with the next velocity, which it computes anyway. Its last",
        "evaluation is at t = 0.98, as that of the official 50 steps. `--official_last_step` is refused with it.",
        "`muralist sweep` and Python take `scheduler` too, and a folder of images keeps its solver.",
        "",
        f"![PSNR to the exact solution by network passes]({FIGURE})",
        "",
        "PSNR in dB to the exact solution up to t = 0.98, with the last step onto the prediction:",
        "",
        *table(measured),
        "",
        f"*Small models: {_models(measured)};",
        f"{count} images each. {cores} CPU cores, torch {torch}, float32:",
        f"`bench/solver_quality.py`, record `bench/results/{RECORD.name}`. log-SNR: at the times of `abm2`.",
        "There is no guidance before an interval begins, so passes depend on the times.*",
        "",
        f"With guidance on CIFAR-10, 20 steps of `abm2` ({twenty['passes']} passes) are as near to the exact solution as",
        f"the official 50 steps of Heun ({official['passes']} passes): {twenty['psnr']:.1f} and {official['psnr']:.1f} dB.",
        f"KID of the same {count} images (few: small differences mean nothing): {official['kid']:.3f} with the 50 steps,",
        f"{best['kid']:.3f} with 10 steps of `abm2`, {kids['heun', 9]['kid']:.3f} with 5 of Heun,",
        f"{kids['euler', 10]['kid']:.3f} with 10 of Euler. A classifier of driving scenes recognizes all images of `abm2`,",
        "Heun and Euler from 5 evaluations on: it does not tell them apart. Not measured: large models, FID of many images.",
        "Measure your own run with `--model RUN`; the script uses a GPU where there is one.",
        "",
        "",
    ]
    return "\n".join(lines)


def _models(measured: dict[str, Any]) -> str:
    names: dict[str, str] = {}
    for name, model in measured["models"].items():
        names.setdefault(name.partition(",")[0], f"{model['model'].partition(',')[0]}, {model['training']}")
    return "; ".join(f"{name} ({text})" for name, text in names.items())


def main(folder: Path) -> None:
    """Write the figure and the section into the folder of pages."""
    measured = json.loads(RECORD.read_text(encoding="utf-8"))
    write(folder, {FIGURE: draw(measured)}, PAGE, HEADING, NEXT, section(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
