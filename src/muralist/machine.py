"""What this machine has."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Count the cores this process may use, which on a cluster are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
