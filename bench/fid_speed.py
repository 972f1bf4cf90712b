"""How many pictures a second FID's features are computed of, where the time goes, and pytorch-fid's own loop beside it.

python bench/fid_speed.py NAME --weights W [--reference_package FOLDER] [--cifar cifar10_subset_u8.npz] [--count 5000]
                               [--compiled]

FOLDER holds the package pytorch_fid (the `src` of its repository); it needs torchvision and SciPy. With --cifar, the FIDs of
shared/data/fid_reference.json are computed as well, in full float32 and in TF32, to see how far they are apart.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import platform
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
_WARM = 0.2  # of the pictures, before the clock runs
_REFERENCE_BATCH, _REFERENCE_WORKERS = 50, 8  # pytorch-fid's own defaults
_ONE_SHAPE = 64


def write_picture(folder: Path, side: int, number: int) -> None:
    """A PNG as hard to decode as a photograph: soft shapes and a little noise."""
    random = np.random.default_rng((side, number))
    soft = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side), Image.BICUBIC)
    noisy = np.asarray(soft, np.float32) + random.normal(0, 5, (side, side, 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:06d}.png")


def ours(paths: list[Path], weights: Path, folder: Path, tf32: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Images a second of the whole command's work, and of its last part, when everything is loaded."""
    from muralist.evaluate.extractors import InceptionFeatures
    from muralist.evaluate.features import compute, hash_files
    from muralist.machine import choose_devices

    begun = time.perf_counter()
    items = hash_files(paths)
    hashed = time.perf_counter()
    marks: list[tuple[float, int]] = []
    extractor = InceptionFeatures.of(weights, tf32)
    found = compute(
        extractor, items, choose_devices(()), folder, lambda done, total: marks.append((time.perf_counter(), done))
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


def parts(paths: list[Path], weights: Path, compiled: bool) -> dict[str, float]:
    """Images a second of each part by itself: the slowest one decides."""
    import torch

    from muralist.evaluate import inception
    from muralist.evaluate.decoders import Decoders
    from muralist.evaluate.features import hash_files
    from muralist.machine import usable_cores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    items = hash_files(paths)
    wanted = [(path, item.key) for path, item in zip(paths, items, strict=True)]
    with Decoders(usable_cores()) as decoders:
        first = [row for part in decoders.decode(wanted[:_ONE_SHAPE]) for row in part.result()]
        begun = time.perf_counter()
        for part in decoders.decode(wanted):
            part.result()
        found = {f"decoding in {usable_cores()} processes": len(wanted) / (time.perf_counter() - begun)}
    pixels = [row for row in first if not isinstance(row, str)]
    with torch.inference_mode():
        found["copying and resizing"] = _rate(lambda: inception.resized(pixels, device), len(pixels), device)
        found |= networks(inception.resized(pixels, device), weights, compiled)
    return {name: round(value, 1) for name, value in found.items()}


def networks(inputs: Any, weights: Path, compiled: bool) -> dict[str, float]:
    """Images a second of the network alone, by layout, precision, number at once, and where it is asked for compiled."""
    import torch

    from muralist.evaluate.inception import fold_norms
    from muralist.evaluate.inception_weights import load_inception

    device, found = inputs.device, {}
    for layout in (torch.channels_last, torch.contiguous_format):
        network = fold_norms(load_inception(weights)).to(device).to(memory_format=layout)  # type: ignore[call-overload]
        ways = {"": network}
        if compiled:
            ways["compiled, "] = torch.compile(network)
        for way, run in ways.items():
            for times in (1, 4) if device.type == "cuda" else (1,):
                batch = inputs.repeat(times, 1, 1, 1).contiguous(memory_format=layout)
                for tf32 in (False, True):
                    name = f"network, {way}{layout}, {len(batch)} at once, {'TF32' if tf32 else 'float32'}"
                    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
                        found[name.replace("torch.", "")] = _rate(partial(run, batch), len(batch), device)
    return found


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


def reference(paths: list[Path], weights: Path, package: Path) -> tuple[dict[str, Any], np.ndarray]:
    """pytorch-fid's own loop with the same weights, after a first call that warms it up."""
    import torch

    from muralist.evaluate.inception_weights import load_inception
    from muralist.machine import usable_cores

    sys.path.insert(0, str(package))
    from pytorch_fid import fid_score
    from pytorch_fid import inception as theirs

    classifier = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    tensors = {**load_inception(weights).state_dict(), **classifier}
    theirs.load_state_dict_from_url = lambda *_, **__: tensors  # it would be fetched from the network
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = theirs.InceptionV3([theirs.InceptionV3.BLOCK_INDEX_BY_DIM[2048]]).to(device)
    workers = min(_REFERENCE_WORKERS, usable_cores())
    more = {"num_workers": workers} if "num_workers" in inspect.signature(fid_score.get_activations).parameters else {}

    def activations(some: list[Path]) -> np.ndarray:
        return fid_score.get_activations(some, model, _REFERENCE_BATCH, 2048, device, **more)

    activations(paths[: int(_WARM * len(paths))])
    begun = time.perf_counter()
    found = activations(paths)
    rate = len(paths) / (time.perf_counter() - begun)
    return {"images/s, warm": round(rate, 1), "batch": _REFERENCE_BATCH, "workers": workers}, found


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """FID of two sets of features."""
    from muralist.evaluate.metrics import frechet, moments

    return float(frechet(moments(one), moments(two), one, two).value)


def on_cifar(npz: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """FIDs of the pairs whose value by pytorch-fid is known."""
    held = np.load(npz, allow_pickle=False)
    train = held["train_x"][1000:1500]
    sets = {"train[1000:1500]": train, "test[500:1000]": held["test_x"][500:1000], "255-train[1000:1500]": 255 - train}
    paths = []
    for name, pictures in sets.items():
        (folder / name).mkdir(parents=True)
        for number, picture in enumerate(pictures):
            paths.append(folder / name / f"{number:04d}.png")
            Image.fromarray(picture).save(paths[-1])
    expected = json.loads((npz.parent / "fid_reference.json").read_text())
    found: dict[str, Any] = {}
    for tf32 in (False, True):
        rows = ours(paths, weights, folder / f"features {tf32}", tf32)[1].reshape(3, 500, -1)
        by_name = dict(zip(sets, rows, strict=True))
        for pair in ("train[1000:1500] vs test[500:1000]", "train[1000:1500] vs 255-train[1000:1500]"):
            one, two = pair.split(" vs ")
            value = distance(by_name[one], by_name[two])
            told = {"fid": round(value, 5), "minus pytorch-fid's": round(value - expected[pair], 5)}
            found.setdefault(pair, {})["TF32" if tf32 else "float32"] = told
    return found


def measure(side: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One size of pictures: every way of computing them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pictures").mkdir()
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            write = partial(write_picture, folder / "pictures", side)
            list(pool.map(write, range(arguments.count), chunksize=50))
        paths = sorted((folder / "pictures").iterdir())
        result: dict[str, Any] = {"bytes of a file": round(sum(path.stat().st_size for path in paths) / len(paths))}
        result["parts alone, images/s"] = parts(paths, arguments.weights, arguments.compiled)
        result["muralist"], rows = ours(paths, arguments.weights, folder / "features", tf32=False)
        half = len(paths) // 2
        fid = distance(rows[:half], rows[half:])
        result["muralist, TF32"], rounded = ours(paths, arguments.weights, folder / "features", tf32=True)
        result["muralist, TF32"]["FID of two halves, change"] = distance(rounded[:half], rounded[half:]) - fid
        if arguments.reference_package:
            result["pytorch-fid"], theirs = reference(paths, arguments.weights, arguments.reference_package)
            result["pytorch-fid"]["FID of two halves, change"] = distance(theirs[:half], theirs[half:]) - fid
            result["pytorch-fid"]["largest difference of a feature"] = float(np.abs(theirs - rows).max())
            for name in ("muralist", "muralist, TF32"):
                times = result[name]["images/s, warm"] / result["pytorch-fid"]["images/s, warm"]
                result[name]["times pytorch-fid"] = round(times, 2)
    return result


def main() -> None:
    """Measure every size and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--reference_package", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument(
        "--compiled", action="store_true", help="time the network compiled as well, which takes minutes"
    )
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for side in SIDES:
        results[f"{side} px"] = measure(side, arguments)
        print(side, json.dumps(results[f"{side} px"], indent=1), flush=True)
    if arguments.cifar:
        with tempfile.TemporaryDirectory() as folder:
            results["FID on CIFAR-10"] = on_cifar(arguments.cifar, arguments.weights, Path(folder))
        print(json.dumps(results["FID on CIFAR-10"], indent=1), flush=True)
    import torch
    from bench.measure_training import RESULTS, hardware

    from muralist import __version__
    from muralist.machine import usable_cores
    from muralist.runfolder import write_json

    content = {
        "command": "python bench/fid_speed.py " + " ".join(sys.argv[1:]),
        "hardware": hardware() | {"cores": usable_cores()},
        "versions": {"muralist": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "results": results,
    }
    write_json(RESULTS / f"fid_speed_{arguments.name}.json", content)


if __name__ == "__main__":
    main()
