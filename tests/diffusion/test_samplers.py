"""The samplers against flows whose solution is known, and the number of network passes they take."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.diffusion import samplers
from muralist.diffusion.samplers import SamplerSettings, guidance_at, sample, time_grid

MEAN, DEVIATION, NULL = 0.7, 0.3, 9


def gaussian_x(z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The exact mean of the data given z, when the data are normal; each label has its own center."""
    t = t.view(-1, 1).double()
    center = MEAN * (1 + labels.view(-1, 1))
    gain = t * DEVIATION**2 / (t**2 * DEVIATION**2 + (1 - t) ** 2)
    return center + gain * (z - t * center)


def as_v(z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    return (gaussian_x(z, t, labels) - z) / (1 - t.view(-1, 1).double())


def as_eps(z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    return z - t.view(-1, 1).double() * as_v(z, t, labels)


class Counted:
    """A network that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, list[int]]] = []

    def __call__(self, z: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        assert z.shape[0] == t.shape[0] == labels.shape[0]
        assert (t == t[0]).all()
        self.calls.append((t[0].item(), labels.tolist()))
        return gaussian_x(z, t, labels)


@pytest.fixture
def noise() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LABELS = torch.tensor([0, 0, 0, 1, 1, 1])


def error(noise: Tensor, settings: SamplerSettings) -> float:
    """Distance from the flow's exact map, z -> center + deviation * z."""
    exact = MEAN * (1 + LABELS.view(-1, 1)) + DEVIATION * noise
    return (sample(gaussian_x, noise, LABELS, NULL, settings) - exact).abs().max().item()


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_convergence_order(noise, solver, order):
    coarse, fine = (error(noise, SamplerSettings(solver, steps)) for steps in (100, 200))
    # Near the end Heun's last step is Euler's, whose local error is itself of second order.
    assert coarse / fine == pytest.approx(2**order, rel=0.15)
    assert fine < {"euler": 0.03, "heun": 0.001}[solver]


def exact_to(t: float, noise: Tensor) -> Tensor:
    """The data predicted at time t of the exact flow: there, z is normal, and the flow keeps each sample's quantile."""
    center = MEAN * (1 + LABELS.view(-1, 1))
    z = t * center + ((t * DEVIATION) ** 2 + (1 - t) ** 2) ** 0.5 * noise
    return gaussian_x(z, torch.full((6,), t), LABELS)


def test_abm2_converges_with_order_2(noise):
    exact = exact_to(0.98, noise)
    coarse, fine = (
        (sample(gaussian_x, noise, LABELS, NULL, SamplerSettings("abm2", steps)) - exact).abs().max().item()
        for steps in (50, 100)
    )
    assert coarse / fine == pytest.approx(4, rel=0.15)
    assert fine < 2e-4


def test_abm2_is_more_exact_than_heun_with_as_many_passes(noise):
    for passes in (7, 9, 19):
        few, many = SamplerSettings("abm2", passes), SamplerSettings("heun", (passes + 1) // 2)
        assert error(noise, few) < 0.5 * error(noise, many), passes


def test_abm2_has_equal_steps_of_the_log_snr_to_the_last_time_of_the_official_sampler():
    times = time_grid(20, "abm2")
    assert len(times) == 21 and times[0] == 0.0 and times[-1] == 1.0
    assert times[-2] == pytest.approx(time_grid(50)[-2], abs=1e-6)
    steps = torch.tensor(times[1:-1], dtype=torch.float64).logit().diff()
    torch.testing.assert_close(steps, steps[:1].expand(18), rtol=1e-4, atol=0)
    assert time_grid(1, "abm2") == [0.0, 1.0]


def test_abm2_with_one_step_is_euler(noise):
    one, two = (sample(gaussian_x, noise, LABELS, NULL, SamplerSettings(solver, 1)) for solver in ("abm2", "euler"))
    assert torch.equal(one, two)


def test_abm2_written_out(noise):
    """Three steps by hand: predict, evaluate, correct; the last lands on the data predicted at the last point."""
    _, a, b, _ = time_grid(3, "abm2")

    def v(z: Tensor, t: float) -> Tensor:
        return as_v(z, torch.full((6,), t), LABELS)

    v0 = v(noise, 0.0)
    v1 = v(noise + a * v0, a)
    corrected = noise + a * (v0 + v1) / 2
    predicted = corrected + (b - a) * (v1 + (b - a) / (2 * a) * (v1 - v0))
    expected = gaussian_x(predicted, torch.full((6,), b), LABELS)
    images = sample(gaussian_x, noise, LABELS, NULL, SamplerSettings("abm2", 3))
    torch.testing.assert_close(images, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("solver", ["euler", "heun", "abm2"])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_lands_on_the_prediction(noise, solver, steps):
    target = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images = sample(lambda z, t, y: target, noise, LABELS, NULL, SamplerSettings(solver, steps))
    torch.testing.assert_close(images, target, atol=1e-5, rtol=0)


def test_official_last_step_leaves_noise(noise):
    target = torch.zeros(6, 5, dtype=torch.float64)
    settings = SamplerSettings("euler", 50, official_last_step=True)
    images = sample(lambda z, t, y: target, noise, LABELS, NULL, settings)
    # The steps from 0.96 and 0.98 divide by 0.05, not by 0.04 and 0.02: each goes 40 % of the way.
    torch.testing.assert_close(images, noise * 0.04 * 0.6 * 0.6, atol=1e-5, rtol=1e-4)
    assert sample(lambda z, t, y: target, noise, LABELS, NULL, replace(settings, t_eps=1e-4)).abs().max() < 1e-5


@pytest.mark.parametrize("solver", ["euler", "heun", "abm2"])
def test_data_and_velocity_predictions_give_the_same_image(noise, solver):
    settings = SamplerSettings(solver, 40, guidance=1.5)
    images = [sample(net, noise, LABELS, NULL, settings, kind) for net, kind in ((gaussian_x, "x"), (as_v, "v"))]
    torch.testing.assert_close(images[0], images[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("solver", ["heun", "abm2"])
def test_noise_prediction_reaches_the_data(noise, solver):
    # Not exactly: at t = 0 the noise is z itself, so the first step does not move.
    images = sample(as_eps, noise, LABELS, NULL, SamplerSettings(solver, 400, t_eps=0.002), "eps")
    exact = MEAN * (1 + LABELS.view(-1, 1)) + DEVIATION * noise
    torch.testing.assert_close(images, exact, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("settings", "conditional", "unconditional"),
    [
        (SamplerSettings("heun", 50), 99, 0),
        (SamplerSettings("euler", 50), 50, 0),
        (SamplerSettings("heun", 50, guidance=2.0), 99, 99),
        (SamplerSettings("heun", 1, guidance=2.0), 1, 1),
        (SamplerSettings("euler", 10, guidance=2.0, interval=(0.1, 1.0)), 10, 8),
        (SamplerSettings("euler", 10, guidance=2.0, interval=(0.1, 0.8)), 10, 6),
        (SamplerSettings("euler", 10, guidance=2.0, interval=(0.0, 0.5)), 10, 5),
        (SamplerSettings("heun", 10, guidance=2.0, interval=(0.1, 0.8)), 19, 12),
        (SamplerSettings("abm2", 50), 50, 0),
        (SamplerSettings("abm2", 1, guidance=2.0), 1, 1),
        (SamplerSettings("abm2", 10, guidance=2.0, interval=(0.1, 0.8)), 10, 5),
    ],
)
def test_unconditional_passes_run_only_where_guidance_acts(noise, settings, conditional, unconditional):
    network = Counted()
    images = sample(network, noise, LABELS, NULL, settings)
    free = [t for t, labels in network.calls if labels == [NULL] * 6]
    assert (len(network.calls) - len(free), len(free)) == (conditional, unconditional)
    low, high = settings.interval
    assert all((low == 0 or t > low) and t < high for t in free)
    torch.testing.assert_close(images, always_two_passes(noise, settings), atol=1e-5, rtol=1e-5)


def always_two_passes(noise: Tensor, settings: SamplerSettings) -> Tensor:
    """The official sampler, written out: both passes at every evaluation, scale 1 outside the interval."""
    low, high = settings.interval
    times = torch.tensor(time_grid(settings.steps, settings.solver))

    def velocity(z: Tensor, t: Tensor) -> Tensor:
        conditional, free = (as_v(z, t.expand(6), labels) for labels in (LABELS, torch.full_like(LABELS, NULL)))
        scale = torch.where((t < high) & ((low == 0) | (t > low)), settings.guidance, 1.0)
        return free + scale * (conditional - free)

    z, corrected, slopes = noise, noise, []
    for i in range(settings.steps):
        step = times[i + 1] - times[i]
        slope = velocity(z, times[i])
        slopes.append(slope)
        if settings.solver == "abm2" and 0 < i < settings.steps - 1:
            corrected = corrected + (times[i] - times[i - 1]) * (slopes[i - 1] + slope) / 2
            before = times[i] - times[i - 1]
            z = corrected + step * (slope + step / (2 * before) * (slope - slopes[i - 1]))
            continue
        if settings.solver == "heun" and i < settings.steps - 1:
            slope = (slope + velocity(z + step * slope, times[i + 1])) / 2
        z = z + step * slope
    return z


def test_guidance_moves_away_from_the_unconditional(noise):
    plain, guided = (sample(gaussian_x, noise, LABELS, NULL, SamplerSettings(guidance=s)) for s in (1.0, 1.5))
    # The null label's center lies above every label's, so guidance moves down.
    assert (guided < plain - 0.1).all()


def test_interval_ends_are_compared_in_the_precision_of_the_times():
    times = time_grid(10)
    settings = SamplerSettings(guidance=3.0, interval=(0.1, 0.8))
    assert [guidance_at(t, settings) for t in times] == [1, 1, 3, 3, 3, 3, 3, 3, 1, 1, 1]


@pytest.mark.parametrize("solver", ["heun", "abm2"])
def test_a_slot_does_not_depend_on_the_others(noise, solver):
    settings = SamplerSettings(solver, 8, guidance=2.0)
    other = noise.clone()
    other[1:] *= -1
    labels = torch.tensor([0, 1, 1, 0, 0, 0])
    one, two = sample(gaussian_x, noise, LABELS, NULL, settings), sample(gaussian_x, other, labels, NULL, settings)
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])


@pytest.mark.parametrize(("solver", "graphs"), [("heun", 4), ("abm2", 5)])
def test_arithmetic_is_compiled_once_for_all_times(noise, solver, graphs):
    calls = []
    settings = SamplerSettings(solver, 8, guidance=2.0, interval=(0.1, 1.0))
    with torch.compiler.set_stance("force_eager"):
        compiled = sample(gaussian_x, noise, LABELS, NULL, settings, compiled=True)
    assert torch.equal(compiled, sample(gaussian_x, noise, LABELS, NULL, settings))
    torch._dynamo.reset()
    samplers._maybe_compile.cache_clear()
    with patch.object(torch, "compile", partial(torch.compile, backend=lambda graph, _: calls.append(1) or graph)):
        compiled = sample(gaussian_x, noise, LABELS, NULL, settings, compiled=True)
    samplers._maybe_compile.cache_clear()
    # With guidance and without, a step, the mean of two and the line through two; times and steps are no part of it.
    assert len(calls) == graphs
    torch.testing.assert_close(compiled, sample(gaussian_x, noise, LABELS, NULL, settings))


def test_no_gradient_is_kept(noise):
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    images = sample(lambda z, t, y: scale * z, noise, LABELS, NULL, SamplerSettings(steps=2))
    assert not images.requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"solver": "rk4"}, "Unknown solver rk4"),
        ({"solver": "abm2", "official_last_step": True}, "abm2 has no official last step"),
        ({"interval": (0.8, 0.2)}, "interval 0.8 to 0.2"),
        ({"interval": (0.0, 1.5)}, "interval 0.0 to 1.5"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        SamplerSettings(**wrong)
