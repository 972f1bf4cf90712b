"""Step caching of `--preset fast`: which steps are guided, and in which the denoiser runs.

Both depend on the number of steps alone. Caches that look at the data, such as FirstBlockCache, decide for the entire
batch, so that an image would depend on its neighbors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCache:
    """Guidance in the first steps only; after a beginning, the denoiser in some steps only, extrapolated in between."""

    guided: float = 0.5
    """Fraction of the steps, from the first on, that are guided."""
    beginning: float = 0.2
    """Fraction of the steps, from the first on, in all of which the denoiser runs: they form the image's layout."""
    interval: int = 2
    """Afterwards the denoiser runs in every `interval`-th step, the last one included."""
    fp8: bool = False
    """Large matmuls of the denoiser's blocks in FP8, on GPUs that support it."""

    def guided_steps(self, steps: int) -> int:
        """The number of guided steps."""
        return math.ceil(self.guided * steps)

    def computed(self, stages: int) -> frozenset[int]:
        """The stages of a scheduler in which the denoiser runs."""
        beginning = max(2, math.ceil(self.beginning * stages))  # a line needs two points
        return frozenset(
            stage for stage in range(stages) if stage < beginning or (stages - 1 - stage) % self.interval == 0
        )

    def passes(self, steps: int) -> int:
        """The number of denoiser passes for a guided image; without step caching two per step."""
        guided = self.guided_steps(steps)
        return sum(2 if step < guided else 1 for step in self.computed(steps))

    def describe(self, steps: int, truncation: int | None = None) -> str:
        """One line for the ledger and the user; `truncation` replaces the number of guided steps."""
        guided = self.guided_steps(steps) if truncation is None else truncation
        line = f"fast: guidance in {guided} and the network in {len(self.computed(steps))} of {steps} steps"
        return f"{line}, fp8" if self.fp8 else line


# U-Nets spend their time in convolutions, for which there is no fast FP8 kernel.
_BY_PIPELINE = {
    "WanPipeline": StepCache(fp8=True),
    "HunyuanDiTPipeline": StepCache(fp8=True),
}


def step_cache_for(pipeline: str) -> StepCache:
    """The step caching of a pipeline, by the name of its class."""
    return _BY_PIPELINE.get(pipeline, StepCache())
