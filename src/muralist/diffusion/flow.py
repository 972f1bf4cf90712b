"""The flow objective on the straight path z = t x + (1 - t) e from noise e at t = 0 to data x at t = 1.

A network may predict the data x, the velocity v = x - e or the noise e, and the loss may compare any of the three: nine
pairs. The default is x-prediction with v-loss. Every draw is keyed by the sample, never by what was drawn before.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from muralist.keyed_random import Purpose, SampleKeys

Kind = Literal["x", "v", "eps"]

T_EPS = 0.05  # the official bound below which a divisor 1 - t (or t) does not go


def _like(t: Tensor, image: Tensor) -> Tensor:
    """Times [B] shaped to multiply a batch of images."""
    return t.view(-1, *[1] * (image.ndim - 1))


def draw_time(keys: SampleKeys, mean: float = -0.8, std: float = 0.8) -> Tensor:
    """Times [B] in (0, 1), logit-normal: t = sigmoid(mean + std n)."""
    return torch.sigmoid(keys.normal(Purpose.TIME) * std + mean)


def draw_noise(keys: SampleKeys, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Normal noise e, [B, *shape]."""
    return keys.normal(Purpose.NOISE, shape) * scale


def drop_labels(labels: Tensor, keys: SampleKeys, probability: float, null_label: int) -> Tensor:
    """Replace labels [B] by the null label with this probability, which is what guidance learns from."""
    return torch.where(keys.uniform(Purpose.LABEL_DROP) < probability, null_label, labels)


def interpolate(x: Tensor, e: Tensor, t: Tensor) -> Tensor:
    """The point of the path at time t: z = t x + (1 - t) e."""
    t = _like(t, x)
    return t * x + (1 - t) * e


def to_x(kind: Kind, output: Tensor, z: Tensor, t: Tensor, t_eps: float = T_EPS) -> Tensor:
    """The data that a prediction implies: z + (1 - t) v, or (z - (1 - t) e) / t."""
    t = _like(t, z)
    match kind:
        case "x":
            return output
        case "v":
            return z + (1 - t) * output
        case "eps":
            return (z - (1 - t) * output) / t.clamp_min(t_eps)


def to_v(kind: Kind, output: Tensor, z: Tensor, t: Tensor, t_eps: float = T_EPS) -> Tensor:
    """The velocity that a prediction implies: (x - z) / (1 - t), or (z - e) / t."""
    t = _like(t, z)
    match kind:
        case "x":
            return (output - z) / (1 - t).clamp_min(t_eps)
        case "v":
            return output
        case "eps":
            return (z - output) / t.clamp_min(t_eps)


def to_eps(kind: Kind, output: Tensor, z: Tensor, t: Tensor, t_eps: float = T_EPS) -> Tensor:
    """The noise that a prediction implies: (z - t x) / (1 - t), or z - t v."""
    t = _like(t, z)
    match kind:
        case "x":
            return (z - t * output) / (1 - t).clamp_min(t_eps)
        case "v":
            return z - t * output
        case "eps":
            return output


def _gain(prediction: Kind, compared: Kind, t: Tensor, t_eps: float) -> Tensor:
    """How much an error of the prediction grows in the conversions above, which are linear in the output."""
    match prediction, compared:
        case "x", "v":
            return 1 / (1 - t).clamp_min(t_eps)
        case "x", "eps":
            return t / (1 - t).clamp_min(t_eps)
        case "v", "x":
            return 1 - t
        case "v", "eps":
            return t
        case "eps", "x":
            return (1 - t) / t.clamp_min(t_eps)
        case "eps", "v":
            return 1 / t.clamp_min(t_eps)
        case _:
            return torch.ones_like(t)


def loss(
    prediction: Kind, compared: Kind, output: Tensor, x: Tensor, e: Tensor, t: Tensor, t_eps: float = T_EPS
) -> Tensor:
    """Mean squared error [B] in the compared quantity; prediction and target are converted alike, bound included."""
    target = {"x": x, "v": x - e, "eps": e}[prediction]
    error = (output.float() - target).square().flatten(1).mean(dim=1)
    return _gain(prediction, compared, t, t_eps).square() * error
