"""DDPM: the same schedule as diffusers, uniform timesteps seeded per sample."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler

from muralist.core.rng import SampleKeys
from muralist.diffusion import ddpm


@pytest.mark.parametrize("beta_end", [0.018, 0.03])
def test_the_schedule_is_that_of_diffusers(beta_end: float) -> None:
    scheduler = DDPMScheduler(1000, 0.00085, beta_end, "scaled_linear", prediction_type="v_prediction")
    a = ddpm.alphas_cumprod(0.00085, beta_end)
    torch.testing.assert_close(a, scheduler.alphas_cumprod, rtol=2e-5, atol=1e-7)
    generator = torch.Generator().manual_seed(0)
    x, e = torch.randn(2, 5, 4, 8, 8, generator=generator)
    step = torch.tensor([0, 1, 500, 998, 999])
    torch.testing.assert_close(ddpm.add_noise(x, e, a[step]), scheduler.add_noise(x, e, step), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ddpm.velocity(x, e, a[step]), scheduler.get_velocity(x, e, step), rtol=1e-4, atol=1e-5)


def test_the_published_ends_of_both_versions() -> None:
    assert float(ddpm.alphas_cumprod(0.00085, 0.018)[-1]) ** 0.5 == pytest.approx(0.0220, abs=5e-4)
    assert float(ddpm.alphas_cumprod(0.00085, 0.03)[-1]) ** 0.5 == pytest.approx(0.0024, abs=1e-4)


def test_sample_and_noise_come_back_from_the_noisy_sample_and_the_velocity() -> None:
    generator = torch.Generator().manual_seed(1)
    x, e = torch.randn(2, 3, 4, 4, 4, generator=generator, dtype=torch.float64)
    a = torch.tensor([0.9, 0.5, 0.01], dtype=torch.float64)
    z, v = ddpm.add_noise(x, e, a), ddpm.velocity(x, e, a)
    root, rest = a.sqrt().view(-1, 1, 1, 1), (1 - a).sqrt().view(-1, 1, 1, 1)
    torch.testing.assert_close(root * z - rest * v, x)
    torch.testing.assert_close(rest * z + root * v, e)


def test_timesteps_are_uniform_and_seeded_per_sample() -> None:
    numbers = torch.arange(100_000)
    step = ddpm.sample_timestep(SampleKeys(3, numbers))
    assert int(step.min()) == 0 and int(step.max()) == 999
    counts = torch.bincount(step // 100, minlength=10)
    assert float((counts - 10_000).abs().max()) < 5 * 10_000**0.5
    assert torch.equal(ddpm.sample_timestep(SampleKeys(3, numbers[500:600])), step[500:600])
    assert not torch.equal(ddpm.sample_timestep(SampleKeys(4, numbers[:600])), step[:600])
