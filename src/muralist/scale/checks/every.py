"""Every check, in the order in which they are told."""

from __future__ import annotations

from muralist.scale.checks import hardware, inputs, plan, ranks, room, surroundings
from muralist.scale.checks.check import Check

CHECKS: list[Check] = [
    *hardware.CHECKS,
    *room.CHECKS,
    *plan.CHECKS,
    *inputs.CHECKS,
    *surroundings.CHECKS,
    *ranks.CHECKS,
]
