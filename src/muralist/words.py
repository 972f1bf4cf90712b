"""Numbers as people say them."""

from __future__ import annotations

from collections.abc import Sequence


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
