"""Post-hoc EMA (Karras et al. 2024, EDM2): choose the length of the EMA after training.

Every stored set of weights is a weighted mean of the weights after each step; the weights of that mean are its profile.
The profile of a power-function EMA, s^gamma for step s, is approximated by a linear combination of the profiles that the
checkpoints of a run hold, by least squares. The length is sigma_rel, the profile's standard deviation relative to the
images seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.core.errors import UserError
from muralist.models.weights import WeightSet, read_weights
from muralist.settings import TrainSettings
from muralist.settings.load import read_yaml
from muralist.train.checkpoint import list_checkpoints, read_manifest
from muralist.train.schedule import ema_decay, ema_half_lives

_MAX_COLUMNS = 50_000  # of a profile: longer runs add up neighboring steps
_MAX_ERROR = 0.2


class StoredWeights(NamedTuple):
    """A set of weights of a checkpoint, and its profile: the share of the weights after each step."""

    checkpoint: Path
    name: WeightSet
    profile: np.ndarray


def exponent(sigma_rel: float) -> float:
    """Return the gamma of EDM2's power function for a relative standard deviation."""
    variance = sigma_rel**-2
    return float(np.roots([1, 7, 16 - variance, 12 - variance]).real.max())


def profile_of(decays: np.ndarray) -> np.ndarray:
    """Return the share of the weights after each step in an EMA with these decays."""
    return (1 - decays) * np.append(np.cumprod(decays[:0:-1])[::-1], 1.0)


def power_function(sigma_rel: float, steps: int) -> np.ndarray:
    """Return the profile of EDM2's EMA, whose decay after step s is (1 - 1 / s)^(gamma + 1)."""
    return profile_of((1 - 1 / np.arange(1, steps + 1)) ** (exponent(sigma_rel) + 1))


def stored_weights(run: Path) -> list[StoredWeights]:
    """List all sets of weights of a run, with profiles over the steps of its last checkpoint."""
    if not (run / "config.yaml").is_file() or not (checkpoints := list_checkpoints(run / "checkpoints")):
        raise UserError(
            f"{run} is not a run with checkpoints.",
            "A post-hoc EMA is assembled from all checkpoints that a run has kept.",
            "Give the run's folder, or leave --sigma_rel out.",
        )
    optim = read_yaml(TrainSettings, run / "config.yaml").optim
    manifests = [read_manifest(checkpoint) for checkpoint in checkpoints]
    last, batch = manifests[-1]["step"], manifests[-1]["total_batch"]
    profiles: dict[WeightSet, np.ndarray] = {"model": np.zeros(last)}
    names: tuple[WeightSet, WeightSet] = ("ema1", "ema2")
    for name, half_life in zip(names, ema_half_lives(optim, batch), strict=True):
        profiles[name] = np.array([ema_decay(step * batch, batch, half_life) for step in range(last)])
    found = []
    for checkpoint, manifest in zip(checkpoints, manifests, strict=True):
        step = manifest["step"]
        for name, decays in profiles.items():
            profile = np.zeros(last)
            profile[:step] = profile_of(decays[:step])  # without decay: the weights of the step alone
            found.append(StoredWeights(checkpoint, name, profile))
    return found


def fit(stored: list[StoredWeights], wanted: np.ndarray) -> tuple[np.ndarray, float]:
    """Return a coefficient for each set, and the share of the wanted profile that is at other steps."""
    starts = np.arange(0, len(wanted), -(-len(wanted) // _MAX_COLUMNS))
    profiles = np.stack([np.add.reduceat(one.profile, starts) for one in stored], axis=1)
    target = np.add.reduceat(wanted, starts)
    coefficients = np.linalg.lstsq(profiles, target, rcond=None)[0]
    coefficients /= coefficients.sum()
    return coefficients, float(np.abs(profiles @ coefficients - target).sum() / 2)


def assemble(run: Path, sigma_rel: float) -> tuple[dict[str, Tensor], str]:
    """Return the weights of a power-function EMA of a run, and what they were assembled from."""
    stored = stored_weights(run)
    coefficients, error = fit(stored, power_function(sigma_rel, len(stored[0].profile)))
    count = len({one.checkpoint for one in stored})
    if error > _MAX_ERROR:
        raise UserError(
            f"The {count} checkpoints of {run} hold no EMA near --sigma_rel {sigma_rel:g}: {error:.0%} of it would be of "
            "other steps.",
            "The weights between checkpoints are known by their EMAs alone.",
            "Choose a length nearer 0.063, which the EMAs of a run have by default, or keep more checkpoints: --keep_every.",
        )
    total: dict[str, Any] = {}
    for one, coefficient in zip(stored, coefficients, strict=True):
        for key, value in read_weights(one.checkpoint, one.name).items():
            scaled = value.to(torch.float64) * float(coefficient)
            total[key] = total[key].add_(scaled) if key in total else scaled
    weights = {key: value.to(torch.float32) for key, value in total.items()}
    said = f"an EMA with sigma_rel {sigma_rel:g} from {count} checkpoints, {error:.1%} of it of other steps"
    return weights, said
