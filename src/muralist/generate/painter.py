"""What makes pictures: the one seam between the fleet and a kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from muralist.errors import UserError

Beat = Callable[[], None]
"""Called at every denoising step: the sign of life by which a hang is told from work."""


class Order(NamedTuple):
    """One picture to make."""

    prompt: str
    negative_prompt: str
    seed: int


class Painter(Protocol):
    """A loaded model on one device.

    A picture depends on its order, its size, the number of orders of a call and its place among them, never on what the
    other orders are.
    """

    def batches(self) -> bool:
        """Whether several pictures at once keep that promise; where not, the fleet paints one at a time."""

    def prepare(self, orders: Sequence[Order]) -> None:
        """Encode the text of orders that will be painted soon, and forget that of others."""

    def paint(
        self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, steps: int | None = None
    ) -> list[np.ndarray]:
        """Pictures of a height and width: uint8 [H, W, 3] each, or clips [F, H, W, 3]; fewer steps are a trial."""


class CannotPaint(UserError):
    """These settings make no picture with this model, whatever the prompt."""


def nothing_to_cut(name: str) -> CannotPaint:
    """For a pipeline that runs its network once a step."""
    return CannotPaint(
        f"--cfg_truncation_step has nothing to cut: {name} runs without classifier-free guidance here.",
        "Its guidance is distilled into the network, or --guidance_scale is too low to guide.",
        "Leave --cfg_truncation_step out, or give a higher --guidance_scale.",
    )
