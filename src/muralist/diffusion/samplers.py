"""ODE samplers of dz/dt = v(z, t) from noise at t = 0 to data at t = 1, with classifier-free guidance in an interval.

The conditional and the unconditional pass are two calls of one batch shape, not one call of a doubled batch: every
pass then runs the same kernels whether guidance is on or off, and the result in a slot of the batch depends on that
slot alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.diffusion import flow

Network = Callable[[Tensor, Tensor, Tensor], Tensor]  # (z [B, ...], t [B], labels [B]) -> prediction [B, ...]
Velocity = Callable[[Tensor, float], Tensor]  # (z [B, ...], t) -> dz/dt [B, ...]
Arithmetic = TypeVar("Arithmetic", bound=Callable[..., Tensor])
Solver = Literal["heun", "euler", "abm2"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
_LAST_TIME = 0.98  # of the official 50 steps; later times were not trained, and evaluating there changes the image


@dataclass(frozen=True)
class SamplerSettings:
    """Solver, number of steps and guidance."""

    solver: Solver = "heun"
    steps: int = 50
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is off."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Guidance is on at times strictly between these two; a lower end of 0 includes t = 0."""
    t_eps: float = flow.T_EPS
    """Lower bound of the divisor when the network predicts noise, and in the official sampler."""
    official_last_step: bool = False
    """Bound 1 - t near the end as the official sampler does, which leaves some noise in the image."""

    def __post_init__(self) -> None:
        low, high = self.interval
        if self.solver not in SOLVERS:
            raise UserError(f"Unknown solver {self.solver}.", fix=f"Use one of {', '.join(SOLVERS)}.")
        if self.official_last_step and self.solver == "abm2":
            raise UserError(
                "The solver abm2 has no official last step.",
                "The official sampler has heun and euler.",
                "Leave --official_last_step out, or use heun.",
            )
        if not 0 <= low < high <= 1:
            raise UserError(
                f"The guidance interval {low} to {high} is empty or outside 0 to 1.", fix="Use, for example, 0.1 to 1."
            )


def time_grid(steps: int, solver: Solver = "heun") -> list[float]:
    """Return the times of a solver from 0 to 1, in float32 as in the official sampler.

    Heun's and Euler's are equally spaced, as the official ones. Those of abm2 after 0 are equally spaced in the
    log-SNR, logit(t), up to the last time at which the official 50 steps evaluate the network.
    """
    if solver != "abm2" or steps == 1:
        return torch.linspace(0.0, 1.0, steps + 1, dtype=torch.float32, device="cpu").tolist()
    end = math.log(_LAST_TIME / (1 - _LAST_TIME))
    inner = torch.linspace(-end, end, steps, dtype=torch.float64, device="cpu")[1:].sigmoid().float()
    return [0.0, *inner.tolist(), 1.0]


def guidance_at(t: float, settings: SamplerSettings) -> float:
    """Return the guidance scale at time t; outside the interval it is 1, without an unconditional pass."""
    # Compared in float32 like the times: 0.1 in float64 is on the wrong side of 0.1 in float32.
    low, high = torch.tensor(settings.interval, dtype=torch.float32, device="cpu").tolist()
    return settings.guidance if t < high and (low == 0 or t > low) else 1.0


def _guide(
    prediction: flow.Prediction,
    conditional: Tensor,
    unconditional: Tensor | None,
    scale: float,
    z: Tensor,
    times: Tensor,
    t_eps: float,
) -> Tensor:
    """Return the guided velocity v_u + s (v_c - v_u) of a network that predicts x, v or eps."""
    v = flow.to_v(prediction, conditional.float(), z, times, t_eps)
    if unconditional is None:
        return v
    v_u = flow.to_v(prediction, unconditional.float(), z, times, t_eps)
    return v_u + scale * (v - v_u)


def _advance(z: Tensor, v: Tensor, h: Tensor) -> Tensor:
    return z + h * v


def _advance_by_mean(z: Tensor, v: Tensor, v_next: Tensor, h: Tensor) -> Tensor:
    return z + h * (0.5 * (v + v_next))


def _advance_by_line(z: Tensor, v: Tensor, v_before: Tensor, h: Tensor, r: Tensor) -> Tensor:
    return z + h * (v + r * (v - v_before))


