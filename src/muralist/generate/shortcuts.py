"""What `--preset fast` leaves out, by kind of pipeline.

Everything here is fixed before the first picture: which steps are guided, and in which the network is run, depends on the
number of steps alone. Caches that look at the data decide for a whole batch at once, so that a picture depends on its
neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shortcut:
    """Guidance only in the first steps; the network, after a beginning, only at some steps, foretold between them."""

    guided: float = 0.5
    """Part of the steps, from the first on, that are guided."""
    beginning: float = 0.2
    """Part of the steps, from the first on, in each of which the network is run: the picture's layout is made there."""
    every: int = 2
    """Afterwards the network is run at every so many steps, the last one included."""
    fp8: bool = False
    """Large matrix products of the network's blocks in 8 bits, where the GPU can."""

    def guided_steps(self, steps: int) -> int:
        """How many steps are guided."""
        return math.ceil(self.guided * steps)

    def computed(self, stages: int) -> frozenset[int]:
        """At which of a scheduler's stages the network is run."""
        beginning = max(2, math.ceil(self.beginning * stages))  # two are the least that tell where it goes
        return frozenset(
            stage for stage in range(stages) if stage < beginning or (stages - 1 - stage) % self.every == 0
        )

    def passes(self, steps: int) -> int:
        """How often the network is run for a guided picture; without shortcuts twice a step."""
        guided = self.guided_steps(steps)
        return sum(2 if step < guided else 1 for step in self.computed(steps))

    def words(self, steps: int, truncation: int | None = None) -> str:
        """For the ledger, and for people; `truncation` where guidance was told otherwise when to end."""
        guided = self.guided_steps(steps) if truncation is None else truncation
        told = f"guidance in {guided} and the network in {len(self.computed(steps))} of {steps} steps"
        return f"fast: {told}, fp8" if self.fp8 else f"fast: {told}"


# U-Nets spend their time in convolutions, for which there is no fast product in 8 bits.
_SHORTCUTS = {
    "WanPipeline": Shortcut(fp8=True),
    "HunyuanDiTPipeline": Shortcut(fp8=True),
}
_OTHERS = Shortcut()


def shortcut_of(pipeline: str) -> Shortcut:
    """The shortcut of a pipeline, by the name of its class."""
    return _SHORTCUTS.get(pipeline, _OTHERS)
