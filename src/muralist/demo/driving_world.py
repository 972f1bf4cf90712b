"""The embedded data set: driving scenes of eight kinds, drawn on the fly as a function of (seed, kind, number).

The kinds are the eight sampling prompts, so a model trained on them can be prompted with its training captions. Kinds
differ in their objects; sky, season, light and exposure have the same distribution in all of them, so that a model has
to learn shapes and not a mean color.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import ImageColor

from muralist.core.errors import UserError
from muralist.core.image_size import Size, format_size, height_width
from muralist.data.source import CaptionTemplate, Sample, short_hash
from muralist.demo.driving_props import (
    GLASS,
    INK,
    PAPER,
    SIGN_MEANINGS,
    SIGNAL_AMBER,
    Canvas,
    Color,
    Daylight,
    Point,
    SceneRandom,
    mix,
)


def palette(colors: str) -> tuple[Color, ...]:
    """Parse colors such as `#d85446`."""
    return tuple(ImageColor.getrgb(color)[:3] for color in colors.split())


PAVEMENT: Color = (196, 188, 184)
LAMPLIGHT: Color = (255, 214, 130)
DUSKY: Color = (58, 60, 92)
BARN_RED: Color = (196, 82, 70)
CAR_COLORS = palette("#d85446 #eeb048 #3e8096 #f4ecdc #5c9e80 #424a6e #e28a80")
WALLS = palette("#e8a484 #f0d6aa #9cbab8 #ce7a68 #dedece #b2a4c4")
ROOFS = palette("#a04e46 #5c5c74 #805c54 #466870")
ASPHALTS = palette("#707080 #868084 #626a7a #7e788c")
CROPS = palette("#debc60 #a096c4 #c4aa76 #80aa60")
# Nearness of the far and the near end of three buildings along a street, far ones first.
ROW = ((0.15, 0.28), (0.28, 0.5), (0.5, 1.3))


@dataclass(frozen=True)
class View:
    """A camera that looks down a street: its vanishing point, its height above the ground, the bend of the street."""

    vanish: float
    horizon: float
    ground: float
    bend: float

    @staticmethod
    def draw(rng: SceneRandom, bend: float = 0.0) -> View:
        """Draw a camera; `bend` is the strongest curve of the street."""
        horizon = rng.jitter(0.45, 0.022)
        return View(rng.jitter(0.5, 0.045), horizon, 1.02 - horizon, rng.jitter(0.0, bend))

    def at(self, across: float, up: float, near: float) -> Point:
        """Project a point: `across` the street, `up` from the ground, at a nearness from 0 (horizon) to 1 (feet)."""
        middle = self.vanish + self.bend * (1.0 - near) ** 2
        return middle + across * near, self.horizon + (self.ground - up) * near

    def strip(self, left: float, right: float, far: float = 0.02, near: float = 1.1) -> list[Point]:
        """Outline a stretch of ground between two lines along the street."""
        steps = [far, near] if self.bend == 0.0 else [far + (near - far) * (step / 8) ** 2 for step in range(9)]
        return [self.at(left, 0.0, step) for step in steps] + [self.at(right, 0.0, step) for step in reversed(steps)]


class Front(NamedTuple):
    """A house front along the street, given by its line on the ground."""

    view: View
    across: float
    far: float
    near: float

    def part(self, low: float, high: float, begin: float = 0.0, end: float = 1.0) -> list[Point]:
        """Outline a part of the front between two heights and two fractions of its length, from the near end."""
        # Equal steps along the street are equal steps of depth, which is one over the nearness.
        depth, length = 1.0 / self.near, 1.0 / self.far - 1.0 / self.near
        near, far = 1.0 / (depth + length * begin), 1.0 / (depth + length * end)
        corners = ((low, far), (high, far), (high, near), (low, near))
        return [self.view.at(self.across, up, nearness) for up, nearness in corners]

    def build(self, canvas: Canvas, height: float, floors: int, wall: Color, pane: Color) -> None:
        """Draw the wall with two windows a floor; a negative height draws its reflection in the ground."""
        canvas.polygon(self.part(0.0, height), wall)
        for floor in range(floors):
            low, high = height * (floor + 0.3) / floors, height * (floor + 0.8) / floors
            canvas.polygon(self.part(low, high, 0.125, 0.375), pane)
            canvas.polygon(self.part(low, high, 0.625, 0.875), pane)


def _draw_land(canvas: Canvas, horizon: float, color: Color) -> None:
    canvas.gradient(horizon, 1.0, canvas.far(color, 0.0), mix(color, INK, 0.08))


def _draw_road(canvas: Canvas, view: View, half: float, asphalt: Color) -> None:
    """Draw a road that fades into the distance."""
    far, near = mix(asphalt, canvas.daylight.horizon, 0.6), canvas.far(asphalt, 0.7)
    canvas.gradient(view.horizon, 1.0, far, near, view.strip(-half, half))


def _draw_dashes(canvas: Canvas, view: View, across: float, start: float, color: Color = PAPER) -> None:
    """Draw a dashed line whose dashes have equal length on the ground, the nearest beginning at depth `start`."""
    for number in range(7):
        depth = start + 0.62 * number
        canvas.polygon(view.strip(across - 0.035, across + 0.035, 1.0 / (depth + 0.32), 1.0 / depth), color)


def _draw_distant_trees(canvas: Canvas, rng: SceneRandom, horizon: float) -> None:
    leaves = canvas.far(mix(rng.choice(canvas.daylight.season.leaves), INK, 0.1), 0.1)
    for number in range(7):
        x = (number + rng.random()) / 7
        canvas.ellipse(x, horizon, rng.uniform(0.08, 0.14), rng.uniform(0.03, 0.07), leaves)


def _draw_hills(canvas: Canvas, rng: SceneRandom, horizon: float, heights: Sequence[float]) -> None:
    """Draw ranges of rolling hills, far ones first."""
    for number, height in enumerate(heights):
        hill = mix(canvas.daylight.season.grass, (80, 110, 130), 0.55 - 0.25 * number)
        color = canvas.far(hill, 0.15 + 0.3 * number)
        for _ in range(3):
            canvas.ellipse(rng.random(), horizon + 0.02, rng.uniform(0.3, 0.5), height * rng.uniform(0.7, 1.3), color)


def residential_wet(canvas: Canvas, rng: SceneRandom) -> None:
    """Terraced houses, cars parked along both curbs, a wet road with puddles that mirror the sky."""
    view, light, asphalt = View.draw(rng), canvas.daylight, rng.choice(ASPHALTS)
    canvas.sky(rng, view.horizon)
    _draw_land(canvas, view.horizon, PAVEMENT)
    _draw_distant_trees(canvas, rng, view.horizon)
    canvas.gradient(view.horizon, 1.0, light.horizon, mix(asphalt, INK, 0.3), view.strip(-0.9, 0.9))
    for side in (-1, 1):
        height, edge, ridge = rng.uniform(0.72, 0.9), side * 0.86, side * 1.15
        for far, near in ROW:
            wall, roof = canvas.far(rng.choice(WALLS), near), canvas.far(rng.choice(ROOFS), near)
            front, pane = Front(view, edge, far, near), mix(GLASS, wall, 0.15)
            front.build(canvas, height, 2, wall, pane)
            front.build(canvas, -height, 2, mix(wall, asphalt, 0.65), mix(pane, asphalt, 0.4))
            top = height + 0.22
            eaves = view.at(edge, height, near), view.at(edge, height, far)
            canvas.polygon([*eaves, view.at(ridge, top, far), view.at(ridge, top, near)], roof)
        canvas.polygon(view.strip(side * 0.64, edge), canvas.far(PAVEMENT, 0.5))
    water = mix(light.zenith, light.horizon, 0.6)
    for _ in range(3):
        x, y = view.at(rng.jitter(0.0, 0.28), 0.0, rng.uniform(0.4, 0.95))
        size = (y - view.horizon) * rng.uniform(0.26, 0.4)
        canvas.ellipse(x, y, size, 0.2 * size, water)
        canvas.ellipse(x + 0.4 * rng.sign() * size, y + 0.12 * size, 0.7 * size, 0.16 * size, water)
        canvas.ellipse(x, y, 0.5 * size, 0.05 * size, mix(water, PAPER, 0.4))
    for side in (-1, 1):
        facing_us = rng.chance(0.5)
        for place in (0.24, 0.4, 0.76):
            near = place * rng.jitter(1.0, 0.08)
            (x, y), width = view.at(side * 0.56, 0.0, near), 0.42 * near
            color = canvas.far(rng.choice(CAR_COLORS), near)
            canvas.box(x - 0.42 * width, y, x + 0.42 * width, y + 0.4 * width, mix(asphalt, color, 0.45))
            canvas.car(x, y, width, color, facing_us, rng.uniform(0.9, 1.3))


def intersection(canvas: Canvas, rng: SceneRandom) -> None:
    """Two streets that cross, corner buildings, an arm of traffic lights overhead, cars passing from side to side."""
    view, asphalt = View.draw(rng), rng.choice(ASPHALTS)
    canvas.sky(rng, view.horizon)
    _draw_land(canvas, view.horizon, PAVEMENT)
    _draw_distant_trees(canvas, rng, view.horizon)
    for side in (-1, 1):
        inner = view.vanish + side * rng.uniform(0.1, 0.14)
        outer = inner + side * rng.uniform(0.22, 0.28)
        for ends in ((outer, 0.5 + side * 0.6), (inner, outer)):
            wall = canvas.far(rng.choice(WALLS), 0.6)
            canvas.block(min(ends), max(ends), rng.uniform(0.14, 0.26), view.horizon + 0.07, wall)
    _draw_road(canvas, view, 0.62, asphalt)
    top, bottom = view.horizon + 0.13, view.horizon + 0.33
    canvas.box(0.0, top - 0.02, 1.0, top, PAPER)
    canvas.box(0.0, top, 1.0, bottom, canvas.far(asphalt, 0.5))
    for number in range(6):
        x, y = (number + 0.2) / 6, (top + bottom) / 2
        canvas.box(x, y - 0.008, x + 0.09, y + 0.008, SIGNAL_AMBER)
    canvas.polygon(view.strip(-0.58, 0.58, 0.63, 0.68), PAPER)
    for lane, facing in ((top + 0.07, -1), (bottom - 0.01, 1)):
        x = rng.uniform(0.1, 0.35)
        for _ in range(2):
            width = rng.uniform(0.24, 0.3)
            canvas.car_sideways(x, lane, width, rng.choice(CAR_COLORS), facing, van=rng.chance(0.3))
            x += rng.uniform(0.4, 0.5)
    side = rng.sign()
    x, y = view.at(side * 0.27, 0.0, 0.95)
    canvas.car(x, y, 0.32, rng.choice(CAR_COLORS), front=False)
    pole, tip, steel = 0.5 + side * 0.44, 0.5 - side * 0.36, mix(INK, PAPER, 0.12)
    canvas.box(pole - 0.018, 0.06, pole + 0.018, 0.86, steel)
    canvas.box(min(pole, tip), 0.07, max(pole, tip), 0.095, steel)
    lit = rng.choice((0, 0, 1, 2, 2))
    for across in (-0.3, 0.0, 0.27):
        canvas.traffic_light(0.5 - side * across, 0.08, 0.19, lit)


def highway(canvas: Canvas, rng: SceneRandom) -> None:
    """A wide road of four lanes, guard rails on both sides, far hills, small distant cars."""
    view, half = View.draw(rng, bend=0.08), rng.uniform(1.1, 1.3)
    canvas.sky(rng, view.horizon)
    _draw_hills(canvas, rng, view.horizon, (0.1, 0.055))
    _draw_land(canvas, view.horizon, canvas.daylight.season.grass)
    _draw_road(canvas, view, half, rng.choice(ASPHALTS))
    for side in (-1, 1):
        canvas.polygon(view.strip(side * half * 0.9, side * (half * 0.9 + 0.07)), SIGNAL_AMBER)
        _draw_guard_rail(canvas, view, side * (half + 0.08))
    if rng.chance(0.7):
        _draw_gantry(canvas, view, half + 0.14)
    start = rng.uniform(0.95, 1.2)
    for lane in (-0.45, 0.0, 0.45):
        _draw_dashes(canvas, view, lane * half, start)
    for lane in rng.choice(((-0.68, 0.22), (-0.22, 0.68), (-0.68, 0.68, 0.22), (-0.22, -0.68, 0.22))):
        near = rng.uniform(0.13, 0.26)
        x, y = view.at(lane * half, 0.0, near)
        canvas.car(x, y, 0.42 * near, rng.choice(CAR_COLORS), front=lane < 0, tall=rng.uniform(0.9, 1.6))


def _draw_guard_rail(canvas: Canvas, view: View, across: float) -> None:
    for near in (0.1, 0.14, 0.2, 0.29, 0.42, 0.62):
        x, y = view.at(across, 0.0, near)
        canvas.box(x - 0.02 * near, y - 0.2 * near, x + 0.02 * near, y, mix(INK, PAPER, 0.4))
    depths = (0.04, 0.1, 0.2, 0.4, 0.7, 1.1)
    for low, high, shade in ((0.14, 0.3, 0.08), (0.14, 0.2, 0.4)):
        top = [view.at(across, high, near) for near in depths]
        foot = [view.at(across, low, near) for near in reversed(depths)]
        canvas.polygon(top + foot, mix(PAPER, INK, shade))


def _draw_gantry(canvas: Canvas, view: View, half: float) -> None:
    """Span the road with two green direction boards."""
    near, steel = 0.26, canvas.far(mix(INK, PAPER, 0.3), 0.4)
    (left, foot), (right, top) = view.at(-half, 0.0, near), view.at(half, 1.15, near)
    for x in (left, right):
        canvas.box(x - 0.01, top, x + 0.01, foot, steel)
    canvas.box(left, top + 0.02, right, top + 0.035, steel)
    for x in (0.75 * left + 0.25 * right, 0.25 * left + 0.75 * right):
        canvas.box(x - 0.12, top - 0.035, x + 0.12, top + 0.075, canvas.far((58, 132, 104), 0.6))
        canvas.box(x - 0.09, top - 0.01, x + 0.05, top + 0.01, PAPER)
        canvas.box(x - 0.09, top + 0.03, x + 0.09, top + 0.045, PAPER)


def rainy_street(canvas: Canvas, rng: SceneRandom) -> None:
    """Tall buildings with lit windows on both sides, all mirrored in the glossy street, rain across the image."""
    view, light = View.draw(rng), canvas.daylight
    ground = mix(rng.choice(ASPHALTS), INK, 0.35)
    canvas.sky(rng, view.horizon)
    canvas.gradient(view.horizon, 1.0, light.horizon, mix(ground, light.zenith, 0.45))
    skyline = mix(light.horizon, DUSKY, 0.35)
    canvas.box(view.vanish - 0.14, view.horizon - 0.13, view.vanish + 0.14, view.horizon + 0.09, skyline)
    _draw_dashes(canvas, view, 0.0, rng.uniform(0.95, 1.2), mix(ground, PAPER, 0.7))
    for side in (-1, 1):
        for far, near in ROW:
            front, height = Front(view, side * 0.7, far, near), rng.uniform(1.6, 2.1)
            wall = canvas.far(mix(rng.choice(WALLS), DUSKY, rng.uniform(0.6, 0.78)), near)
            pane, shop = mix(LAMPLIGHT, wall, rng.uniform(0.0, 0.35)), rng.choice(CAR_COLORS)
            front.build(canvas, height, 3, wall, pane)
            canvas.polygon(front.part(0.0, 0.2, 0.04, 0.96), mix(shop, LAMPLIGHT, 0.3))
            canvas.polygon(front.part(0.18, 0.26), mix(shop, INK, 0.3))
            front.build(canvas, -height, 3, mix(wall, ground, 0.6), mix(pane, ground, 0.35))
            canvas.polygon(front.part(0.0, -0.36), mix(shop, ground, 0.4))
        canvas.polygon(view.strip(side * 0.6, side * 0.7, 0.05), mix(ground, PAPER, 0.45))
    for side in (-1, 1):
        x, y = view.at(side * rng.uniform(0.06, 0.4), 0.0, rng.uniform(0.4, 0.6))
        coat = rng.choice(CAR_COLORS)
        canvas.box(x - 0.03, y, x + 0.03, y + 0.2, mix(ground, coat, 0.5))
        canvas.pedestrian(x, y, 0.26, coat, umbrella=True)
    slant, streak = rng.sign() * rng.uniform(0.16, 0.4), mix(light.horizon, PAPER, 0.5)
    for number in range(26):
        x, y, length = (number + rng.random()) / 26, rng.uniform(-0.05, 0.9), rng.uniform(0.1, 0.2)
        canvas.line([(x, y), (x + slant * length, y + length)], 0.006, streak)


def suburban(canvas: Canvas, rng: SceneRandom) -> None:
    """Gabled houses and trees on lawns on both sides of a road."""
    view, asphalt, half = View.draw(rng, bend=0.06), rng.choice(ASPHALTS), rng.uniform(0.36, 0.42)
    season = canvas.daylight.season
    canvas.sky(rng, view.horizon)
    _draw_distant_trees(canvas, rng, view.horizon)
    _draw_land(canvas, view.horizon, season.grass)
    canvas.polygon(view.strip(-half - 0.1, half + 0.1), canvas.far(mix(PAPER, asphalt, 0.25), 0.4))
    _draw_road(canvas, view, half, asphalt)
    _draw_dashes(canvas, view, 0.0, rng.uniform(0.95, 1.2))
    conifer = rng.chance(0.3)
    for near, house in ((0.2, True), (0.25, False), (0.33, True), (0.42, False), (0.56, True)):
        for side in (-1, 1):
            if house:
                x, y = view.at(side * rng.jitter(half + 0.5, 0.04), 0.0, near)
                wall, roof = canvas.far(rng.choice(WALLS), near), canvas.far(rng.choice(ROOFS), near)
                canvas.house(x, y, 0.74 * near, wall, roof)
            else:
                x, y = view.at(side * rng.jitter(half + 0.2, 0.03), 0.0, near)
                leaves = canvas.far(rng.choice(season.leaves), near)
                canvas.tree(x, y, rng.jitter(0.62, 0.06) * near, leaves, conifer)


def parking_lot(canvas: Canvas, rng: SceneRandom) -> None:
    """Three rows of cars side by side in marked bays, a low store behind."""
    horizon = rng.jitter(0.45, 0.022)
    canvas.sky(rng, horizon)
    _draw_distant_trees(canvas, rng, horizon)
    left, top = rng.uniform(0.04, 0.2), horizon - rng.uniform(0.1, 0.14)
    canvas.box(left, top, left + 0.75, horizon + 0.02, canvas.far(rng.choice(WALLS), 0.3))
    canvas.box(left, top, left + 0.75, top + 0.035, canvas.far(rng.choice(CAR_COLORS), 0.3))
    canvas.box(left + 0.05, top + 0.06, left + 0.7, horizon, canvas.far(GLASS, 0.4))
    _draw_land(canvas, horizon, rng.choice(ASPHALTS))
    shift, facing_us = rng.jitter(0.0, 0.3), rng.chance(0.5)
    for row, (depth, bay, length) in enumerate(((0.1, 0.19, 0.09), (0.27, 0.265, 0.14), (0.52, 0.37, 0.2))):
        y, middle = horizon + depth, 0.5 + (shift + 0.3 * (row % 2)) * bay
        for number in range(-4, 5):
            x = middle + (number + 0.5) * bay - 0.5
            ends = ((0.94 * x, -length), (1.06 * x, 0.02))
            line = [(across - 0.03 * bay, down) for across, down in ends]
            line += [(across + 0.03 * bay, down) for across, down in reversed(ends)]
            canvas.outline(0.5, y, 1.0, line, PAPER)
        for number in range(-3, 4):
            if rng.chance(0.88):
                color, tall = canvas.far(rng.choice(CAR_COLORS), 0.3 + depth), rng.uniform(0.8, 1.4)
                canvas.car(middle + number * bay, y, 0.76 * bay, color, facing_us ^ (row == 1), tall)


def city_crossing(canvas: Canvas, rng: SceneRandom) -> None:
    """A zebra crossing before the viewer, people walking over it, big traffic signs, a street of buildings behind."""
    view, asphalt = View.draw(rng), rng.choice(ASPHALTS)
    canvas.sky(rng, view.horizon)
    _draw_land(canvas, view.horizon, PAVEMENT)
    pane = mix(GLASS, canvas.daylight.horizon, 0.25)
    for side in (-1, 1):
        for far, near in ROW:
            wall, height = canvas.far(rng.choice(WALLS), near), rng.uniform(0.85, 1.15)
            Front(view, side * 0.8, far, near).build(canvas, height, 3, wall, pane)
    _draw_road(canvas, view, 0.62, asphalt)
    canvas.box(0.0, view.horizon + 0.22, 1.0, 1.0, canvas.far(asphalt, 0.6))
    shift = rng.jitter(0.0, 0.08)
    for number in range(-5, 6):
        across = (number + shift) * 0.23
        canvas.polygon(view.strip(across - 0.06, across + 0.06, 0.5, 0.88), PAPER)
    for side in (-1, 1):
        x, height = 0.5 + side * rng.jitter(0.36, 0.03), rng.jitter(0.42, 0.03)
        canvas.traffic_sign(x, view.horizon + 0.24, height, 0.1, rng.choice(SIGN_MEANINGS))
    for place in rng.choice(((0.3, 0.66), (0.25, 0.5, 0.74))):
        x, y = place + rng.jitter(0.0, 0.06), rng.jitter(0.84, 0.04)
        canvas.pedestrian(x, y, 0.36, rng.choice(CAR_COLORS), umbrella=False)


def rural(canvas: Canvas, rng: SceneRandom) -> None:
    """A narrow road that winds through striped fields and hills, with a barn, a fence and trees."""
    horizon, side = rng.jitter(0.42, 0.02), rng.sign()
    season = canvas.daylight.season
    canvas.sky(rng, horizon)
    _draw_hills(canvas, rng, horizon, (0.16, 0.1))
    _draw_land(canvas, horizon, season.grass)
    vanish = 0.5 - side * rng.uniform(0.1, 0.2)
    crop = canvas.far(mix(rng.choice(CROPS), season.grass, 0.3), 0.6)
    for number in range(-3, 4):
        x = 0.5 + side * 0.5 + number * 0.5
        canvas.polygon([(vanish, horizon + 0.03), (x - 0.13, 1.0), (x + 0.13, 1.0)], crop)
    _draw_winding_road(canvas, rng, horizon, side)
    barn, leaves, conifer = 0.5 + side * rng.uniform(0.26, 0.34), rng.choice(season.leaves), rng.chance(0.3)
    canvas.house(barn, horizon + 0.1, 0.26, BARN_RED, rng.choice(ROOFS))
    canvas.tree(0.5 - side * rng.uniform(0.34, 0.4), horizon + 0.2, rng.uniform(0.38, 0.46), leaves, conifer)
    canvas.tree(barn + side * 0.17, horizon + 0.09, 0.2, leaves, conifer)
    wood = mix((150, 116, 96), PAPER, 0.2)
    posts = [(0.5 + side * (0.5 - 0.085 * post), 0.98 - 0.05 * post, 0.16 - 0.02 * post) for post in range(5)]
    for rail in (0.85, 0.45):
        canvas.line([(x, y - rail * height) for x, y, height in posts], 0.016, wood)
    for x, y, height in posts:
        canvas.box(x - 0.011, y - height, x + 0.011, y, wood)


def _draw_winding_road(canvas: Canvas, rng: SceneRandom, horizon: float, side: int) -> None:
    """Draw a road that swings to one side and then to the other as it comes nearer, between light verges."""
    sway, middle = rng.uniform(0.15, 0.2), rng.jitter(0.5, 0.03)
    bends = []
    for step in range(17):
        near = (step / 16) ** 1.5
        swing = side * sway * math.sin(math.tau * step / 16) * (0.35 + near)
        bends.append((middle + swing, horizon + 0.02 + near * (1.0 - horizon), 0.012 + 0.2 * near))
    verge, asphalt = mix(canvas.daylight.season.grass, PAPER, 0.6), mix(rng.choice(ASPHALTS), INK, 0.2)
    for grow, color in ((1.3, verge), (1.0, asphalt)):
        left = [(x - grow * half, y) for x, y, half in bends]
        right = [(x + grow * half, y) for x, y, half in reversed(bends)]
        canvas.polygon(left + right, color)


SCENES: dict[str, Callable[[Canvas, SceneRandom], None]] = {
    "A residential street scene with wet roads and parked cars during daytime": residential_wet,
    "An urban intersection with traffic lights and multiple vehicles": intersection,
    "A highway scene with clear lane markings and distant cars": highway,
    "A rainy street with reflections on the pavement and buildings": rainy_street,
    "A suburban road with trees and houses on both sides": suburban,
    "A parking lot scene with various parked vehicles": parking_lot,
    "A city street with pedestrian crossings and traffic signs": city_crossing,
    "A rural road with natural scenery and minimal traffic": rural,
}
PROMPTS = tuple(SCENES)
KINDS = tuple(scene.__name__ for scene in SCENES.values())

# Raise it with every change that alters an image: packed files of the old drawings then no longer match.
DRAWING_VERSION = 1
SMALLEST, LARGEST = 16, 1024


def _scene_random(kind: int, number: int, seed: int) -> SceneRandom:
    return SceneRandom((seed % 2**64, number * len(PROMPTS) + kind))


def draw_scene(kind: int, number: int, img_size: int, seed: int = 0) -> np.ndarray:
    """Draw scene `number` of a kind: uint8 [img_size, img_size, 3], the same composition at every size."""
    rng = _scene_random(kind, number, seed)
    canvas = Canvas(img_size, Daylight.draw(rng))
    SCENES[PROMPTS[kind]](canvas, rng)
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
