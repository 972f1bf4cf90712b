"""Noise levels and targets of the models of diffusers, read from a scheduler's config.

Flow matching (Flux, SD3, Wan, ...): z = (1 - s) x + s e, the network predicts e - x, the timestep is 1000 s. Noise levels
s are logit-normal (Esser et al. 2024) and shifted as the model's own schedule is: s' = shift s / (1 + (shift - 1) s). A
dynamic schedule is shifted by the pipeline, by image size: shift = exp(mu), or mu itself where the scheduler says linear.
DDPM (SD, SDXL, PixArt, ...): z = sqrt(a_t) x + sqrt(1 - a_t) e with uniform t; the network predicts the noise, the velocity
or the data, and Min-SNR (Hang et al. 2023) may weight the loss. Random numbers are functions of the sample's key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.core.rng import Purpose, SampleKeys

Sampling = Literal["auto", "logit_normal", "uniform"]
_STEPS = 1000
_PREDICTIONS = {"epsilon": "noise", "v_prediction": "velocity", "sample": "data"}


@dataclass(frozen=True)
class Level:
    """The noise levels of a batch."""

    timestep: Tensor  # [B], as the pipeline gives it to its network
    signal: Tensor  # [B]: z = signal * x + noise * e
    noise: Tensor  # [B]
    target_x: Tensor  # [B]: the network predicts target_x * x + target_e * e
    target_e: Tensor  # [B]
    weight: Tensor | None  # [B], of the loss

    def add_noise(self, x: Tensor, e: Tensor) -> Tensor:
        """Return the noisy latents."""
        return _rows(self.signal, x) * x + _rows(self.noise, x) * e

    def target(self, x: Tensor, e: Tensor) -> Tensor:
        """Return what the network should predict."""
        return _rows(self.target_x, x) * x + _rows(self.target_e, x) * e


@dataclass(frozen=True)
class NoiseLevels:
    """What a network predicts, and at which noise levels it is trained."""

    prediction: str  # flow, noise, velocity or data
    sampling: str  # logit_normal or uniform
    steps: int = _STEPS
    shift: float = 1.0
    dynamic_shift: str | None = None  # exponential or linear: how the shift follows from the pipeline's mu
    inverted: bool = False  # timesteps count from noise at 0 to data (Mochi)
    range: tuple[float, float] = (0.0, 1.0)  # of s that this network is for: Wan 2.2 has one for each part
    alphas: Tensor | None = None  # [steps], cumulative products of a DDPM
    min_snr_gamma: float | None = None

    @property
    def probe_times(self) -> tuple[float, float, float]:
        """Three timesteps inside the range."""
        low, high = self.range
        first, second, third = (round((low + fraction * (high - low)) * self.steps) for fraction in (0.6, 0.2, 0.4))
        return float(first), float(second), float(third)

    def to(self, device: torch.device) -> NoiseLevels:
        """Move the schedule to a device."""
        return replace(self, alphas=None if self.alphas is None else self.alphas.to(device))

    def sample(self, keys: SampleKeys, mu: float | None = None) -> Level:
        """Draw a noise level for each sample; `mu` says how much a dynamic schedule is shifted at the image's size."""
        low, high = self.range
        uniform = keys.uniform(Purpose.TIME)
        if self.alphas is not None:
            t = ((low + (high - low) * uniform) * self.steps).long().clamp_max(self.steps - 1)
            a = self.alphas[t]
            return self._ddpm(t.float(), a)
        s = torch.sigmoid(keys.normal(Purpose.TIME)) if self.sampling == "logit_normal" else uniform
        shift = self._shift(mu)
        s = low + (high - low) * (shift * s / (1 + (shift - 1) * s))
        one = torch.ones_like(s)
        if self.inverted:
            return Level((1 - s) * self.steps, 1 - s, s, one, -one, None)
        return Level(s * self.steps, 1 - s, s, -one, one, None)

    def _ddpm(self, t: Tensor, a: Tensor) -> Level:
        signal, noise = a.sqrt(), (1 - a).sqrt()
        zero, one = torch.zeros_like(a), torch.ones_like(a)
        x, e = {"noise": (zero, one), "velocity": (-noise, signal), "data": (one, zero)}[self.prediction]
        weight = None
        if self.min_snr_gamma is not None:
            snr = a / (1 - a)
            clipped = snr.clamp_max(self.min_snr_gamma)
            weight = clipped / {"noise": snr, "velocity": snr + 1, "data": one}[self.prediction].clamp_min(1e-8)
        return Level(t, signal, noise, x, e, weight)

    def _shift(self, mu: float | None) -> float:
        if self.dynamic_shift is None or mu is None:
            return self.shift
        return mu if self.dynamic_shift == "linear" else math.exp(mu)

    def summary(self) -> str:
        """Objective and noise levels in a few words."""
        objective = "flow matching" if self.prediction == "flow" else f"DDPM, {self.prediction} prediction"
        shift = "shifted by resolution" if self.dynamic_shift else f"shift {self.shift:g}" if self.shift != 1 else ""
        part = f"of {self.range[0]:g} to {self.range[1]:g}" if self.range != (0.0, 1.0) else ""
        snr = f"Min-SNR {self.min_snr_gamma:g}" if self.min_snr_gamma is not None else ""
        levels = f"{self.sampling.replace('_', '-')} noise levels"
        return ", ".join(word for word in (objective, levels, shift, part, snr) if word)

    def describe(self) -> dict[str, str | int | float]:
        """Return what shapes the training, for a checkpoint's manifest."""
        facts: dict[str, str | int | float] = {"prediction": self.prediction, "timestep_sampling": self.sampling}
        facts |= {"min_snr_gamma": self.min_snr_gamma} if self.min_snr_gamma is not None else {}
        return facts


