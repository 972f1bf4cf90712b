"""Format durations, sizes, counts and lists for messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from muralist.core.errors import UserError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def format_duration(seconds: float) -> str:
    """Format seconds as `45 s`, `3 min 05 s`, `2 h 10 min` or `1 d 4 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_bytes(count: float) -> str:
    """Format bytes as gigabytes."""
    return f"{count / 1e9:.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f} GB"


def format_list(words: Sequence[object], most: int = 6) -> str:
    """Format a list as `a, b and 4 more`."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"


def parse_count(text: str) -> float:
    """Parse a number such as 10B, 1T, 1.5M or 5e9."""
    # 10,000 is ten thousand, as our own messages print it; 1,5 is one and a half.
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip().upper().replace("_", ""))
    match = re.fullmatch(r"(\d+(?:[.,]\d+)?(?:[eE]\d+)?)\s*([KMBGT]?)", plain)
    if match is None or not float(match[1].replace(",", ".")):
        raise UserError(f"{text!r} is not a number.", fix="Write 10B, 1T, 300M or 5e9.")
    return float(match[1].replace(",", ".")) * _UNITS[match[2]]


def format_count(number: float) -> str:
    """Format a large number as 1T, 10B or 342K."""
    for unit in ("T", "B", "M", "K"):
        if number >= 0.9995 * _UNITS[unit]:  # rounds up to one unit
            return f"{number / _UNITS[unit]:.3g}{unit}"
    return f"{number:.3g}"
