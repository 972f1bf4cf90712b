"""Several data sets as one: all pictures of the first, then all of the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from muralist.data.fields import short_hash
from muralist.data.item import Item

if TYPE_CHECKING:
    from muralist.data.sources import Source


class SeveralSources:
    """Data sets one after the other; they have classes if all of them have the same."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        names = self.sources[0].label_names
        # A class has one number: where the names differ, a number would mean something else in each part.
        self.label_names = names if all(source.label_names == names for source in self.sources) else []
        self._starts = np.cumsum([0, *map(len, self.sources)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, index: int) -> Item:
        """Return picture `index`, counted through all of them."""
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        item = self.sources[part].read(index - int(self._starts[part]))
        return item if self.label_names else item._replace(label=0)

    def fingerprint(self) -> str:
        """Hash the fingerprints, in their order."""
        return short_hash("several", *(source.fingerprint() for source in self.sources))
