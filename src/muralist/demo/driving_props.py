"""Drawing tools of the driving scenes: random numbers, daylight, a canvas, and the objects of a street.

Everything is placed in unit coordinates (x to the right, y down, the image is 1 x 1), so that a scene has the same
composition at every size. Colors are tuples of 0..255.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

Color = tuple[float, float, float]
Point = tuple[float, float]
Choice = TypeVar("Choice")

# A canvas is at least this many pixels wide; reducing it by an integer factor smooths the edges.
CANVAS_PIXELS = 192

INK: Color = (44, 42, 58)
PAPER: Color = (250, 243, 228)
SIGNAL_RED: Color = (226, 74, 62)
SIGNAL_AMBER: Color = (250, 188, 66)
SIGNAL_GREEN: Color = (86, 190, 126)
HEADLAMP: Color = (255, 240, 190)
GLASS: Color = (70, 92, 116)
EVERGREEN: Color = (72, 116, 104)
SIGN_MEANINGS = ("warning", "no entry", "stop", "crossing")


def mix(first: Color, second: Color, part: float) -> Color:
    """Blend two colors: `part` 0 is the first, 1 the second."""
    rest = 1.0 - part
    return first[0] * rest + second[0] * part, first[1] * rest + second[1] * part, first[2] * rest + second[2] * part


def rectangle(middle: float, foot: float, width: float, height: float) -> tuple[Point, ...]:
    """Outline a rectangle that stands on `foot`."""
    left, right = middle - width / 2, middle + width / 2
    return (left, foot), (left, foot - height), (right, foot - height), (right, foot)


class SceneRandom:
    """The random numbers of one scene: a sequence that depends on the key alone."""

    def __init__(self, key: tuple[int, int]) -> None:
        # NumPy guarantees that the raw output of its generators never changes.
        self._bits = np.random.Philox(key=np.array(key, dtype=np.uint64))
        self._numbers: Iterator[float] = iter(())

    def random(self) -> float:
        """Draw a number in [0, 1)."""
        for number in self._numbers:
            return number
        self._numbers = iter(((self._bits.random_raw(128) >> np.uint64(11)) * 2.0**-53).tolist())
        return next(self._numbers)

    def uniform(self, low: float, high: float) -> float:
        """Draw a number in [low, high)."""
        return low + (high - low) * self.random()

    def jitter(self, center: float, spread: float) -> float:
        """Draw a number within `spread` of `center`."""
        return center + spread * (2.0 * self.random() - 1.0)

    def choice(self, choices: Sequence[Choice]) -> Choice:
        """Draw one of the choices with equal probability."""
        return choices[int(self.random() * len(choices))]

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.random() < probability

    def sign(self) -> int:
        """Draw -1 or 1: left or right."""
        return -1 if self.random() < 0.5 else 1


@dataclass(frozen=True)
class Hour:
    """A time of day: its caption, sky colors at the top and at the horizon, and the tint and height of the sun."""

    caption: str
    zenith: Color
    horizon: Color
    sunlight: Color
    sun_height: float


@dataclass(frozen=True)
class Season:
    """A season: its caption and the colors of grass and leaves."""

    caption: str
    grass: Color
    leaves: tuple[Color, ...]


@dataclass(frozen=True)
class Weather:
    """A weather: its captions without and with rain, how gray and hazy it is, whether sun and clouds show."""

    caption: str
    rain_caption: str
    grayness: float
    haze: float
    sun: bool
    clouds: bool


# Daylight only, because the first of the eight prompts says "during daytime" and all kinds share these skies.
HOURS = (
    Hour("at sunrise", (120, 150, 190), (255, 204, 172), (1.02, 0.93, 0.90), 0.30),
    Hour("in the morning", (116, 184, 216), (236, 240, 222), (1.00, 1.00, 0.96), 0.20),
    Hour("at noon", (72, 152, 206), (196, 228, 232), (1.05, 1.04, 1.00), 0.10),
    Hour("in the late afternoon", (132, 176, 188), (250, 222, 164), (1.06, 0.97, 0.82), 0.22),
    Hour("at sunset", (104, 104, 168), (255, 176, 128), (1.00, 0.87, 0.85), 0.32),
)
SEASONS = (
    Season("in spring", (154, 186, 104), ((132, 180, 98), (236, 172, 176))),
    Season("in summer", (116, 160, 94), ((74, 134, 92), (98, 150, 84))),
    Season("in autumn", (192, 166, 98), ((214, 122, 62), (230, 168, 72))),
    Season("in winter", (206, 212, 214), ((148, 164, 168), (110, 140, 138))),
)
WEATHERS = (
    Weather("clear sky", "sunlit rain", grayness=0.0, haze=0.4, sun=True, clouds=False),
    Weather("scattered clouds", "passing clouds", grayness=0.1, haze=0.4, sun=True, clouds=True),
    Weather("grey sky", "grey sky", grayness=0.6, haze=0.4, sun=False, clouds=True),
    Weather("mist", "mist", grayness=0.25, haze=0.75, sun=False, clouds=False),
)
GRAY_SKY: Color = (186, 190, 194)
GRAY_LIGHT: Color = (0.88, 0.90, 0.92)


@dataclass(frozen=True)
class Daylight:
    """The conditions of one scene, drawn from the same distributions for every kind of scene."""

    hour: Hour
    season: Season
    weather: Weather
    zenith: Color
    horizon: Color
    sunlight: Color
    exposure: float

    @staticmethod
    def draw(rng: SceneRandom) -> Daylight:
        """Draw hour, season, weather and exposure."""
        hour, season, weather = rng.choice(HOURS), rng.choice(SEASONS), rng.choice(WEATHERS)
        horizon = mix(hour.horizon, GRAY_SKY, weather.grayness)
        zenith = mix(hour.zenith, GRAY_SKY, weather.grayness)
        return Daylight(
            hour=hour,
            season=season,
            weather=weather,
            zenith=zenith if weather.sun or weather.clouds else mix(zenith, horizon, 0.5),
            horizon=horizon,
            sunlight=mix(hour.sunlight, GRAY_LIGHT, weather.grayness),
            exposure=rng.uniform(124.0, 172.0),
        )


class Canvas:
    """A square image that is drawn in unit coordinates, lit by one daylight: shapes first, then objects of a street."""

    def __init__(self, img_size: int, daylight: Daylight) -> None:
        self.reduction = max(2, -(-CANVAS_PIXELS // img_size))
        self.pixels = img_size * self.reduction
        self.daylight = daylight
        self.image = Image.new("RGB", (self.pixels, self.pixels))
        self._draw = ImageDraw.Draw(self.image)

    def _lit(self, color: Color) -> tuple[int, int, int]:
        light = self.daylight.sunlight
        red, green, blue = int(color[0] * light[0]), int(color[1] * light[1]), int(color[2] * light[2])
        return min(red, 255), min(green, 255), min(blue, 255)

    def far(self, color: Color, nearness: float) -> Color:
        """Fade a color towards that of the horizon: `nearness` 1 is at the viewer's feet, 0 is infinitely far."""
        return mix(color, self.daylight.horizon, self.daylight.weather.haze * max(0.0, 1.0 - nearness) ** 2)

    def polygon(self, points: Sequence[Point], color: Color) -> None:
        """Fill a polygon."""
        pixels = self.pixels
        self._draw.polygon([(x * pixels, y * pixels) for x, y in points], fill=self._lit(color))

    def outline(self, x: float, y: float, size: float, outline: Iterable[Point], color: Color, facing: int = 1) -> None:
        """Fill an outline, in units of `size` around (x, y); `facing` -1 mirrors it."""
        left, top, up = x * self.pixels, y * self.pixels, size * self.pixels
        along = up * facing
        self._draw.polygon([(left + across * along, top + down * up) for across, down in outline], self._lit(color))

    def box(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        """Fill an upright rectangle."""
        pixels = self.pixels
        x, y = round(left * pixels), round(top * pixels)
        corner = max(x, round(right * pixels) - 1), max(y, round(bottom * pixels) - 1)
        self._draw.rectangle((x, y, *corner), fill=self._lit(color))

    def ellipse(self, x: float, y: float, across: float, up: float, color: Color) -> None:
        """Fill an ellipse given its center and its two radii."""
        pixels = self.pixels
        frame = ((x - across) * pixels, (y - up) * pixels, (x + across) * pixels, (y + up) * pixels)
        self._draw.ellipse(frame, fill=self._lit(color))

    def line(self, points: Sequence[Point], width: float, color: Color) -> None:
        """Draw a line through the points."""
        pixels = self.pixels
        thickness = max(1, round(width * pixels))
        self._draw.line([(x * pixels, y * pixels) for x, y in points], fill=self._lit(color), width=thickness)

    def gradient(self, top: float, bottom: float, first: Color, last: Color, shape: Sequence[Point] = ()) -> None:
        """Fill between two heights with a vertical gradient, over the full width or inside a polygon."""
        pixels = self.pixels
        start, stop = round(top * pixels), min(pixels, round(bottom * pixels))
        ramp = np.linspace(self._lit(first), self._lit(last), stop - start).astype(np.uint8)
        filled = Image.fromarray(ramp[:, None, :]).resize((pixels, stop - start), Image.Resampling.NEAREST)
        mask = None
        if shape:
            mask = Image.new("L", filled.size)
            ImageDraw.Draw(mask).polygon([(x * pixels, y * pixels - start) for x, y in shape], fill=255)
        self.image.paste(filled, (0, start), mask)

    def render(self) -> np.ndarray:
        """Reduce to the final size and adjust the exposure, so that the mean color is independent of the scene."""
        small = np.asarray(self.image.reduce(self.reduction))
        power = np.log(self.daylight.exposure / 255.0) / np.log(small.mean() / 255.0)
        curve = (np.linspace(0.0, 1.0, 256) ** power * 255.0).round().astype(np.uint8)
        return curve.take(small)

    def sky(self, rng: SceneRandom, horizon: float) -> None:
        """Draw the sky down to the horizon: gradient, sun, clouds."""
        light = self.daylight
        self.gradient(0.0, horizon, light.zenith, light.horizon)
        x = 0.5 + rng.sign() * rng.uniform(0.1, 0.3)
        if light.weather.sun:
            y = min(light.hour.sun_height, horizon - 0.06) + 0.03 * rng.random()
            self.ellipse(x, y, 0.10, 0.10, mix(light.horizon, (255, 240, 200), 0.35))
            self.ellipse(x, y, 0.065, 0.065, mix(light.horizon, (255, 244, 214), 0.85))
        if light.weather.clouds:
            white = mix(light.horizon, PAPER, 0.7 if light.weather.sun else 0.2)
            for _ in range(3):
                x, y, size = rng.random(), rng.uniform(0.04, 0.26), rng.uniform(0.10, 0.17)
                self.ellipse(x, y, size, 0.28 * size, white)
                self.ellipse(x - 0.3 * size, y - 0.18 * size, 0.45 * size, 0.35 * size, white)
                self.ellipse(x + 0.25 * size, y - 0.12 * size, 0.38 * size, 0.28 * size, white)

    def car(self, x: float, y: float, width: float, color: Color, front: bool, tall: float = 1.0) -> None:
        """Draw a car seen from behind or from the front, standing at (x, y)."""
        roof = -0.46 - 0.26 * tall
        self.ellipse(x, y - 0.01 * width, 0.58 * width, 0.07 * width, mix(INK, color, 0.1))
        for side in (-0.35, 0.35):
            self.outline(x, y, width, rectangle(side, 0.0, 0.18, 0.22), INK)
        self.outline(x, y, width, ((-0.43, -0.44), (-0.32, roof), (0.32, roof), (0.43, -0.44)), mix(color, PAPER, 0.12))
        glass = mix(GLASS, self.daylight.horizon, 0.3 if front else 0.1)
        self.outline(x, y, width, ((-0.35, -0.44), (-0.27, roof + 0.06), (0.27, roof + 0.06), (0.35, -0.44)), glass)
        body = ((-0.5, -0.12), (-0.5, -0.36), (-0.42, -0.44), (0.42, -0.44), (0.5, -0.36), (0.5, -0.12))
        self.outline(x, y, width, body, color)
        self.outline(x, y, width, rectangle(0.0, -0.09, 1.0, 0.08), mix(color, INK, 0.55))
        for side in (-0.39, 0.39):
            self.outline(x, y, width, rectangle(side, -0.24, 0.16, 0.11), HEADLAMP if front else SIGNAL_RED)

    def car_sideways(self, x: float, y: float, width: float, color: Color, facing: int, van: bool) -> None:
        """Draw a car or a van seen from its side, its wheels at (x, y); `facing` is -1 for left and 1 for right."""
        glass = mix(GLASS, self.daylight.horizon, 0.25)
        self.ellipse(x, y, 0.52 * width, 0.05 * width, mix(INK, color, 0.1))
        if van:
            cabin, window = ((-0.48, -0.5), (0.3, -0.5), (0.44, -0.24), (-0.48, -0.24)), (0.08, 0.08, 0.27, 0.37)
        else:
            cabin, window = ((-0.24, -0.44), (0.12, -0.44), (0.3, -0.24), (-0.36, -0.24)), (-0.28, -0.2, 0.1, 0.23)
        sill, top = -0.26, cabin[0][1] + 0.05
        self.outline(x, y, width, cabin, mix(color, PAPER, 0.12), facing)
        self.outline(x, y, width, list(zip(window, (sill, top, top, sill), strict=True)), glass, facing)
        body = ((-0.5, -0.07), (-0.48, -0.26), (0.42, -0.26), (0.5, -0.19), (0.5, -0.07))
        self.outline(x, y, width, body, color, facing)
        for wheel in (x - 0.29 * width, x + 0.29 * width):
            self.ellipse(wheel, y - 0.07 * width, 0.095 * width, 0.095 * width, INK)
            self.ellipse(wheel, y - 0.07 * width, 0.04 * width, 0.04 * width, PAPER)

    def tree(self, x: float, y: float, size: float, leaves: Color, conifer: bool) -> None:
        """Draw a tree of the given height, standing at (x, y)."""
        self.ellipse(x, y, 0.26 * size, 0.04 * size, mix(leaves, INK, 0.5))
        self.outline(x, y, size, rectangle(0.0, 0.0, 0.08, 0.4), (112, 84, 78))
        if conifer:
            leaves = mix(leaves, EVERGREEN, 0.7)
            self.outline(x, y, size, ((0.0, -1.0), (-0.28, -0.18), (0.28, -0.18)), mix(leaves, INK, 0.22))
            self.outline(x, y, size, ((0.0, -1.0), (-0.28, -0.18), (0.0, -0.18)), leaves)
            return
        self.ellipse(x, y - 0.62 * size, 0.34 * size, 0.34 * size, mix(leaves, INK, 0.22))
        self.ellipse(x - 0.03 * size, y - 0.66 * size, 0.30 * size, 0.30 * size, leaves)
        self.ellipse(x - 0.09 * size, y - 0.74 * size, 0.15 * size, 0.14 * size, mix(leaves, PAPER, 0.16))

    def house(self, x: float, y: float, width: float, wall: Color, roof: Color) -> None:
        """Draw a house with its gable to the viewer, standing at (x, y)."""
        self.outline(x, y, width, rectangle(0.26, -0.55, 0.11, 0.43), mix(roof, INK, 0.35))
        self.outline(x, y, width, rectangle(0.0, 0.0, 0.88, 0.57), wall)
        self.outline(x, y, width, ((-0.56, -0.55), (0.0, -1.05), (0.56, -0.55)), roof)
        self.outline(x, y, width, ((-0.36, -0.55), (0.0, -0.88), (0.36, -0.55)), mix(wall, PAPER, 0.2))
        self.ellipse(x, y - 0.66 * width, 0.08 * width, 0.08 * width, GLASS)
        self.outline(x, y, width, rectangle(0.0, 0.0, 0.18, 0.36), mix(roof, INK, 0.2))
        for side in (-0.27, 0.27):
            self.outline(x, y, width, rectangle(side, -0.2, 0.2, 0.22), mix(GLASS, PAPER, 0.15))

    def block(self, left: float, right: float, top: float, ground: float, wall: Color) -> None:
        """Draw a town building that faces the viewer, with a cornice and a grid of windows."""
        self.box(left, top, right, ground, wall)
        self.box(left, top, right, top + 0.02, mix(wall, INK, 0.3))
        pane = mix(GLASS, self.daylight.horizon, 0.25)
        step = (right - left) / 3
        for floor in range(int((ground - top - 0.1) / 0.1)):
            for column in range(3):
                x, y = left + (column + 0.25) * step, top + 0.1 * floor + 0.06
                self.box(x, y, x + 0.5 * step, y + 0.06, pane)

    def pedestrian(self, x: float, y: float, height: float, coat: Color, umbrella: bool) -> None:
        """Draw a person in mid-step, feet at (x, y)."""
        self.ellipse(x, y, 0.16 * height, 0.025 * height, mix(INK, coat, 0.2))
        for foot in (-0.13, 0.13):
            self.line([(x, y - 0.45 * height), (x + foot * height, y)], 0.085 * height, INK)
        self.outline(x, y, height, ((-0.13, -0.38), (-0.09, -0.8), (0.09, -0.8), (0.13, -0.38)), coat)
        self.ellipse(x, y - 0.89 * height, 0.08 * height, 0.095 * height, (226, 172, 140))
        if umbrella:
            self.outline(x, y, height, rectangle(0.1, -0.55, 0.025, 0.55), INK)
            dome = ((-0.24, -0.98), (-0.13, -1.17), (0.05, -1.24), (0.23, -1.17), (0.34, -0.98))
            self.outline(x, y, height, dome, coat)
        else:
            self.ellipse(x, y - 0.94 * height, 0.08 * height, 0.06 * height, (84, 60, 60))

    def traffic_light(self, x: float, top: float, size: float, lit: int) -> None:
        """Draw a traffic light hanging from (x, top); `lit` is 0 for red, 1 for amber, 2 for green."""
        self.outline(x, top, size, rectangle(0.0, 1.1, 0.54, 1.1), INK)
        for place, color in enumerate((SIGNAL_RED, SIGNAL_AMBER, SIGNAL_GREEN)):
            shown = color if place == lit else mix(color, INK, 0.7)
            self.ellipse(x, top + (0.21 + 0.34 * place) * size, 0.16 * size, 0.15 * size, shown)

    def traffic_sign(self, x: float, ground: float, height: float, size: float, meaning: str) -> None:
        """Draw a traffic sign on a pole; its meaning is one of SIGN_MEANINGS."""
        y = ground - height
        self.box(x - 0.012, y, x + 0.012, ground, mix(INK, PAPER, 0.35))
        if meaning == "warning":
            self.outline(x, y, size, ((0.0, -1.05), (-1.05, 0.75), (1.05, 0.75)), SIGNAL_RED)
            self.outline(x, y, size, ((0.0, -0.63), (-0.63, 0.45), (0.63, 0.45)), PAPER)
            self.outline(x, y, size, rectangle(0.0, 0.3, 0.2, 0.65), INK)
        elif meaning == "no entry":
            self.ellipse(x, y, size, size, SIGNAL_RED)
            self.ellipse(x, y, 0.66 * size, 0.66 * size, PAPER)
            self.outline(x, y, size, rectangle(0.0, 0.12, 0.8, 0.24), INK)
        elif meaning == "stop":
            upper = ((-1.0, -0.41), (-0.41, -1.0), (0.41, -1.0), (1.0, -0.41))
            self.outline(x, y, size, (*upper, *((-across, -down) for across, down in upper)), SIGNAL_RED)
            self.outline(x, y, size, rectangle(0.0, 0.2, 1.3, 0.4), PAPER)
        else:
            self.outline(x, y, size, rectangle(0.0, 0.9, 1.8, 1.8), (52, 108, 176))
            self.outline(x, y, size, ((0.0, -0.65), (-0.65, 0.6), (0.65, 0.6)), PAPER)
