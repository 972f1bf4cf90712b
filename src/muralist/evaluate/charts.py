"""The charts of the page, as descriptions that plotly draws in the browser."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from muralist.evaluate.measures import measured, title
from muralist.evaluate.results import Run, Score

Chart = dict[str, Any]
_LONGEST_NAME = 24
_STEPS = 30


def score_charts(runs: Sequence[Run]) -> list[tuple[str, Chart]]:
    """One small chart for every number: a bar for each run, with its interval. Numbers of one run need no chart."""
    if len(runs) < 2:
        return []
    return [(title(metric), _score_chart(metric, runs)) for metric in measured(runs)]


def _score_chart(metric: str, runs: Sequence[Run]) -> Chart:
    scores = [run.scores.get(metric, Score()) for run in runs]
    names = _names(runs)
    bars = {
        "type": "bar",
        "x": list(range(len(runs))),
        "customdata": names,
        "y": [score.value for score in scores],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [_reach(score.value, score.high) for score in scores],
            "arrayminus": [_reach(score.low, score.value) for score in scores],
            "thickness": 1.5,
        },
        "hovertemplate": "%{customdata}: %{y:.4g}<extra></extra>",
    }
    # Bars stand at numbers, since two long names may be the same once they are short.
    ticks = {"tickvals": bars["x"], "ticktext": names, "showgrid": False, "zeroline": False}
    return {"data": [bars], "layout": {"showlegend": False, "xaxis": ticks}, "colour": "bars"}


def clip_chart(runs: Sequence[Run]) -> Chart | None:
    """How the CLIP scores of single pictures are spread."""
    scores = [[score for score in run.clip_scores if score is not None] for run in runs]
    if not any(scores):
        return None
    ends = np.histogram_bin_edges(np.concatenate(scores), _STEPS)  # the same for all runs
    step = ends[1] - ends[0]
    middles = np.arange(-1, len(ends)) * step + (ends[0] + step / 2)  # one more on both sides, where it is nothing
    traces = []
    for name, own in zip(_names(runs), scores, strict=True):
        if own:
            shares = np.pad(100 * np.histogram(own, ends)[0] / len(own), 1)
            x, y = middles.round(4).tolist(), shares.round(3).tolist()
            traces.append({"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "fill": "tozeroy"})
    axes = {
        "xaxis": {"title": {"text": "CLIP score of a picture"}},
        "yaxis": {"title": {"text": "% of the pictures"}, "rangemode": "tozero"},
    }
    return {"data": traces, "layout": {"showlegend": len(runs) > 1, **axes}, "colour": "steps"}


def speed_chart(runs: Sequence[Run]) -> Chart | None:
    """Pictures per second of every GPU."""
    traces = []
    for name, run in zip(_names(runs), runs, strict=True):
        if speed := run.results.speed:
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": [f"GPU {html.escape(gpu)}" for gpu in speed],
                    "y": [one.images_per_second for one in speed.values()],
                    "hovertemplate": "%{x}: %{y:.3g} images/s<extra></extra>",
                }
            )
    if not traces:
        return None
    layout = {"barmode": "group", "showlegend": len(runs) > 1, "xaxis": {"showgrid": False}}
    layout["yaxis"] = {"title": {"text": "images per second"}}
    return {"data": traces, "layout": layout, "colour": "traces"}


def _names(runs: Sequence[Run]) -> list[str]:
    short = [run.name if len(run.name) <= _LONGEST_NAME else f"…{run.name[1 - _LONGEST_NAME :]}" for run in runs]
    return [html.escape(name) for name in short]  # plotly reads labels as a kind of HTML


def _reach(low: float | None, high: float | None) -> float:
    return 0.0 if low is None or high is None else max(0.0, high - low)
