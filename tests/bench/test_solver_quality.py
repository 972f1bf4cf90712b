"""Test the solvers of bench/solver_quality.py on a flow whose solution is known, and docs and figure against the record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from bench.solver_quality import adams, dpmpp_2m, heun, unipc2
from scripts import draw_fid_curve, draw_solver_quality
from scripts.draw_solver_quality import COLORS, HEADING, NEXT
from torch import Tensor

from bench import solver_quality
from tests.conftest import REPOSITORY

MEAN, DEVIATION = 0.7, 0.3


def velocity(z: Tensor, t: float) -> Tensor:
    gain = t * DEVIATION**2 / (t**2 * DEVIATION**2 + (1 - t) ** 2)
    return (MEAN + gain * (z - t * MEAN) - z) / (1 - t)


@pytest.mark.parametrize(
    "method", [dpmpp_2m, unipc2, adams(2, 2), adams(2, 0), heun], ids=["dpm", "unipc", "abm", "ab", "heun"]
)
def test_order_of_convergence(method: Callable[..., Tensor]) -> None:
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = [
        float((method(velocity, noise, solver_quality.uniform(steps)) - MEAN - DEVIATION * noise).abs().max())
        for steps in (80, 160)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.4), errors
    assert errors[1] < 5e-3


@pytest.mark.parametrize(
    "grid", [solver_quality.uniform, solver_quality.by_log_snr, solver_quality.edm, solver_quality.shifted(2.0)]
)
def test_times_rise_from_noise_to_data(grid: Callable[[int], Sequence[float]]) -> None:
    times = grid(10)
    assert len(times) == 11 and times[0] == 0 and times[-1] == 1
    assert all(later > earlier for earlier, later in pairwise(times))


def test_page_and_figure_match_the_record() -> None:
    measured = json.loads(draw_solver_quality.RECORD.read_text())
    docs = REPOSITORY / "docs"
    figure = (docs / draw_solver_quality.FIGURE).read_text()
    assert figure == draw_solver_quality.draw(measured), "run `python -m scripts.draw_solver_quality docs`"
    page = (docs / draw_solver_quality.PAGE).read_text()
    assert draw_fid_curve.replace_section(page, HEADING, NEXT, draw_solver_quality.section(measured)) == page


def test_every_claim_of_the_section_is_measured() -> None:
    measured = json.loads(draw_solver_quality.RECORD.read_text())
    for name, setting in draw_solver_quality.settings(measured):
        psnr = {(row["solver"], row["evaluations"]): row["psnr"] for row in setting["rows"]}
        for evaluations in (5, 10, 20):
            rivals = [value for (solver, count), value in psnr.items() if evaluations - 1 <= count <= evaluations]
            own = [solver for solver, count in psnr if count == evaluations and solver in COLORS]
            assert "abm2" in own and len(rivals) >= 6
            assert psnr["abm2", evaluations] == max(psnr[solver, evaluations] for solver in own), (name, evaluations)
        # Twenty steps are about as near as the official fifty, which take five times as many passes with guidance.
        assert psnr["abm2", 20] > psnr["heun", 99] - 0.5, name


def test_figure_is_to_scale() -> None:
    measured = json.loads(draw_solver_quality.RECORD.read_text())
    _, setting = draw_solver_quality.settings(measured)[0]
    drawn = draw_solver_quality.draw(measured)
    lines = [line.split('"') for line in drawn.splitlines() if line.startswith("<polyline")]
    (blue,) = [parts[1] for parts in lines if draw_solver_quality.COLORS["abm2"] in parts]
    points = [tuple(map(float, point.split(","))) for point in blue.split()]
    rows = sorted((row["passes"], row["psnr"]) for row in setting["rows"] if row["solver"] == "abm2")
    (x0, y0), (x1, y1), (x2, y2) = points[0], points[1], points[-1]
    assert (x1 - x0) / (x2 - x0) == pytest.approx(
        math.log(rows[1][0] / rows[0][0]) / math.log(rows[-1][0] / rows[0][0]), abs=0.01
    )
    assert (y1 - y0) / (y2 - y0) == pytest.approx((rows[1][1] - rows[0][1]) / (rows[-1][1] - rows[0][1]), abs=0.01)
