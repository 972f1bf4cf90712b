"""Files that only grow, read a part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from muralist.board.root import open_plain

_PART = 4 << 20
_REMEMBERED = 256


class Tail:
    """The whole lines that were added to a file since the last time; notices when it became another file."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.size = path, 0, 0
        self._last = b""  # the end of what was read: it must still stand there

    def is_same(self) -> bool:
        """Whether what was read before still is how the file begins; a run that resumes cuts its files back."""
        try:
            with open_plain(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
                file.seek(max(0, self.offset - len(self._last)))
                return file.read(len(self._last)) == self._last
        except OSError:
            self.size = 0
            return self.offset == 0

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """Some whole lines at a time, each part with its place in the file."""
        try:
            file = open_plain(self.path)
        except OSError:
            return
        with file:
            self.size = os.fstat(file.fileno()).st_size
            wanted = _PART
            while self.offset < self.size:
                file.seek(self.offset)
                data = file.read(wanted)
                whole = data.rfind(b"\n") + 1
                if not whole:
                    if len(data) < wanted:
                        return  # the last line is still being written
                    wanted *= 2
                    continue
                place, self.offset = self.offset, self.offset + whole
                self._last = data[max(0, whole - _REMEMBERED) : whole]
                yield place, data[:whole]


def last_line(path: Path, most: int = 8192) -> bytes:
    """The last whole line of a file; empty where there is none."""
    return (last_text(path, most).rpartition(b"\n")[0]).rpartition(b"\n")[2]


def last_text(path: Path, most: int) -> bytes:
    """The end of a file."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most)
    except OSError:
        return b""


def lines_across(path: Path, count: int, longest: int = 2048) -> list[bytes]:
    """Some lines evenly spread over a file, whatever its length; a seek for each and no more."""
    found: list[bytes] = []
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            for number in range(count):
                place = size * number // count
                file.seek(max(0, place - 1))
                data = file.read(longest)
                begin = 0 if place == 0 else data.find(b"\n") + 1
                line, end, _ = data[begin:].partition(b"\n")
                if end and line and (begin or place == 0) and (not found or line != found[-1]):
                    found.append(line)
    except OSError:
        pass
    return found
