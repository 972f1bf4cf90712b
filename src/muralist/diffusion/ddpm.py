"""The discrete diffusion that HunyuanDiT was trained with: a thousand steps of growing noise, v-prediction.

z_s = sqrt(a_s) x + sqrt(1 - a_s) e, where a_s is the product of 1 - beta over the first s + 1 steps. The network predicts
v = sqrt(a_s) e - sqrt(1 - a_s) x. Every draw is keyed by the sample, never by what was drawn before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muralist.keyed_random import Purpose, SampleKeys


def signal_left(beta_start: float, beta_end: float, steps: int = 1000) -> Tensor:
    """The signal's share a_s of the variance after each step, [steps]; betas are squares of a straight line."""
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0).float()


def draw_step(keys: SampleKeys, steps: int = 1000) -> Tensor:
    """A step for each sample, uniform in 0 .. steps - 1, [B] int64."""
    return (keys.uniform(Purpose.TIME) * steps).long().clamp_max(steps - 1)


def add_noise(x: Tensor, e: Tensor, a: Tensor) -> Tensor:
    """The noisy sample: sqrt(a) x + sqrt(1 - a) e."""
    a = a.view(-1, *[1] * (x.ndim - 1))
    return a.sqrt() * x + (1 - a).sqrt() * e


def velocity(x: Tensor, e: Tensor, a: Tensor) -> Tensor:
    """What the network is to predict: sqrt(a) e - sqrt(1 - a) x."""
    a = a.view(-1, *[1] * (x.ndim - 1))
    return a.sqrt() * e - (1 - a).sqrt() * x
