"""CPU time of decoding and encoding PNG files: Pillow, `muralist[fast]`, and compression levels.

python bench/png_speed.py RECORD.json [--count 200]
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.standard import conditions, write_image

from muralist.data.decode import decode_pixels, decode_png_fast

LEVELS = (1, 3, 6)
SIDES = (256, 32)
ENCODED_SIDE = 1024


def cpu_seconds(work: Callable[[Any], Any], inputs: list[Any]) -> float:
    """Return the CPU seconds per input, the faster of two passes."""
    passes = []
    for _ in range(2):
        begun = time.process_time()
        for each in inputs:
            work(each)
        passes.append((time.process_time() - begun) / len(inputs))
    return min(passes)


def decoding(side: int, count: int) -> dict[str, float]:
    """Return the microseconds of decoding a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            write_image(Path(folder), side, number)
        files = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    pillow = cpu_seconds(lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), files)
    found = {"Pillow, us": round(1e6 * pillow, 1)}
    if decode_png_fast(files[0]) is not None:
        found["muralist[fast], us"] = round(1e6 * cpu_seconds(decode_pixels, files), 1)
    return found


def encoding(count: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and bytes of encoding an image with each compression level."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            write_image(Path(folder), ENCODED_SIDE, number)
        images = [Image.open(path).convert("RGB") for path in sorted(Path(folder).iterdir())]
    found = {}
    for level in LEVELS:
        sizes: list[int] = []

        def encode(image: Image.Image, level: int = level, sizes: list[int] = sizes) -> None:
            file = io.BytesIO()
            image.save(file, "PNG", compress_level=level)
            sizes.append(file.tell())

        milliseconds = 1e3 * cpu_seconds(encode, images)
        found[f"level {level}"] = {"ms": round(milliseconds, 1), "bytes": round(sum(sizes) / len(sizes))}
    return found


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    content = conditions(None) | {"command": " ".join(["python", "bench/png_speed.py", *sys.argv[1:]])}
    content["decoding, CPU time"] = {f"{side} px": decoding(side, options.count) for side in SIDES}
    content[f"encoding {ENCODED_SIDE} px, CPU time"] = encoding(max(1, options.count // 10))
    options.record.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
