"""What makes pictures: the one seam between the fleet and a kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from muralist.errors import UserError

Beat = Callable[[], None]
"""Called at every denoising step: the sign of life by which a hang is told from work."""


class Way(Enum):
    """How a batch is painted."""

    USUAL = "as the settings say"
    EXACT = "as --preset exact would, on the same steps"
    TRIAL = "in a few steps, to see what fits into memory"


TRIAL_STEPS = 2


class Pending(Protocol):
    """Pictures that a device may still be at work on."""

    def wait(self) -> list[np.ndarray]:
        """Them: uint8 [H, W, 3] each, or clips [F, H, W, 3]."""

    @property
    def there(self) -> bool:
        """Whether `wait` returns at once because no device is at work on them."""

    @property
    def gpu_busy(self) -> float | None:
        """After `wait`: for which part of the time since the last batch the GPU had work; None where nobody can tell."""


class Finished(NamedTuple):
    """Pictures that are there already."""

    pictures: list[np.ndarray]
    there: bool = True
    gpu_busy: float | None = None

    def wait(self) -> list[np.ndarray]:
        """Them."""
        return self.pictures


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

    def made_with(self) -> dict[str, str]:
        """What a picture's last bits depend on beside the settings, the device and the libraries."""

    def prepare(self, orders: Sequence[Order]) -> None:
        """Encode the text of orders that will be painted soon, and forget that of others."""

    def cut_short(self, prompt: str) -> bool:
        """Whether a prompt that was encoded is longer than some text encoder reads."""

    def begin(self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL) -> Pending:
        """Pictures of a height and width, handed to the device; another batch may be begun before they are there."""

    def paint(
        self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL
    ) -> list[np.ndarray]:
        """The same, waited for."""


class CannotPaint(UserError):
    """These settings make no picture with this model, whatever the prompt."""


def overflowed(precision: str) -> UserError:
    """For numbers that are none."""
    return UserError(
        "The model made no picture: some of its numbers overflowed.",
        f"It ran in {precision}.",
        "Try --dtype bf16 or fp32.",
    )


def nothing_to_cut(name: str) -> CannotPaint:
    """For a pipeline that runs its network once a step."""
    return CannotPaint(
        f"--cfg_truncation_step has nothing to cut: {name} runs without classifier-free guidance here.",
        "Its guidance is distilled into the network, or --guidance_scale is too low to guide.",
        "Leave --cfg_truncation_step out, or give a higher --guidance_scale.",
    )
