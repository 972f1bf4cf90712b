"""Numbers as people say them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from muralist.errors import UserError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def duration(seconds: float) -> str:
    """A time span for people."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def gigabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f} GB"


def listed(words: Sequence[object], most: int = 6) -> str:
    """A few of many: `a, b and 4 more`."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"


def amount(text: str) -> float:
    """A number as people write large ones: 10B, 1T, 1.5M, 5e9."""
    # 10,000 is ten thousand, as we print it ourselves; 1,5 is one and a half.
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip().upper().replace("_", ""))
    match = re.fullmatch(r"(\d+(?:[.,]\d+)?(?:[eE]\d+)?)\s*([KMBGT]?)", plain)
    if match is None or not float(match[1].replace(",", ".")):
        raise UserError(f"{text!r} is no amount.", fix="Write 10B, 1T, 300M or 5e9.")
    return float(match[1].replace(",", ".")) * _UNITS[match[2]]


def short(number: float) -> str:
    """A large number as people write it: 1T, 10B, 342K."""
    for unit in ("T", "B", "M", "K"):
        if number >= 0.9995 * _UNITS[unit]:  # rounded, it is one
            return f"{number / _UNITS[unit]:.3g}{unit}"
    return f"{number:.3g}"
