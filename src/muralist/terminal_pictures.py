"""Pictures in a terminal: whole ones where it takes them (kitty, iTerm2 and their kind), else coloured half blocks."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Literal

import numpy as np
from PIL import Image

Ability = Literal["kitty", "iterm", "blocks", "none"]
_PAYLOAD = 4096  # bytes of one escape sequence of kitty's protocol
_LONGEST_SIDE = 2000  # pixels; a terminal shows no more


def ability(environment: Mapping[str, str]) -> Ability:
    """What the terminal of this environment can draw; a multiplexer passes on nothing but text."""
    program, kind = environment.get("TERM_PROGRAM", ""), environment.get("TERM", "")
    if not kind or kind == "dumb":
        return "none"
    if not environment.get("TMUX") and not kind.startswith(("screen", "tmux")):
        if environment.get("KITTY_WINDOW_ID") or kind in ("xterm-kitty", "xterm-ghostty"):
            return "kitty"
        if program in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
            return "iterm"
    colours = environment.get("COLORTERM", "") in ("truecolor", "24bit") or "256color" in kind
    return "blocks" if colours else "none"


def drawn(image: Image.Image, columns: int, rows: int, way: Ability) -> str:
    """The text that makes a terminal of this size show a picture."""
    if way == "none":
        return ""
    if way == "blocks":
        return half_blocks(image, columns, rows)
    small = image.convert("RGB")
    small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    # A cell is about twice as high as wide: whichever side is short decides.
    height = min(rows, max(1, round(columns * small.height / small.width / 2)))
    if way == "iterm":
        return f"\x1b]1337;File=inline=1;height={height};preserveAspectRatio=1:{data}\x07\n"
    parts = [data[start : start + _PAYLOAD] for start in range(0, len(data), _PAYLOAD)]
    told = [f"a=T,f=100,r={height},m={int(len(parts) > 1)}"]
    told += [f"m={int(number < len(parts) - 1)}" for number in range(1, len(parts))]
    return "".join(f"\x1b_G{word};{part}\x1b\\" for word, part in zip(told, parts, strict=True)) + "\n"


def half_blocks(image: Image.Image, columns: int, rows: int) -> str:
    """Two pixels to a character: its colour is the upper one, its background the lower one."""
    scale = min(columns / image.width, 2 * rows / image.height)
    size = (max(1, round(image.width * scale)), max(2, 2 * round(image.height * scale / 2)))
    pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in zip(upper, lower, strict=True)
        )
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines) + "\n"
