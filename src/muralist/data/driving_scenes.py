"""The eight driving scenes: what stands where in each, painted far to near with the things of `driving_props`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muralist.data.driving_props import (
    ASPHALTS,
    CAR_PAINTS,
    GLASS,
    INK,
    PAPER,
    ROOFS,
    SIGN_MEANINGS,
    SIGNAL_AMBER,
    WALLS,
    Canvas,
    Colour,
    Dice,
    Point,
    mix,
    paint_block,
    paint_car,
    paint_car_sideways,
    paint_house,
    paint_sign,
    paint_signal,
    paint_sky,
    paint_tree,
    paint_walker,
)

PAVEMENT: Colour = (196, 188, 184)
LAMPLIGHT: Colour = (255, 214, 130)
DUSKY: Colour = (58, 60, 92)
BARN_RED: Colour = (196, 82, 70)
CROPS: tuple[Colour, ...] = ((222, 188, 96), (160, 150, 196), (196, 170, 118), (128, 170, 96))
# Where a row of three buildings along a street begins and ends, as nearness: far ones first.
ROW = ((0.15, 0.28), (0.28, 0.5), (0.5, 1.3))


@dataclass(frozen=True)
class View:
    """A camera looking down a street: where it vanishes, how far below the eye the ground is, how the street bends."""

    vanish: float
    horizon: float
    ground: float
    bend: float

    @staticmethod
    def draw(dice: Dice, bend: float = 0.0) -> View:
        """Draw a camera; `bend` is the strongest curve of the street."""
        horizon = dice.around(0.45, 0.022)
        return View(dice.around(0.5, 0.045), horizon, 1.02 - horizon, dice.around(0.0, bend))

    def at(self, across: float, up: float, near: float) -> Point:
        """Project a point: `across` the street, `up` from the ground, at a nearness from 0 (horizon) to 1 (feet)."""
        middle = self.vanish + self.bend * (1.0 - near) ** 2
        return middle + across * near, self.horizon + (self.ground - up) * near

    def strip(self, left: float, right: float, far: float = 0.02, near: float = 1.1) -> list[Point]:
        """Outline a stretch of ground between two lines along the street."""
        steps = [far, near] if self.bend == 0.0 else [far + (near - far) * (step / 8) ** 2 for step in range(9)]
        return [self.at(left, 0.0, step) for step in steps] + [self.at(right, 0.0, step) for step in reversed(steps)]


class Front(NamedTuple):
    """The line on the ground on which a house front along the street stands."""

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

    def build(self, canvas: Canvas, height: float, storeys: int, wall: Colour, pane: Colour) -> None:
        """Paint the wall with two windows a storey; a negative height paints its reflection in the ground."""
        canvas.polygon(self.part(0.0, height), wall)
        for storey in range(storeys):
            low, high = height * (storey + 0.3) / storeys, height * (storey + 0.8) / storeys
            canvas.polygon(self.part(low, high, 0.125, 0.375), pane)
            canvas.polygon(self.part(low, high, 0.625, 0.875), pane)


def _lay_land(canvas: Canvas, horizon: float, colour: Colour) -> None:
    canvas.gradient(horizon, 1.0, canvas.far(colour, 0.0), mix(colour, INK, 0.08))


def _lay_road(canvas: Canvas, view: View, half: float, asphalt: Colour) -> None:
    """Lay a road that fades into the distance."""
    far, near = mix(asphalt, canvas.daylight.horizon, 0.6), canvas.far(asphalt, 0.7)
    canvas.gradient(view.horizon, 1.0, far, near, view.strip(-half, half))


def _paint_dashes(canvas: Canvas, view: View, across: float, start: float, colour: Colour = PAPER) -> None:
    """Paint a dashed line whose dashes have equal length on the ground, the nearest beginning at depth `start`."""
    for number in range(7):
        depth = start + 0.62 * number
        canvas.polygon(view.strip(across - 0.035, across + 0.035, 1.0 / (depth + 0.32), 1.0 / depth), colour)


def _paint_distant_trees(canvas: Canvas, dice: Dice, horizon: float) -> None:
    leaves = canvas.far(mix(dice.choose(canvas.daylight.season.leaves), INK, 0.1), 0.1)
    for number in range(7):
        x = (number + dice.roll()) / 7
        canvas.oval(x, horizon, dice.between(0.08, 0.14), dice.between(0.03, 0.07), leaves)


def _paint_hills(canvas: Canvas, dice: Dice, horizon: float, heights: Sequence[float]) -> None:
    """Paint ranges of rolling hills, far ones first."""
    for number, height in enumerate(heights):
        hill = mix(canvas.daylight.season.grass, (80, 110, 130), 0.55 - 0.25 * number)
        colour = canvas.far(hill, 0.15 + 0.3 * number)
        for _ in range(3):
            canvas.oval(dice.roll(), horizon + 0.02, dice.between(0.3, 0.5), height * dice.between(0.7, 1.3), colour)


def residential_wet(canvas: Canvas, dice: Dice) -> None:
    """Terraced houses, cars parked along both kerbs, a wet road with puddles that mirror the sky."""
    view, light, asphalt = View.draw(dice), canvas.daylight, dice.choose(ASPHALTS)
    paint_sky(canvas, dice, view.horizon)
    _lay_land(canvas, view.horizon, PAVEMENT)
    _paint_distant_trees(canvas, dice, view.horizon)
    canvas.gradient(view.horizon, 1.0, light.horizon, mix(asphalt, INK, 0.3), view.strip(-0.9, 0.9))
    for side in (-1, 1):
        height, edge, ridge = dice.between(0.72, 0.9), side * 0.86, side * 1.15
        for far, near in ROW:
            wall, roof = canvas.far(dice.choose(WALLS), near), canvas.far(dice.choose(ROOFS), near)
            front, pane = Front(view, edge, far, near), mix(GLASS, wall, 0.15)
            front.build(canvas, height, 2, wall, pane)
            front.build(canvas, -height, 2, mix(wall, asphalt, 0.65), mix(pane, asphalt, 0.4))
            top = height + 0.22
            eaves = view.at(edge, height, near), view.at(edge, height, far)
            canvas.polygon([*eaves, view.at(ridge, top, far), view.at(ridge, top, near)], roof)
        canvas.polygon(view.strip(side * 0.64, edge), canvas.far(PAVEMENT, 0.5))
    water = mix(light.zenith, light.horizon, 0.6)
    for _ in range(3):
        x, y = view.at(dice.around(0.0, 0.28), 0.0, dice.between(0.4, 0.95))
        size = (y - view.horizon) * dice.between(0.26, 0.4)
        canvas.oval(x, y, size, 0.2 * size, water)
        canvas.oval(x + 0.4 * dice.side() * size, y + 0.12 * size, 0.7 * size, 0.16 * size, water)
        canvas.oval(x, y, 0.5 * size, 0.05 * size, mix(water, PAPER, 0.4))
    for side in (-1, 1):
        facing_us = dice.chance(0.5)
        for place in (0.24, 0.4, 0.76):
            near = place * dice.around(1.0, 0.08)
            (x, y), width = view.at(side * 0.56, 0.0, near), 0.42 * near
            paint = canvas.far(dice.choose(CAR_PAINTS), near)
            canvas.box(x - 0.42 * width, y, x + 0.42 * width, y + 0.4 * width, mix(asphalt, paint, 0.45))
            paint_car(canvas, x, y, width, paint, facing_us, dice.between(0.9, 1.3))


def intersection(canvas: Canvas, dice: Dice) -> None:
    """Two streets that cross, corner buildings, an arm of traffic lights overhead, cars passing from side to side."""
    view, asphalt = View.draw(dice), dice.choose(ASPHALTS)
    paint_sky(canvas, dice, view.horizon)
    _lay_land(canvas, view.horizon, PAVEMENT)
    _paint_distant_trees(canvas, dice, view.horizon)
    for side in (-1, 1):
        inner = view.vanish + side * dice.between(0.1, 0.14)
        outer = inner + side * dice.between(0.22, 0.28)
        for ends in ((outer, 0.5 + side * 0.6), (inner, outer)):
            wall = canvas.far(dice.choose(WALLS), 0.6)
            paint_block(canvas, min(ends), max(ends), dice.between(0.14, 0.26), view.horizon + 0.07, wall)
    _lay_road(canvas, view, 0.62, asphalt)
    top, bottom = view.horizon + 0.13, view.horizon + 0.33
    canvas.box(0.0, top - 0.02, 1.0, top, PAPER)
    canvas.box(0.0, top, 1.0, bottom, canvas.far(asphalt, 0.5))
    for number in range(6):
        x, y = (number + 0.2) / 6, (top + bottom) / 2
        canvas.box(x, y - 0.008, x + 0.09, y + 0.008, SIGNAL_AMBER)
    canvas.polygon(view.strip(-0.58, 0.58, 0.63, 0.68), PAPER)
    for lane, facing in ((top + 0.07, -1), (bottom - 0.01, 1)):
        x = dice.between(0.1, 0.35)
        for _ in range(2):
            width = dice.between(0.24, 0.3)
            paint_car_sideways(canvas, x, lane, width, dice.choose(CAR_PAINTS), facing, van=dice.chance(0.3))
            x += dice.between(0.4, 0.5)
    side = dice.side()
    x, y = view.at(side * 0.27, 0.0, 0.95)
    paint_car(canvas, x, y, 0.32, dice.choose(CAR_PAINTS), front=False)
    pole, tip, steel = 0.5 + side * 0.44, 0.5 - side * 0.36, mix(INK, PAPER, 0.12)
    canvas.box(pole - 0.018, 0.06, pole + 0.018, 0.86, steel)
    canvas.box(min(pole, tip), 0.07, max(pole, tip), 0.095, steel)
    lit = dice.choose((0, 0, 1, 2, 2))
    for across in (-0.3, 0.0, 0.27):
        paint_signal(canvas, 0.5 - side * across, 0.08, 0.19, lit)


def highway(canvas: Canvas, dice: Dice) -> None:
    """A wide road of four lanes, guard rails on both sides, far hills, small distant cars."""
    view, half = View.draw(dice, bend=0.08), dice.between(1.1, 1.3)
    paint_sky(canvas, dice, view.horizon)
    _paint_hills(canvas, dice, view.horizon, (0.1, 0.055))
    _lay_land(canvas, view.horizon, canvas.daylight.season.grass)
    _lay_road(canvas, view, half, dice.choose(ASPHALTS))
    for side in (-1, 1):
        canvas.polygon(view.strip(side * half * 0.9, side * (half * 0.9 + 0.07)), SIGNAL_AMBER)
        _paint_guard_rail(canvas, view, side * (half + 0.08))
    if dice.chance(0.7):
        _paint_gantry(canvas, view, half + 0.14)
    start = dice.between(0.95, 1.2)
    for lane in (-0.45, 0.0, 0.45):
        _paint_dashes(canvas, view, lane * half, start)
    for lane in dice.choose(((-0.68, 0.22), (-0.22, 0.68), (-0.68, 0.68, 0.22), (-0.22, -0.68, 0.22))):
        near = dice.between(0.13, 0.26)
        x, y = view.at(lane * half, 0.0, near)
        paint_car(canvas, x, y, 0.42 * near, dice.choose(CAR_PAINTS), front=lane < 0, tall=dice.between(0.9, 1.6))


def _paint_guard_rail(canvas: Canvas, view: View, across: float) -> None:
    for near in (0.1, 0.14, 0.2, 0.29, 0.42, 0.62):
        x, y = view.at(across, 0.0, near)
        canvas.box(x - 0.02 * near, y - 0.2 * near, x + 0.02 * near, y, mix(INK, PAPER, 0.4))
    depths = (0.04, 0.1, 0.2, 0.4, 0.7, 1.1)
    for low, high, shade in ((0.14, 0.3, 0.08), (0.14, 0.2, 0.4)):
        top = [view.at(across, high, near) for near in depths]
        foot = [view.at(across, low, near) for near in reversed(depths)]
        canvas.polygon(top + foot, mix(PAPER, INK, shade))


def _paint_gantry(canvas: Canvas, view: View, half: float) -> None:
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


def rainy_street(canvas: Canvas, dice: Dice) -> None:
    """Tall buildings with lit windows on both sides, all mirrored in the glossy street, rain across the picture."""
    view, light = View.draw(dice), canvas.daylight
    ground = mix(dice.choose(ASPHALTS), INK, 0.35)
    paint_sky(canvas, dice, view.horizon)
    canvas.gradient(view.horizon, 1.0, light.horizon, mix(ground, light.zenith, 0.45))
    skyline = mix(light.horizon, DUSKY, 0.35)
    canvas.box(view.vanish - 0.14, view.horizon - 0.13, view.vanish + 0.14, view.horizon + 0.09, skyline)
    _paint_dashes(canvas, view, 0.0, dice.between(0.95, 1.2), mix(ground, PAPER, 0.7))
    for side in (-1, 1):
        for far, near in ROW:
            front, height = Front(view, side * 0.7, far, near), dice.between(1.6, 2.1)
            wall = canvas.far(mix(dice.choose(WALLS), DUSKY, dice.between(0.6, 0.78)), near)
            pane, shop = mix(LAMPLIGHT, wall, dice.between(0.0, 0.35)), dice.choose(CAR_PAINTS)
            front.build(canvas, height, 3, wall, pane)
            canvas.polygon(front.part(0.0, 0.2, 0.04, 0.96), mix(shop, LAMPLIGHT, 0.3))
            canvas.polygon(front.part(0.18, 0.26), mix(shop, INK, 0.3))
            front.build(canvas, -height, 3, mix(wall, ground, 0.6), mix(pane, ground, 0.35))
            canvas.polygon(front.part(0.0, -0.36), mix(shop, ground, 0.4))
        canvas.polygon(view.strip(side * 0.6, side * 0.7, 0.05), mix(ground, PAPER, 0.45))
    for side in (-1, 1):
        x, y = view.at(side * dice.between(0.06, 0.4), 0.0, dice.between(0.4, 0.6))
        coat = dice.choose(CAR_PAINTS)
        canvas.box(x - 0.03, y, x + 0.03, y + 0.2, mix(ground, coat, 0.5))
        paint_walker(canvas, x, y, 0.26, coat, umbrella=True)
    slant, streak = dice.side() * dice.between(0.16, 0.4), mix(light.horizon, PAPER, 0.5)
    for number in range(26):
        x, y, length = (number + dice.roll()) / 26, dice.between(-0.05, 0.9), dice.between(0.1, 0.2)
        canvas.stroke([(x, y), (x + slant * length, y + length)], 0.006, streak)


def suburban(canvas: Canvas, dice: Dice) -> None:
    """Gabled houses and trees on lawns on both sides of a road."""
    view, asphalt, half = View.draw(dice, bend=0.06), dice.choose(ASPHALTS), dice.between(0.36, 0.42)
    season = canvas.daylight.season
    paint_sky(canvas, dice, view.horizon)
    _paint_distant_trees(canvas, dice, view.horizon)
    _lay_land(canvas, view.horizon, season.grass)
    canvas.polygon(view.strip(-half - 0.1, half + 0.1), canvas.far(mix(PAPER, asphalt, 0.25), 0.4))
    _lay_road(canvas, view, half, asphalt)
    _paint_dashes(canvas, view, 0.0, dice.between(0.95, 1.2))
    conifer = dice.chance(0.3)
    for near, house in ((0.2, True), (0.25, False), (0.33, True), (0.42, False), (0.56, True)):
        for side in (-1, 1):
            if house:
                x, y = view.at(side * dice.around(half + 0.5, 0.04), 0.0, near)
                wall, roof = canvas.far(dice.choose(WALLS), near), canvas.far(dice.choose(ROOFS), near)
                paint_house(canvas, x, y, 0.74 * near, wall, roof)
            else:
                x, y = view.at(side * dice.around(half + 0.2, 0.03), 0.0, near)
                leaves = canvas.far(dice.choose(season.leaves), near)
                paint_tree(canvas, x, y, dice.around(0.62, 0.06) * near, leaves, conifer)


def parking_lot(canvas: Canvas, dice: Dice) -> None:
    """Three rows of cars side by side in painted bays, a low store behind."""
    horizon = dice.around(0.45, 0.022)
    paint_sky(canvas, dice, horizon)
    _paint_distant_trees(canvas, dice, horizon)
    left, top = dice.between(0.04, 0.2), horizon - dice.between(0.1, 0.14)
    canvas.box(left, top, left + 0.75, horizon + 0.02, canvas.far(dice.choose(WALLS), 0.3))
    canvas.box(left, top, left + 0.75, top + 0.035, canvas.far(dice.choose(CAR_PAINTS), 0.3))
    canvas.box(left + 0.05, top + 0.06, left + 0.7, horizon, canvas.far(GLASS, 0.4))
    _lay_land(canvas, horizon, dice.choose(ASPHALTS))
    shift, facing_us = dice.around(0.0, 0.3), dice.chance(0.5)
    for row, (depth, bay, length) in enumerate(((0.1, 0.19, 0.09), (0.27, 0.265, 0.14), (0.52, 0.37, 0.2))):
        y, middle = horizon + depth, 0.5 + (shift + 0.3 * (row % 2)) * bay
        for number in range(-4, 5):
            x = middle + (number + 0.5) * bay - 0.5
            ends = ((0.94 * x, -length), (1.06 * x, 0.02))
            line = [(across - 0.03 * bay, down) for across, down in ends]
            line += [(across + 0.03 * bay, down) for across, down in reversed(ends)]
            canvas.shape(0.5, y, 1.0, line, PAPER)
        for number in range(-3, 4):
            if dice.chance(0.88):
                paint, tall = canvas.far(dice.choose(CAR_PAINTS), 0.3 + depth), dice.between(0.8, 1.4)
                paint_car(canvas, middle + number * bay, y, 0.76 * bay, paint, facing_us ^ (row == 1), tall)


def city_crossing(canvas: Canvas, dice: Dice) -> None:
    """A zebra crossing before the viewer, people walking over it, big traffic signs, a street of buildings behind."""
    view, asphalt = View.draw(dice), dice.choose(ASPHALTS)
    paint_sky(canvas, dice, view.horizon)
    _lay_land(canvas, view.horizon, PAVEMENT)
    pane = mix(GLASS, canvas.daylight.horizon, 0.25)
    for side in (-1, 1):
        for far, near in ROW:
            wall, height = canvas.far(dice.choose(WALLS), near), dice.between(0.85, 1.15)
            Front(view, side * 0.8, far, near).build(canvas, height, 3, wall, pane)
    _lay_road(canvas, view, 0.62, asphalt)
    canvas.box(0.0, view.horizon + 0.22, 1.0, 1.0, canvas.far(asphalt, 0.6))
    shift = dice.around(0.0, 0.08)
    for number in range(-5, 6):
        across = (number + shift) * 0.23
        canvas.polygon(view.strip(across - 0.06, across + 0.06, 0.5, 0.88), PAPER)
    for side in (-1, 1):
        x, height = 0.5 + side * dice.around(0.36, 0.03), dice.around(0.42, 0.03)
        paint_sign(canvas, x, view.horizon + 0.24, height, 0.1, dice.choose(SIGN_MEANINGS))
    for place in dice.choose(((0.3, 0.66), (0.25, 0.5, 0.74))):
        x, y = place + dice.around(0.0, 0.06), dice.around(0.84, 0.04)
        paint_walker(canvas, x, y, 0.36, dice.choose(CAR_PAINTS), umbrella=False)


def rural(canvas: Canvas, dice: Dice) -> None:
    """A narrow road that winds through striped fields and hills, with a barn, a fence and trees."""
    horizon, side = dice.around(0.42, 0.02), dice.side()
    season = canvas.daylight.season
    paint_sky(canvas, dice, horizon)
    _paint_hills(canvas, dice, horizon, (0.16, 0.1))
    _lay_land(canvas, horizon, season.grass)
    vanish = 0.5 - side * dice.between(0.1, 0.2)
    crop = canvas.far(mix(dice.choose(CROPS), season.grass, 0.3), 0.6)
    for number in range(-3, 4):
        x = 0.5 + side * 0.5 + number * 0.5
        canvas.polygon([(vanish, horizon + 0.03), (x - 0.13, 1.0), (x + 0.13, 1.0)], crop)
    _paint_winding_road(canvas, dice, horizon, side)
    barn, leaves, conifer = 0.5 + side * dice.between(0.26, 0.34), dice.choose(season.leaves), dice.chance(0.3)
    paint_house(canvas, barn, horizon + 0.1, 0.26, BARN_RED, dice.choose(ROOFS))
    paint_tree(canvas, 0.5 - side * dice.between(0.34, 0.4), horizon + 0.2, dice.between(0.38, 0.46), leaves, conifer)
    paint_tree(canvas, barn + side * 0.17, horizon + 0.09, 0.2, leaves, conifer)
    wood = mix((150, 116, 96), PAPER, 0.2)
    posts = [(0.5 + side * (0.5 - 0.085 * post), 0.98 - 0.05 * post, 0.16 - 0.02 * post) for post in range(5)]
    for rail in (0.85, 0.45):
        canvas.stroke([(x, y - rail * height) for x, y, height in posts], 0.016, wood)
    for x, y, height in posts:
        canvas.box(x - 0.011, y - height, x + 0.011, y, wood)


def _paint_winding_road(canvas: Canvas, dice: Dice, horizon: float, side: int) -> None:
    """Paint a road that swings to one side and then to the other as it comes nearer, between light verges."""
    sway, middle = dice.between(0.15, 0.2), dice.around(0.5, 0.03)
    bends = []
    for step in range(17):
        near = (step / 16) ** 1.5
        swing = side * sway * math.sin(math.tau * step / 16) * (0.35 + near)
        bends.append((middle + swing, horizon + 0.02 + near * (1.0 - horizon), 0.012 + 0.2 * near))
    verge, asphalt = mix(canvas.daylight.season.grass, PAPER, 0.6), mix(dice.choose(ASPHALTS), INK, 0.2)
    for grow, colour in ((1.3, verge), (1.0, asphalt)):
        left = [(x - grow * half, y) for x, y, half in bends]
        right = [(x + grow * half, y) for x, y, half in reversed(bends)]
        canvas.polygon(left + right, colour)


SCENES: dict[str, Callable[[Canvas, Dice], None]] = {
    "residential_wet": residential_wet,
    "intersection": intersection,
    "highway": highway,
    "rainy_street": rainy_street,
    "suburban": suburban,
    "parking_lot": parking_lot,
    "city_crossing": city_crossing,
    "rural": rural,
}
