"""The driving scenes as an .npz like that of bench/cifar10_data.py: a set on which bench/speedrun.py's recipe was not tuned.

python bench/scenes_data.py scenes.npz --side 64
python bench/speedrun.py RECORD.json --data scenes.npz --recipe best official ...

train_x and train_y are the first images of driving_world, test_x and test_y the last TESTS, all uint8.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from muralist.core.hardware import available_cpus
from muralist.core.run_dir import atomic_open
from muralist.data.sources import open_source

TESTS, AT_ONCE = 4500, 250


def draw(side: int, indices: range) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels."""
    source = open_source("driving_world", side, None, [])
    samples = [source.read(index) for index in indices]
    return np.stack([one.image for one in samples]), np.array([one.label for one in samples], dtype=np.uint8)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--images", type=int, help="use only the first so many; default: all")
    options = parser.parse_args()
    count = options.images or len(open_source("driving_world", options.side, None, []))
    tests = min(TESTS, count // 5)
    parts = [range(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE)]
    with ProcessPoolExecutor(available_cpus()) as pool:
        images, labels = map(np.concatenate, zip(*pool.map(partial(draw, options.side), parts), strict=True))
    split = count - tests
    with atomic_open(options.output) as file:
        np.savez(file, train_x=images[:split], train_y=labels[:split], test_x=images[split:], test_y=labels[split:])
    print(
        f"{options.output}: {split:,} training and {tests:,} test images of {options.side} px, {labels.max() + 1} classes"
    )


if __name__ == "__main__":
    main()
