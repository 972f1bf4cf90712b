"""Pictures of a data set as what features are computed of: those that training sees, cropped to its size."""

from __future__ import annotations

import hashlib
import io
import threading
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

from muralist.data.sources import Source, open_source

_READING = threading.Lock()  # pictures are prepared in threads, and a source has files open


@dataclass(frozen=True)
class DataPicture:
    """One picture of a data set."""

    data_path: str
    img_size: int
    index: int

    def __str__(self) -> str:
        return f"image {self.index} of {self.data_path}"

    def file(self) -> bytes:
        """The picture as a file, of a kind that takes no time to write."""
        with _READING:
            pixels = _source(self.data_path, self.img_size).read(self.index).image
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "BMP")
        return buffer.getvalue()


def data_pictures(data_path: str, img_size: int, most: int | None) -> list[tuple[bytes, DataPicture]]:
    """The first pictures of a data set, or all, each with a key that changes when the data do."""
    source = _source(data_path, img_size)
    count = min(len(source), most or len(source))
    pictures = [DataPicture(data_path, img_size, index) for index in range(count)]
    mark = f"{source.fingerprint()}/{img_size}"
    return [(hashlib.sha256(f"{mark}/{picture.index}".encode()).digest(), picture) for picture in pictures]


@lru_cache(maxsize=1)
def _source(data_path: str, img_size: int) -> Source:
    return open_source(data_path, img_size)
