"""Images per second of FID's features in each precision, and of each stage alone.

python bench/fid_speed.py NAME --weights W [--cifar cifar10_subset_u8.npz] [--count 8000]

With --cifar, the FIDs of the file fid_reference.json beside it are computed in each precision too. The result is written
after every step. `bench/standard.py` compares the rate with pytorch-fid's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDES = (256, 32)
PRECISIONS = {"float32": False, "TF32": True}
UNFUSED = "bias and ReLU apart"
_WARM = 0.2  # of the images, before the measurement starts
_ONE_SHAPE = 64
_AHEAD = 6


def ours(paths: list[Path], weights: Path, folder: Path, precision: str) -> tuple[dict[str, Any], np.ndarray]:
    """Measure the complete command, and its rate once everything is loaded."""
    from muralist.core.hardware import select_devices
    from muralist.evaluate.encoders import InceptionEncoder
    from muralist.evaluate.features import compute_features, hash_files

    begun = time.perf_counter()
    items = hash_files(paths)
    hashed = time.perf_counter()
    marks: list[tuple[float, int]] = []
    encoder = InceptionEncoder.from_file(weights, PRECISIONS[precision])
    found = compute_features(
        encoder,
        items,
        select_devices(()),
        folder,
        progress=lambda done, total: marks.append((time.perf_counter(), done)),
    )
    ended = time.perf_counter()
    warm = next(mark for mark in marks if mark[1] >= _WARM * len(paths))
    rate = (marks[-1][1] - warm[1]) / (marks[-1][0] - warm[0])
    return {
        "images/s, warm": round(rate, 1),
        "images/s, with hashing, loading and reading back": round(len(paths) / (ended - begun), 1),
        "seconds": {"hashing": round(hashed - begun, 2), "until warm": round(warm[0] - hashed, 2),
                    "after the last batch": round(ended - marks[-1][0], 2), "all": round(ended - begun, 2)},
    }, found.rows  # fmt: skip


def parts(paths: list[Path]) -> dict[str, Any]:
    """Measure each stage alone, in images per second: the slowest one limits the rest."""
    import torch

    from muralist.core.hardware import available_cpus
    from muralist.evaluate import inception
    from muralist.evaluate.decoders import DecoderPool
    from muralist.evaluate.features import hash_files

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = hash_files(paths)
    batches = [wanted[start : start + _ONE_SHAPE] for start in range(0, len(wanted), _ONE_SHAPE)]
    with DecoderPool(available_cpus(), _AHEAD) as decoders:
        _receive(decoders, batches)  # until all of them have started
        begun, used = time.perf_counter(), time.process_time()
        pixels = _receive(decoders, batches)
        seconds, busy = time.perf_counter() - begun, time.process_time() - used
    found: dict[str, Any] = {
        f"decoding in {available_cpus()} processes": round(len(wanted) / seconds, 1),
        "us of the receiving process per image": round(busy / len(wanted) * 1e6, 1),
    }
    first = list(pixels)
    with torch.inference_mode():
        found["copying and resizing"] = round(
            _rate(lambda: inception.preprocess_batch(first, device), len(first), device), 1
        )
    return found


def _receive(decoders: Any, batches: list[Any]) -> Any:
    """Receive all batches, and return the pixels of the last one."""
    import torch

    height, width = batches[0][0].shape
    pixels = torch.empty(_ONE_SHAPE, height, width, 3, dtype=torch.uint8)
    pending: list[Any] = []
    for number in range(len(batches) + _AHEAD):
        if number >= _AHEAD:
            done = pending.pop(0)
            rows = done.rows()
            torch.stack(rows, out=pixels[: len(rows)])
            done.release()
        if number < len(batches):
            pending.append(decoders.decode(batches[number]))
    return pixels


def networks(weights: Path) -> dict[str, Any]:
    """Measure the network alone, and its difference from float32 with separate batch norms."""
    import torch

    from muralist.evaluate import inception
    from muralist.evaluate.inception import load_inception

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    small = np.random.default_rng(0).integers(0, 256, (_ONE_SHAPE, 32, 32, 3), dtype=np.uint8)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        inputs = inception.preprocess(torch.from_numpy(small).to(device))
        with _convolving(tf32=False):
            exact = load_inception(weights).to(device)(inputs)

        def measure_network(name: str, network: Any, tf32: bool) -> None:
            def compute(batch: Any) -> Any:
                with _convolving(tf32):
                    return network(batch.contiguous(memory_format=torch.channels_last)).clone()

            off = (compute(inputs) - exact).abs()
            relative = off.square().mean().sqrt() / exact.square().mean().sqrt()
            found[name] = {
                "images/s": round(_rate(partial(compute, inputs), len(inputs), device), 1),
                "largest difference of a feature": float(off.max()),
                "relative to the root of their mean square": float(relative),
                "equal at another position of the batch": torch.equal(
                    compute(inputs.roll(1, 0)), compute(inputs).roll(1, 0)
                ),
            }
            print(name, json.dumps(found[name]), flush=True)

        network = inception.fold_batch_norms(load_inception(weights)).to(device)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        measure_network(f"TF32, {UNFUSED}", network, True)
        inception.set_fused(network, device.type == "cuda")
        for precision, tf32 in PRECISIONS.items():
            measure_network(precision, network, tf32)
    return found


def _convolving(tf32: bool) -> Any:
    import torch

    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32)


def _rate(work: Callable[[], Any], images: int, device: Any) -> float:
    import torch

    repeats = 20 if device.type == "cuda" else 1

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return repeats * images / (time.perf_counter() - begun)


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Return the FID of two sets of features."""
    from muralist.evaluate.metrics import compute_moments, frechet_distance

    return float(frechet_distance(compute_moments(one), compute_moments(two), one, two).value)


