"""The embedded data set: driving scenes of eight kinds, drawn on the fly as a function of (seed, kind, number).

The kinds are the eight sampling prompts, so a model trained on them can be prompted with its training captions. Kinds
differ in their objects; sky, season, light and exposure have the same distribution in all of them, so that a model has
to learn shapes and not a mean color.
"""

from __future__ import annotations

import numpy as np

from muralist.core.errors import UserError
from muralist.data.decode import Size, format_size, height_width
from muralist.data.source import CaptionTemplate, Sample, short_hash
from muralist.demo.driving_props import Canvas, Daylight, SceneRandom
from muralist.demo.driving_scenes import SCENES

# Raise it with every change that alters an image: packed files of the old drawings then no longer match.
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


def _scene_random(kind: int, number: int, seed: int) -> SceneRandom:
    return SceneRandom((seed % 2**64, number * len(PROMPTS) + kind))


def draw_scene(kind: int, number: int, img_size: int, seed: int = 0) -> np.ndarray:
    """Draw scene `number` of a kind: uint8 [img_size, img_size, 3], the same composition at every size."""
    rng = _scene_random(kind, number, seed)
    canvas = Canvas(img_size, Daylight.draw(rng))
    SCENES[KINDS[kind]](canvas, rng)
    return canvas.render()


def caption(kind: int, number: int, seed: int = 0) -> str:
    """Describe a scene: its kind's prompt and the hour, season and weather it was drawn with."""
    light = Daylight.draw(_scene_random(kind, number, seed))
    weather = light.weather.rain_caption if KINDS[kind] == "rainy_street" else light.weather.caption
    return f"{PROMPTS[kind]}, {light.hour.caption} {light.season.caption}, {weather}"


class DrivingWorld:
    """A source of driving scenes; sample n is of kind n mod 8."""

    def __init__(
        self, img_size: Size, samples: int = 29_500, seed: int = 0, first: int = 0, caption: str | None = None
    ) -> None:
        if not SMALLEST <= min(height_width(img_size)) <= max(height_width(img_size)) <= LARGEST:
            raise UserError(
                f"driving_world cannot draw images of {format_size(img_size)} pixels.",
                f"Its scenes are drawn at {SMALLEST} to {LARGEST} pixels a side.",
                "Choose an --img_size in that range.",
            )
        self.img_size, self.samples, self.seed, self.first = img_size, samples, seed, first
        self.label_names = list(PROMPTS)
        self._caption = CaptionTemplate.resolve_plain(caption, self.label_names, "driving_world")

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> Sample:
        """Draw sample `index`, counted from `first`; a rectangle is the center of the square of its longer side."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of a driving_world of {self.samples}")
        number, kind = divmod(self.first + index, len(PROMPTS))
        height, width = height_width(self.img_size)
        side = max(height, width)
        top, left = (side - height) // 2, (side - width) // 2
        image = draw_scene(kind, number, side, self.seed)[top : top + height, left : left + width]
        text = self._caption.format_plain(caption(kind, number, self.seed), self.label_names, kind, f"scene {index}")
        return Sample(np.ascontiguousarray(image), kind, text)

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width of scene `index` as it is drawn, a square."""
        side = max(height_width(self.img_size))
        return side, side

    def fingerprint(self) -> str:
        """Name all that the samples depend on."""
        size = format_size(self.img_size).replace(" ", "")
        name = f"driving_world-v{DRAWING_VERSION}-{size}px-{self.samples}-seed{self.seed}-first{self.first}"
        return f"{name}-{short_hash(*self._caption.fingerprint_parts)}" if self._caption.fingerprint_parts else name
