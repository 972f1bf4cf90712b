"""The embedded data set: driving scenes of eight kinds, drawn on the fly, each a pure function of (seed, kind, number).

The kinds are the eight sampling prompts, so a model trained here can be asked for exactly what it saw. What differs
between kinds is what stands in the picture; sky, season, light and exposure have the same distribution in all of them,
so that a model has to learn shapes and not a mean colour.
"""

from __future__ import annotations

import numpy as np

from muralist.data.captions import Caption
from muralist.data.driving_props import Canvas, Daylight, Dice
from muralist.data.driving_scenes import SCENES
from muralist.data.fields import short_hash
from muralist.data.images import Size, height_width, size_words
from muralist.data.item import Item
from muralist.errors import UserError

# Raise it whenever a change alters any picture: caches and packed files of the old drawings then no longer match.
DRAWING_VERSION = 1

PROMPTS: tuple[str, ...] = (
    "A residential street scene with wet roads and parked cars during daytime",
    "An urban intersection with traffic lights and multiple vehicles",
    "A highway scene with clear lane markings and distant cars",
    "A rainy street with reflections on the pavement and buildings",
    "A suburban road with trees and houses on both sides",
    "A parking lot scene with various parked vehicles",
    "A city street with pedestrian crossings and traffic signs",
    "A rural road with natural scenery and minimal traffic",
)
KINDS: tuple[str, ...] = tuple(SCENES)
SMALLEST, LARGEST = 16, 1024


def _dice(kind: int, number: int, seed: int) -> Dice:
    return Dice((seed % 2**64, number * len(PROMPTS) + kind))


def draw_scene(kind: int, number: int, img_size: int, seed: int = 0) -> np.ndarray:
    """Draw scene `number` of a kind: uint8 [img_size, img_size, 3], the same composition at every size."""
    dice = _dice(kind, number, seed)
    canvas = Canvas(img_size, Daylight.draw(dice))
    SCENES[KINDS[kind]](canvas, dice)
    return canvas.develop()


def caption(kind: int, number: int, seed: int = 0) -> str:
    """Describe a scene: its kind's prompt and the hour, season and weather it was drawn with."""
    light = Daylight.draw(_dice(kind, number, seed))
    weather = light.weather.words_in_rain if KINDS[kind] == "rainy_street" else light.weather.words
    return f"{PROMPTS[kind]}, {light.hour.words} {light.season.words}, {weather}"


class DrivingWorld:
    """A source of driving scenes; item n is of kind n mod 8, so every run of eight holds each kind once."""

    # 29,500 is the size of the data set in the multi-GPU guide: its table of steps per epoch holds here as it stands.
    def __init__(
        self,
        img_size: Size,
        samples: int = 29_500,
        seed: int = 0,
        first: int = 0,
        caption: str | None = None,
    ) -> None:
        if not SMALLEST <= min(height_width(img_size)) <= max(height_width(img_size)) <= LARGEST:
            raise UserError(
                f"driving_world cannot draw pictures of {size_words(img_size)} pixels.",
                f"Its scenes are drawn at {SMALLEST} to {LARGEST} pixels a side.",
                "Choose an --img_size in that range.",
            )
        self.img_size, self.samples, self.seed, self.first = img_size, samples, seed, first
        self.label_names = list(PROMPTS)
        self._caption = Caption.settle_own(caption, self.label_names, "driving_world")

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> Item:
        """Draw item `index`, counted from `first`; of a rectangle, the middle of the square of its longer side."""
        if not 0 <= index < self.samples:
            raise IndexError(f"item {index} of a driving_world of {self.samples}")
        number, kind = divmod(self.first + index, len(PROMPTS))
        height, width = height_width(self.img_size)
        side = max(height, width)
        top, left = (side - height) // 2, (side - width) // 2
        image = draw_scene(kind, number, side, self.seed)[top : top + height, left : left + width]
        words = self._caption.own_text(caption(kind, number, self.seed), self.label_names, kind, f"scene {index}")
        return Item(np.ascontiguousarray(image), kind, words)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of scene `index` as it is drawn: a square."""
        side = max(height_width(self.img_size))
        return side, side

    def fingerprint(self) -> str:
        """Name what the items depend on."""
        size = size_words(self.img_size).replace(" ", "")
        name = f"driving_world-v{DRAWING_VERSION}-{size}px-{self.samples}-seed{self.seed}-first{self.first}"
        return f"{name}-{short_hash(*self._caption.hashed)}" if self._caption.hashed else name
