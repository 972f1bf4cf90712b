"""The scaling curve, as a page that needs nothing else or as an SVG for documents: efficiency on 1 to 1024 GPUs."""

from __future__ import annotations

import math
import textwrap
from html import escape
from pathlib import Path

from muralist.errors import UserError
from muralist.runfolder import write_atomically
from muralist.scale.communication import Links, Scaling, assumptions, scale
from muralist.scale.estimate import Estimate

_NETWORKS = {"InfiniBand, 200 Gbit/s per GPU": 25e9, "Ethernet, 100 Gbit/s per GPU": 12.5e9,
             "Ethernet, 25 Gbit/s per GPU": 3.125e9}  # fmt: skip
_COLOURS = ("#20222a", "#2f6f9f", "#b5542c", "#8a8d96")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 860, 420, 60, 64, 96, 30


def check_plot(file: str) -> Path:
    """Refuse a kind of file that is not written, before anything is measured."""
    path = Path(file).expanduser()
    if path.suffix not in (".html", ".svg"):
        raise UserError(
            f"--plot {file} is neither a page nor a picture.", fix="Give a name that ends in .html or .svg."
        )
    return path


def write_plot(found: Estimate, path: Path) -> None:
    """Write the curve."""
    write_atomically(path, svg(found) if path.suffix == ".svg" else page(found))


def curves(found: Estimate) -> dict[str, list[Scaling]]:
    """Rows by what they are called: the network that was asked for, and others beside it."""
    named = {f"as asked: {found.links.between * 8 / 1e9:g} Gbit/s per GPU": found.scaling}
    for name, between in _NETWORKS.items():
        links = Links(found.links.inside, between, found.links.gpus_per_node)
        named[name] = [scale(found.step_seconds, found.gradients, row.gpus, links) for row in found.scaling]
    return named


def _title(found: Estimate) -> str:
    return f"{found.model} at {found.img_size} px, batch {found.batch_size} per GPU: part of n times one GPU's speed"


def _stated(found: Estimate, width: int) -> list[str]:
    return textwrap.wrap(assumptions(found.links, found.gradients, found.step_seconds), width)


def page(found: Estimate) -> str:
    """A page to point at."""
    import plotly.graph_objects as graph

    figure = graph.Figure()
    for (name, rows), colour in zip(curves(found).items(), _COLOURS, strict=True):
        figure.add_scatter(
            x=[row.gpus for row in rows],
            y=[row.efficiency for row in rows],
            customdata=[[row.speedup, 1e3 * row.exchange, 1e3 * row.visible] for row in rows],
            hovertemplate="%{x} GPUs: %{y:.1%}, %{customdata[0]:.1f}x<br>exchange %{customdata[1]:.1f} ms, "
            "of it visible %{customdata[2]:.1f} ms",
            name=name,
            line={"color": colour},
        )
    figure.update_layout(
        title=f"{_title(found)}<br><sub>{'<br>'.join(_stated(found, 150))}</sub>",
        xaxis={"type": "log", "title": "GPUs", "tickvals": [row.gpus for row in found.scaling]},
        yaxis={"title": "efficiency", "tickformat": ".0%", "range": [0, 1.05]},
        margin={"t": 150},
    )
    return figure.to_html(include_plotlyjs=True, full_html=True)


def svg(found: Estimate) -> str:
    """A picture for documents."""
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    last = math.log2(found.scaling[-1].gpus)

    def place(row: Scaling) -> tuple[float, float]:
        return _LEFT + wide * math.log2(row.gpus) / last, _TOP + high * (1 - row.efficiency)

    def text(x: float, y: float, words: str, colour: str = "#6b6d76", anchor: str = "start", size: int = 12) -> str:
        style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
        return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words, quote=False)}</text>'

    parts = [text(_LEFT, 24, _title(found), _COLOURS[0], size=15)]
    for percent in range(0, 101, 25):
        y = _TOP + high * (1 - percent / 100)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.0f}" x2="{_WIDTH - _RIGHT}" y2="{y:.0f}" stroke="#e4e0d6"/>')
        parts.append(text(_LEFT - 8, y + 4, f"{percent}%", anchor="end"))
    parts += [text(place(row)[0], _HEIGHT - _BOTTOM + 18, str(row.gpus), anchor="middle") for row in found.scaling]
    parts.append(text(_LEFT - 8, _HEIGHT - _BOTTOM + 18, "GPUs", anchor="end"))
    for number, ((name, rows), colour) in enumerate(zip(curves(found).items(), _COLOURS, strict=True)):
        line = " ".join("{:.1f},{:.1f}".format(*place(row)) for row in rows)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(_LEFT + 10, _HEIGHT - _BOTTOM - 70 + 17 * number, name, colour))
    parts += [text(_LEFT, _HEIGHT - _BOTTOM + 42 + 15 * n, line, size=11) for n, line in enumerate(_stated(found, 128))]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#faf8f4"/>', *parts, "</svg>", ""])
