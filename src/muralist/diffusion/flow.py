"""Flow matching on the linear path z = t x + (1 - t) e from noise e at t = 0 to data x at t = 1.

A network may predict the data x, the velocity v = x - e or the noise e, and the loss may be taken on any of the three:
nine pairs. The default is x-prediction with v-loss. Random numbers are functions of the sample's key, not of a stream.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from muralist.core.rng import Purpose, SampleKeys

Prediction = Literal["x", "v", "eps"]

T_EPS = 0.05  # the official lower bound of the divisor 1 - t (or t)


def _broadcast(t: Tensor, image: Tensor) -> Tensor:
    """Reshape times [B] to multiply a batch of images."""
    return t.view(-1, *[1] * (image.ndim - 1))


def sample_time(keys: SampleKeys, mean: float = -0.8, std: float = 0.8) -> Tensor:
    """Draw logit-normal times [B] in (0, 1): t = sigmoid(mean + std n)."""
    return torch.sigmoid(keys.normal(Purpose.TIME) * std + mean)


def sample_noise(keys: SampleKeys, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """Draw normal noise e, [B, *shape]."""
    return keys.normal(Purpose.NOISE, shape) * scale


def drop_labels(labels: Tensor, keys: SampleKeys, probability: float, null_label: int) -> Tensor:
    """Replace labels [B] by the null label with this probability: classifier-free guidance needs it."""
    return torch.where(keys.uniform(Purpose.LABEL_DROP) < probability, null_label, labels)


def interpolate(x: Tensor, e: Tensor, t: Tensor) -> Tensor:
    """z = t x + (1 - t) e."""
    t = _broadcast(t, x)
    return t * x + (1 - t) * e


def to_v(kind: Prediction, output: Tensor, z: Tensor, t: Tensor, t_eps: float = T_EPS) -> Tensor:
    """Convert a prediction to a velocity: v = (x - z) / (1 - t) = (z - e) / t."""
    t = _broadcast(t, z)
    match kind:
        case "x":
            return (output - z) / (1 - t).clamp_min(t_eps)
        case "v":
            return output
        case "eps":
            return (z - output) / t.clamp_min(t_eps)


def _loss_weight(prediction: Prediction, space: Prediction, t: Tensor, t_eps: float) -> Tensor:
    """Return the factor of an error when the prediction is converted to another space; conversions are linear."""
    match prediction, space:
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
    prediction: Prediction, space: Prediction, output: Tensor, x: Tensor, e: Tensor, t: Tensor, t_eps: float = T_EPS
) -> Tensor:
    """Mean squared error [B] in a space; prediction and target are converted alike, with the same t_eps."""
    target = {"x": x, "v": x - e, "eps": e}[prediction]
    error = (output.float() - target).square().flatten(1).mean(dim=1)
    return _loss_weight(prediction, space, t, t_eps).square() * error
