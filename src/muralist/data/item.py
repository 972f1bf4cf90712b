"""What a data source hands out: one picture, already of the size asked for, with its label and caption."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Item(NamedTuple):
    """One picture: uint8 [H, W, 3], its class (0 when the source has none) and its caption ("" when none)."""

    image: np.ndarray
    label: int
    caption: str