def from_scheduler(
    config: Mapping[str, Any],
    alphas: Tensor | None,
    sampling: Sampling = "auto",
    min_snr_gamma: float | None = None,
    range: tuple[float, float] = (0.0, 1.0),
) -> NoiseLevels:
    """Read objective and noise levels from a scheduler's config; refuse a scheduler whose training is not known.

    `alphas` are the scheduler's cumulative products, if it has any.
    """
    name = str(config.get("_class_name"))
    flow = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
    if flow or name.startswith("FlowMatch"):
        if min_snr_gamma is not None:
            raise UserError(
                "--min_snr_gamma has no effect: the model is trained by flow matching.",
                "Min-SNR weights the loss of DDPM models.",
                "Leave it out.",
            )
        shift = config.get("shift") or config.get("flow_shift") or 1.0
        dynamic = str(config.get("time_shift_type", "exponential")) if config.get("use_dynamic_shifting") else None
        return NoiseLevels(
            "flow",
            "logit_normal" if sampling == "auto" else sampling,
            int(config.get("num_train_timesteps", _STEPS)),
            float(shift),
            dynamic,
            bool(config.get("invert_sigmas")),
            range,
        )
    prediction = _PREDICTIONS.get(str(config.get("prediction_type", "epsilon")))
    # With continuous timesteps, EulerDiscrete tells the network the logarithm of the noise level.
    continuous = prediction == "velocity" and config.get("timestep_type") == "continuous"
    if prediction is None or alphas is None or continuous:
        raise UserError(
            f"A model with the scheduler {name} cannot be trained yet.",
            "Flow matching and DDPM schedules with discrete timesteps are supported.",
            "Give another --model.path.",
        )
    if sampling == "logit_normal":
        raise UserError(
            "--timestep_sampling logit_normal is for flow matching, and this is a DDPM model.",
            fix="Leave it out, or give uniform.",
        )
    return NoiseLevels(
        prediction, "uniform", len(alphas), range=range, alphas=alphas.float(), min_snr_gamma=min_snr_gamma
    )


def alphas_cumprod(beta_start: float, beta_end: float, steps: int = _STEPS) -> Tensor:
    """Return a_t for the scaled-linear schedule, [steps]: the square roots of the betas are linear."""
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0).float()


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))
