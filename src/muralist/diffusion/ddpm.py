"""DDPM with v-prediction (Salimans and Ho 2022), as HunyuanDiT was trained: 1000 timesteps.

z_t = sqrt(a_t) x + sqrt(1 - a_t) e, where a_t is the cumulative product of 1 - beta. The network predicts
v = sqrt(a_t) e - sqrt(1 - a_t) x. Random numbers are functions of the sample's key, not of a stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muralist.core.rng import Purpose, SampleKeys


def alphas_cumprod(beta_start: float, beta_end: float, steps: int = 1000) -> Tensor:
    """Return a_t for the scaled-linear schedule, [steps]: the square roots of the betas are linear."""
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0).float()


def sample_timestep(keys: SampleKeys, steps: int = 1000) -> Tensor:
    """Draw a timestep for each sample, uniform in 0 .. steps - 1, [B] int64."""
    return (keys.uniform(Purpose.TIME) * steps).long().clamp_max(steps - 1)


def add_noise(x: Tensor, e: Tensor, a: Tensor) -> Tensor:
    """z = sqrt(a) x + sqrt(1 - a) e."""
    a = a.view(-1, *[1] * (x.ndim - 1))
    return a.sqrt() * x + (1 - a).sqrt() * e


def velocity(x: Tensor, e: Tensor, a: Tensor) -> Tensor:
    """v = sqrt(a) e - sqrt(1 - a) x."""
    a = a.view(-1, *[1] * (x.ndim - 1))
    return a.sqrt() * e - (1 - a).sqrt() * x
