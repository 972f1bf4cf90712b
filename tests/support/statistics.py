"""Tests of randomness against exact distributions; a sound generator fails one of them once in about a million times."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_FIVE_SIGMA = 5.0
_KOLMOGOROV = 2.72  # the probability of a larger sqrt(n) x distance is 2 exp(-2 x 2.72^2), under one in a million


def assert_follows(sample: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]) -> None:
    """Kolmogorov and Smirnov: the largest gap between the sample's distribution function and the exact one."""
    ordered = np.sort(sample.astype(np.float64).ravel())
    count = len(ordered)
    exact = distribution(ordered)
    gap = max(np.max(np.arange(1, count + 1) / count - exact), np.max(exact - np.arange(count) / count))
    assert gap * math.sqrt(count) < _KOLMOGOROV, f"the distribution functions are {gap:.5f} apart"


def assert_counts(counts: np.ndarray, expected: np.ndarray | float, freedom: int) -> None:
    """Pearson's chi-square, brought to a standard normal as Wilson and Hilferty do."""
    chi_square = float((np.square(counts - expected) / expected).sum())
    spread = 2 / (9 * freedom)
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert deviation < _FIVE_SIGMA, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


def standard_normal(values: np.ndarray) -> np.ndarray:
    """The distribution function of the standard normal."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])
