"""What is tried: every combination of weights, guidance scale and guidance interval, each thing once."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from muralist.errors import UserError
from muralist.models.weights import Which
from muralist.settings import SweepSettings


class Combination(NamedTuple):
    """One way to make pictures; None where there is nothing to choose."""

    weights: Which | None
    guidance_scale: float | None
    guidance_interval: tuple[float, float] | None

    @property
    def name(self) -> str:
        """As a folder is called."""
        parts: list[str] = [self.weights or "weights"]
        if self.guidance_scale is not None:
            parts.append(f"cfg{_number(self.guidance_scale)}")
        if self.guidance_interval:
            parts.append("-".join(map(_number, self.guidance_interval)))
        return "_".join(parts)

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings of generate that it stands for."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @property
    def flags(self) -> str:
        """What to type for it after `muralist generate`."""
        words: list[str] = []
        for name, value in self.chosen.items():
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *(word if isinstance(word, str) else _number(word) for word in values)]
        return shlex.join(words)

    @property
    def order(self) -> tuple[str, float, tuple[float, float]]:
        """Where it stands in a list."""
        return self.weights or "", self.guidance_scale or 0.0, self.guidance_interval or (0.0, 0.0)


def _number(value: float) -> str:
    return f"{value:.12g}"


def combinations(settings: SweepSettings, guided: bool, one_set: bool) -> tuple[list[Combination], list[str]]:
    """What there is to try, and what to say of it: `guided` models have classes, `one_set` is one without averages."""
    notes = []
    intervals = read_intervals(settings.guidance_interval)
    weights: Sequence[Which | None] = settings.weights
    if one_set:
        weights = [None]
        notes.append("The model is one set of weights: there are no averages to choose from.")
    if not guided:
        notes.append("The model is unconditional, so there is nothing to guide: only its weights are compared.")
        return [Combination(which, None, None) for which in dict.fromkeys(weights)], notes
    tried = [
        Combination(which, scale, interval if scale != 1 else None)  # 1 is no guidance, wherever it is on
        for which in weights
        for scale in settings.guidance_scale
        for interval in intervals
    ]
    found = list(dict.fromkeys(tried))
    if len(found) < len(tried):
        notes.append(f"Left out, because another is the same: {len(tried) - len(found)} of {len(tried)} combinations.")
    return found, notes


def read_intervals(written: Sequence[str]) -> list[tuple[float, float]]:
    """LOW,HIGH as numbers."""
    intervals = []
    for word in written:
        try:
            low, high = map(float, word.split(","))
        except ValueError:
            raise _bad_interval(word, "It is not two numbers with a comma between them.") from None
        if not 0 <= low < high <= 1:
            raise _bad_interval(word, "It is empty or outside 0 to 1.")
        intervals.append((low, high))
    return intervals


def _bad_interval(word: str, why: str) -> UserError:
    return UserError(
        f"{word!r} is no interval for --guidance_interval.", why, "Write LOW,HIGH, for example 0.1,1 or 0,1 0.1,1."
    )
