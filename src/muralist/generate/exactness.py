"""How far fast mode is from exact mode: the first rows are painted both ways, by the same worker in batches of one shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from muralist.generate.plan import Sample

ROWS = 8
PSNR = "psnr_to_exact"
"""The name of the distance in a ledger's line, in decibels."""
_SAME = 99.0  # for equal pictures, whose distance is no number


def is_compared(sample: Sample) -> bool:
    """Whether a sample is painted both ways."""
    return sample.row < ROWS and sample.copy == 0


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit pictures."""
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return _SAME if error == 0 else min(_SAME, 10 * math.log10(255**2 / error))


def told(distances: list[float], where: str) -> str:
    """One sentence for people; nothing where nothing was compared."""
    if not distances:
        return ""
    pictures = f"{len(distances)} picture{'s' if len(distances) > 1 else ''}"
    return (
        f"Fast mode is {np.mean(distances):.1f} dB (worst {min(distances):.1f} dB) from exact mode on {pictures}, "
        f"which are in {where} as exact mode makes them."
    )


def distance_in(line: Mapping[str, Any]) -> float | None:
    """The distance that a line of a ledger tells, if it does."""
    value = line.get(PSNR)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
