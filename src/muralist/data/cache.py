"""Keeps a small data set's pictures in memory once they were read, so that none is decoded or drawn twice."""

from __future__ import annotations

from muralist.data.images import Size, height_width
from muralist.data.item import Item
from muralist.data.sources import Source

_MOST_BYTES = 1 << 30


class CachedSource:
    """A source that remembers what it has read."""

    def __init__(self, source: Source) -> None:
        self.source, self.label_names = source, source.label_names
        self._items: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Item:
        """Return picture `index`, from memory if it was read before."""
        if index not in self._items:
            self._items[index] = self.source.read(index)
        return self._items[index]

    def fingerprint(self) -> str:
        """Return that of the source itself."""
        return self.source.fingerprint()


def cached(source: Source, samples: int, img_size: Size, workers: int) -> Source:
    """The source, remembered if it is small and this process reads it itself; loader processes would each keep a copy."""
    height, width = height_width(img_size)
    if workers or samples * height * width * 3 > _MOST_BYTES or hasattr(source, "read_batch"):
        return source
    return CachedSource(source)
