"""Objectives and noise levels of diffusers schedulers: distributions, targets, weights, ranges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SCMScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.diffusion.noise_levels import NoiseLevels, alphas_cumprod, from_scheduler

KEYS = SampleKeys(5, torch.arange(20_000))
X, E = torch.randn(2, 20_000, 1, generator=torch.Generator().manual_seed(0)).unbind()


def levels(scheduler: Any, **settings: Any) -> NoiseLevels:
    config = dict(scheduler.config) | {"_class_name": type(scheduler).__name__}
    return from_scheduler(config, getattr(scheduler, "alphas_cumprod", None), **settings)


def deviation(values: Tensor, distribution: Any) -> float:
    """Kolmogorov-Smirnov: the largest distance between the two cumulative distributions."""
    own = torch.arange(1, len(values) + 1) / len(values)
    return float((own - distribution(values.double().sort().values)).abs().max())


def logit_normal(shift: float) -> Any:
    """The distribution of shift s / (1 + (shift - 1) s) with a logit-normal s."""
    return lambda s: torch.special.ndtr(torch.logit(s) - math.log(shift))


LIMIT = 1.63 / math.sqrt(20_000)  # exceeded by chance once in a hundred draws


@pytest.mark.parametrize(
    ("scheduler", "mu", "shift"),
    [
        (FlowMatchEulerDiscreteScheduler(shift=3.0), None, 3.0),
        (FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True), 0.7, math.exp(0.7)),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"), 3.25, 3.25),
        (UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0), None, 5.0),
    ],
)
def test_flow_levels_are_logit_normal_and_shifted(scheduler: Any, mu: float | None, shift: float) -> None:
    drawn = levels(scheduler).sample(KEYS, mu)
    assert deviation(drawn.noise, logit_normal(shift)) < LIMIT
    assert deviation(drawn.noise, logit_normal(shift * 1.1)) > LIMIT, "another shift would be noticed"
    torch.testing.assert_close(drawn.timestep, 1000 * drawn.noise)
    torch.testing.assert_close(drawn.add_noise(X, E), (1 - drawn.noise[:, None]) * X + drawn.noise[:, None] * E)
    torch.testing.assert_close(drawn.target(X, E), E - X)


def test_uniform_levels_where_asked_for() -> None:
    drawn = levels(FlowMatchEulerDiscreteScheduler(), sampling="uniform").sample(KEYS)
    assert deviation(drawn.noise, lambda s: s) < LIMIT


def test_inverted_schedule_counts_from_noise_to_data() -> None:
    """Mochi: its scheduler counts from 0 at noise, and its network predicts the data minus the noise."""
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    drawn = levels(scheduler).sample(KEYS)
    torch.testing.assert_close(drawn.timestep, 1000 * (1 - drawn.noise))
    torch.testing.assert_close(drawn.target(X, E), X - E)
    # One step of diffusers' own sampler along the target, from the noisiest level, ends at the data.
    scheduler.set_timesteps(sigmas=[1.0])
    assert scheduler.timesteps.tolist() == [0.0]
    data = scheduler.step(drawn.target(X, E), scheduler.timesteps[0], E).prev_sample
    torch.testing.assert_close(data, X)


def test_each_network_of_wan_22_is_trained_at_its_own_levels() -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    high = levels(scheduler, range=(0.875, 1.0)).sample(KEYS).noise
    low = levels(scheduler, range=(0.0, 0.875)).sample(KEYS).noise
    assert 0.875 <= float(high.min()) < 0.885 and 0.99 < float(high.max()) <= 1.0
    assert 0.0 <= float(low.min()) < 0.05 and 0.865 < float(low.max()) <= 0.875
    assert all(875 <= time <= 1000 for time in levels(scheduler, range=(0.875, 1.0)).probe_times)


def test_ddpm_levels_are_uniform_and_follow_the_betas() -> None:
    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    drawn = levels(scheduler).sample(KEYS)
    assert drawn.weight is None
    assert deviation((drawn.timestep + 0.5) / 1000, lambda t: t) < LIMIT + 0.001
    assert {float(drawn.timestep.min()), float(drawn.timestep.max())} == {0.0, 999.0}
    products = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000).double() ** 2).cumprod(0)[drawn.timestep.long()]
    torch.testing.assert_close(drawn.signal, products.sqrt().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drawn.noise, (1 - products).sqrt().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drawn.target(X, E), E)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weights(prediction: str) -> None:
    """Hang et al. 2023: min(SNR, gamma) for the data, over SNR for the noise, over SNR + 1 for the velocity."""
    scheduler = DDPMScheduler(prediction_type=prediction)
    drawn = levels(scheduler, min_snr_gamma=5.0).sample(KEYS)
    snr = (drawn.signal.double() / drawn.noise.double()) ** 2
    clipped = snr.clamp_max(5.0)
    expected = {"epsilon": clipped / snr, "v_prediction": clipped / (snr + 1), "sample": clipped}[prediction]
    torch.testing.assert_close(drawn.weight, expected.float(), rtol=1e-4, atol=1e-7)
    noisy, noise, data = drawn.add_noise(X, E), E, X
    target = drawn.target(X, E)
    t = drawn.timestep.long()
    own = {"epsilon": noise, "sample": data, "v_prediction": scheduler.get_velocity(X, E, t)}[prediction]
    torch.testing.assert_close(target, own)
    torch.testing.assert_close(noisy, scheduler.add_noise(X, E, t))


@pytest.mark.parametrize(
    ("scheduler", "asked", "said"),
    [
        (FlowMatchEulerDiscreteScheduler(), {"min_snr_gamma": 5.0}, "--min_snr_gamma has no effect"),
        (DDPMScheduler(), {"sampling": "logit_normal"}, "--timestep_sampling logit_normal is for flow matching"),
        (SCMScheduler(), {}, "SCMScheduler cannot be trained yet"),
        (
            EulerDiscreteScheduler(prediction_type="v_prediction", timestep_type="continuous"),
            {},
            "EulerDiscreteScheduler cannot be trained yet.*discrete timesteps",  # the network is told log(sigma) / 4
        ),
    ],
)
def test_settings_without_meaning_are_refused(scheduler: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        levels(scheduler, **asked)


def velocity_levels(alphas: Tensor) -> NoiseLevels:
    """Return the levels of HunyuanDiT."""
    return NoiseLevels("velocity", "uniform", len(alphas), alphas=alphas)


@pytest.mark.parametrize("beta_end", [0.018, 0.03])
def test_the_schedule_of_hunyuandit_is_that_of_diffusers(beta_end: float) -> None:
    scheduler = DDPMScheduler(1000, 0.00085, beta_end, "scaled_linear", prediction_type="v_prediction")
    a = alphas_cumprod(0.00085, beta_end)
    torch.testing.assert_close(a, scheduler.alphas_cumprod, rtol=2e-5, atol=1e-7)
    level = velocity_levels(a).sample(SampleKeys(3, torch.arange(5)))
    x, e = torch.randn(2, 5, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    step = level.timestep.long()
    torch.testing.assert_close(level.add_noise(x, e), scheduler.add_noise(x, e, step), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(level.target(x, e), scheduler.get_velocity(x, e, step), rtol=1e-4, atol=1e-5)


def test_the_published_ends_of_both_versions_of_hunyuandit() -> None:
    assert float(alphas_cumprod(0.00085, 0.018)[-1]) ** 0.5 == pytest.approx(0.0220, abs=5e-4)
    assert float(alphas_cumprod(0.00085, 0.03)[-1]) ** 0.5 == pytest.approx(0.0024, abs=1e-4)


def test_timesteps_of_ddpm_are_uniform_and_seeded_per_sample() -> None:
    numbers, given = torch.arange(100_000), velocity_levels(alphas_cumprod(0.00085, 0.018))
    step = given.sample(SampleKeys(3, numbers)).timestep
    assert int(step.min()) == 0 and int(step.max()) == 999
    counts = torch.bincount(step.long() // 100, minlength=10)
    assert float((counts - 10_000).abs().max()) < 5 * 10_000**0.5
    assert torch.equal(given.sample(SampleKeys(3, numbers[500:600])).timestep, step[500:600])
    assert not torch.equal(given.sample(SampleKeys(4, numbers[:600])).timestep, step[:600])