def on_cifar(npz: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Return the FIDs of the pairs that pytorch-fid has computed."""
    held = np.load(npz, allow_pickle=False)
    train = held["train_x"][1000:1500]
    sets = {"train[1000:1500]": train, "test[500:1000]": held["test_x"][500:1000], "255-train[1000:1500]": 255 - train}
    paths = []
    for name, images in sets.items():
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(images):
            paths.append(folder / name / f"{number:04d}.png")
            Image.fromarray(image).save(paths[-1])
    expected = json.loads((npz.parent / "fid_reference.json").read_text())
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        rows = ours(paths, weights, folder / f"features {precision}", precision)[1].reshape(3, 500, -1)
        by_name = dict(zip(sets, rows, strict=True))
        for pair in ("train[1000:1500] vs test[500:1000]", "train[1000:1500] vs 255-train[1000:1500]"):
            one, two = pair.split(" vs ")
            value = distance(by_name[one], by_name[two])
            result = {"fid": round(value, 5), "minus pytorch-fid's": round(value - expected[pair], 5)}
            found.setdefault(pair, {})[precision] = result
    return found


def measure(side: int, arguments: argparse.Namespace, result: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measure one image size in every precision."""
    from bench.standard import write_image

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "images").mkdir()
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            write = partial(write_image, folder / "images", side)
            list(pool.map(write, range(arguments.count), chunksize=50))
        paths = sorted((folder / "images").iterdir())
        half = len(paths) // 2
        result["bytes of a file"] = round(sum(path.stat().st_size for path in paths) / len(paths))
        result["parts alone, images/s"] = parts(paths)
        keep()
        exact, fid = None, 0.0
        for precision in PRECISIONS:
            found, rows = ours(paths, arguments.weights, folder / f"features {precision}", precision)
            value = distance(rows[:half], rows[half:])
            if exact is None:
                exact, fid = rows, value
            found["FID of two halves, change"] = value - fid
            found["largest difference of a feature"] = float(np.abs(rows - exact).max())
            result[f"muralist, {precision}"] = found
            keep()


def main() -> None:
    """Measure every size and write the result."""
    from bench.measure_training import RESULTS, hardware, versions

    from muralist.core.hardware import available_cpus
    from muralist.core.run_dir import atomic_write_json
    from muralist.data import decode

    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--count", type=int, default=8000)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    content = {
        "command": "python bench/fid_speed.py " + " ".join(sys.argv[1:]),
        "hardware": hardware() | {"cores": available_cpus()},
        "versions": versions(),
        "decoded by": "ISA-L and libspng" if decode.HAS_FAST_PNG else "Pillow",
        "results": results,
    }

    def keep() -> None:
        atomic_write_json(RESULTS / f"fid_speed_{arguments.name}.json", content)

    results["network alone"] = networks(arguments.weights)
    keep()
    for side in SIDES:
        measure(side, arguments, results.setdefault(f"{side} px", {}), keep)
        keep()
        print(side, json.dumps(results[f"{side} px"], indent=1), flush=True)
    if arguments.cifar:
        with tempfile.TemporaryDirectory() as folder:
            results["FID on CIFAR-10"] = on_cifar(arguments.cifar, arguments.weights, Path(folder))
        print(json.dumps(results["FID on CIFAR-10"], indent=1), flush=True)
        keep()


if __name__ == "__main__":
    main()