@cache
def _maybe_compile(function: Arithmetic, compiled: bool) -> Arithmetic:
    """Compile elementwise arithmetic into one pass over the images, which at 256 px exceed a GPU's cache.

    Every batch size compiles a few graphs: a caller with several sizes must raise Dynamo's limit.
    """
    return torch.compile(function, dynamic=False) if compiled else function  # type: ignore[return-value]


def _euler_step(velocity: Velocity, z: Tensor, t: float, t_next: float, compiled: bool) -> Tensor:
    """Euler, first order: z + h v(z, t)."""
    return _maybe_compile(_advance, compiled)(z, velocity(z, t), _scalar(t_next - t, z))


def _heun_step(velocity: Velocity, z: Tensor, t: float, t_next: float, compiled: bool) -> Tensor:
    """Heun, second order: z + h (v + v') / 2 with v' = v(z + h v, t + h)."""
    h = _scalar(t_next - t, z)
    v = velocity(z, t)
    v_next = velocity(_maybe_compile(_advance, compiled)(z, v, h), t_next)
    return _maybe_compile(_advance_by_mean, compiled)(z, v, v_next, h)


def _abm2(velocity: Velocity, z: Tensor, times: Sequence[float], compiled: bool) -> Tensor:
    """Adams-Bashforth-Moulton, second order: one velocity per step, at the predicted point (PEC).

    Predict z' = z + h (v + r (v - v_before)), r = h / (2 h_before) (Adams-Bashforth 2; the first step is Euler's), take
    v' = v(z', t + h), and correct z' to z + h (v + v') / 2 (Adams-Moulton 2). Returns the last prediction.
    """
    predicted, v, h = z, None, 0.0
    for t, t_next in pairwise(times):
        v_before, v = v, velocity(predicted, t)
        h_before, h = h, t_next - t
        if v_before is None:
            predicted = _maybe_compile(_advance, compiled)(z, v, _scalar(h, z))
            continue
        z = _maybe_compile(_advance_by_mean, compiled)(z, v_before, v, _scalar(h_before, z))
        r = _scalar(h / (2 * h_before), z)
        predicted = _maybe_compile(_advance_by_line, compiled)(z, v, v_before, _scalar(h, z), r)
    return predicted


def _scalar(value: float, like: Tensor) -> Tensor:
    """Return a scalar tensor: torch.compile would specialize on a Python float."""
    return torch.full((), value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def guided_velocity(
    network: Network,
    labels: Tensor,
    null_label: int,
    settings: SamplerSettings,
    prediction: flow.Prediction = "x",
    compiled: bool = False,
) -> Velocity:
    """Return the guided velocity as a function of z and t."""
    null_labels = torch.full_like(labels, null_label)
    # The network is never called at t = 1, so only eps-prediction, at t = 0, would divide by zero.
    t_eps = settings.t_eps if settings.official_last_step or prediction == "eps" else 0.0

    def velocity(z: Tensor, t: float) -> Tensor:
        times = torch.full((len(z),), t, dtype=torch.float32, device=z.device)
        conditional = network(z, times, labels)
        scale = guidance_at(t, settings)
        unconditional = None if scale == 1.0 else network(z, times, null_labels)
        guide = _maybe_compile(_guide, compiled)
        return guide(prediction, conditional, unconditional, scale, z, times, t_eps)

    return velocity


@torch.no_grad()
def sample(
    network: Network,
    noise: Tensor,
    labels: Tensor,
    null_label: int,
    settings: SamplerSettings,
    prediction: flow.Prediction = "x",
    compiled: bool = False,
) -> Tensor:
    """Integrate noise [B, ...] to images; the last step is Euler's and lands on the data predicted at its start.

    `compiled` compiles the arithmetic around the network; the network is called as given.
    """
    velocity = guided_velocity(network, labels, null_label, settings, prediction, compiled)
    times = time_grid(settings.steps, settings.solver)
    z = noise
    if settings.solver == "abm2":
        z = _abm2(velocity, z, times[:-1], compiled)
    else:
        step = _heun_step if settings.solver == "heun" else _euler_step
        for t, t_next in pairwise(times[:-1]):
            z = step(velocity, z, t, t_next, compiled)
    return _euler_step(velocity, z, times[-2], times[-1], compiled)
