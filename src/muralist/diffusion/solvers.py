"""Samplers of the flow's equation dz/dt = v(z, t) from noise at t = 0 to data at t = 1, with guidance in an interval.

The conditional and the unconditional pass are two calls of one batch shape, not one call of a doubled batch: every pass
then runs the same kernels whether guidance is on or off, and what a slot of the batch shows depends on that slot alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from muralist.diffusion import flow
from muralist.errors import UserError

Network = Callable[[Tensor, Tensor, Tensor], Tensor]  # (z [B, ...], t [B], labels [B]) -> prediction [B, ...]
Velocity = Callable[[Tensor, float], Tensor]  # (z [B, ...], t) -> dz/dt [B, ...]
Arithmetic = TypeVar("Arithmetic", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class SolverSettings:
    """How to integrate, and how strongly to follow the label."""

    solver: Literal["heun", "euler"] = "heun"
    steps: int = 50
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is none."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Guidance acts at times strictly between these two; a lower end of 0 includes the start."""
    t_eps: float = flow.T_EPS
    """Lower bound of the divisor when the network predicts noise, and in the official sampler."""
    official_last_step: bool = False
    """Bound 1 - t near the end as the official sampler does, which leaves some noise in the picture."""

    def __post_init__(self) -> None:
        low, high = self.interval
        if self.solver not in ("heun", "euler"):
            raise UserError(f"There is no solver named {self.solver}.", fix="Use heun or euler.")
        if self.steps < 1:
            raise UserError(f"{self.steps} sampling steps make no picture.", fix="Use at least 1.")
        if not 0 <= low < high <= 1:
            raise UserError(
                f"The guidance interval {low} to {high} is empty or outside 0 to 1.", fix="Use, for example, 0.1 to 1."
            )


def time_grid(steps: int) -> list[float]:
    """Equally spaced times from 0 to 1, float32 values as in the official sampler."""
    return torch.linspace(0.0, 1.0, steps + 1, dtype=torch.float32, device="cpu").tolist()


def guidance_at(t: float, settings: SolverSettings) -> float:
    """The guidance scale at time t: outside the interval it is 1, which needs no unconditional pass."""
    # Compared in float32, like the times themselves: 0.1 as a float64 would lie on the wrong side of 0.1 as a float32.
    low, high = torch.tensor(settings.interval, dtype=torch.float32, device="cpu").tolist()
    return settings.guidance if t < high and (low == 0 or t > low) else 1.0


def _guided_velocity(
    network: Network, prediction: flow.Kind, labels: Tensor, null_label: int, settings: SolverSettings, compiled: bool
) -> Velocity:
    """The velocity v_u + s (v_c - v_u) with scale s, from a network that predicts x, v or eps."""
    null_labels = torch.full_like(labels, null_label)
    # No time of the grid at which x is predicted reaches 1, so only a predicted eps, at t = 0, would divide by zero.
    t_eps = settings.t_eps if settings.official_last_step or prediction == "eps" else 0.0
    follow = _fused(_followed, compiled)

    def velocity(z: Tensor, t: float) -> Tensor:
        times = torch.full((len(z),), t, dtype=torch.float32, device=z.device)
        conditional = network(z, times, labels)
        scale = guidance_at(t, settings)
        unconditional = None if scale == 1.0 else network(z, times, null_labels)
        return follow(prediction, conditional, unconditional, scale, z, times, t_eps)

    return velocity


def _followed(
    prediction: flow.Kind,
    conditional: Tensor,
    unconditional: Tensor | None,
    scale: float,
    z: Tensor,
    times: Tensor,
    t_eps: float,
) -> Tensor:
    v = flow.to_v(prediction, conditional.float(), z, times, t_eps)
    if unconditional is None:
        return v
    away = flow.to_v(prediction, unconditional.float(), z, times, t_eps)
    return away + scale * (v - away)


def _moved(z: Tensor, v: Tensor, h: Tensor) -> Tensor:
    return z + h * v


def _moved_by_mean(z: Tensor, here: Tensor, there: Tensor, h: Tensor) -> Tensor:
    return z + h * (0.5 * (here + there))


def _fused(function: Arithmetic, compiled: bool) -> Arithmetic:
    """Compiled, arithmetic on whole pictures is one pass over them; of 256 px they are larger than a card's cache.

    For each batch size a few graphs are made: whoever has several sizes allows for that (`choose_by_rules`).
    """
    return _compiled(function) if compiled else function


@cache
def _compiled(function: Arithmetic) -> Arithmetic:
    return torch.compile(function, dynamic=False)  # type: ignore[return-value]


def _euler_step(velocity: Velocity, z: Tensor, t: float, t_next: float, compiled: bool) -> Tensor:
    """First order: z + h v(z, t)."""
    return _fused(_moved, compiled)(z, velocity(z, t), _number(t_next - t, z))


def _heun_step(velocity: Velocity, z: Tensor, t: float, t_next: float, compiled: bool) -> Tensor:
    """Second order: the mean of the velocity here and the velocity where it leads, z + h (v + v') / 2."""
    h = _number(t_next - t, z)
    here = velocity(z, t)
    there = velocity(_fused(_moved, compiled)(z, here, h), t_next)
    return _fused(_moved_by_mean, compiled)(z, here, there, h)


def _number(value: float, like: Tensor) -> Tensor:
    """A number where the pictures are: one that is only Python's would be compiled for."""
    return torch.full((), value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


@torch.no_grad()
def sample(
    network: Network,
    noise: Tensor,
    labels: Tensor,
    null_label: int,
    settings: SolverSettings,
    prediction: flow.Kind = "x",
    compiled: bool = False,
) -> Tensor:
    """Integrate noise [B, ...] to pictures; the last step is Euler's and lands on the predicted data.

    The network is called as it is given; `compiled` is for the arithmetic around it.
    """
    velocity = _guided_velocity(network, prediction, labels, null_label, settings, compiled)
    step = _heun_step if settings.solver == "heun" else _euler_step
    times = time_grid(settings.steps)
    z = noise
    for t, t_next in pairwise(times[:-1]):
        z = step(velocity, z, t, t_next, compiled)
    return _euler_step(velocity, z, times[-2], times[-1], compiled)
