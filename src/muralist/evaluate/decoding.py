"""Pictures decoded in processes of their own: many cores feed one GPU; the threads of one process share an interpreter.

The process that wants pictures writes a line of JSON: a file in memory that both have open, and of some pictures the path,
the hash, and where in that file their pixels go. The other puts them there and answers with a line that says of each how
large it is, or why there is none. Nothing heavy is imported here, so that a process starts in a moment; its end is that of
its input, so that none outlives whoever started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from muralist.data.fast_png import plain_png
from muralist.data.images import BrokenImage, decode, read_image_file
from muralist.errors import UserError


def unchanged(path: Path, key: bytes) -> bytes:
    """The bytes of a file: those that were hashed, or features would be kept under another's name."""
    data = read_image_file(path)
    if hashlib.sha256(data).digest() != key:
        raise UserError(
            f"The image {path} changed while it was evaluated.",
            "Something still writes into its folder.",
            "Run the same command again when that is done: it computes only what is missing.",
        )
    return data


def decoded(data: bytes) -> np.ndarray:
    """Pixels of a picture's file, uint8 [H, W, 3], or `BrokenImage`."""
    found = plain_png(data)
    return np.array(decode(data)) if found is None else found


def place(memory: int, pixels: np.ndarray, start: int) -> None:
    """Put pixels into a file."""
    view = np.ascontiguousarray(pixels).reshape(-1).data
    while view:
        written = os.pwrite(memory, view, start)
        view, start = view[written:], start + written


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until no more requests come."""
    for line in requests:
        told: list[Any] = []
        memory, pictures = json.loads(line)
        for path, key, start, size in pictures:
            try:
                pixels = decoded(unchanged(Path(path), bytes.fromhex(key)))
                if pixels.nbytes == size:  # else its header told something else, and its place is none
                    place(memory, pixels, start)
                told.append(pixels.shape[:2])
            except BrokenImage as error:
                told.append(error.reason)
            except UserError as error:
                told.append({"what": error.what, "why": error.why, "fix": error.fix})
        answers.write(json.dumps(told).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for whoever started this
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(1)  # who is gone; Python itself would try to write once more, and complain
