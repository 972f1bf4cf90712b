"""Compute the FID of sets of driving_world images with pytorch-fid and clean-fid: the values that the tests compare with.

python -m pip install --target DIR --no-deps pytorch-fid==0.3.0 clean-fid==0.1.35 torchvision==0.29.2 scipy==1.17.1 \\
    tqdm requests
python scripts/fid_reference.py DIR .cache/default_1.pt tests/evaluate/fid_reference.json

The code that runs is pytorch-fid's, on torchvision's blocks: image reading, network, statistics and Frechet distance.
Two things are replaced, neither of which takes part in the computation: the download of the weights by the file given,
and two operators of torchvision's extension, which does not load beside a torch of another build, by declarations.
clean-fid's reading, resizing, scaling and Frechet distance run around our network, in the place of NVIDIA's TorchScript file
of the same weights.

With --check DATA, a folder with cifar10_subset_u8.npz and fid_reference.json, values that pytorch-fid gave elsewhere are
computed again first; they must agree to 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from muralist.data.sources import EMBEDDED, open_source
from muralist.evaluate.inception import FEATURES, load_inception

COUNT = 96
"""Images of each set."""
SIZES = {"small": 64, "large": 320}
"""The large images are shrunk to Inception's 299 pixels, the small ones enlarged."""
_PACKAGES = ("pytorch-fid", "clean-fid", "torchvision", "torch", "scipy", "numpy", "pillow")


def read_images(size: str, count: int = COUNT) -> np.ndarray:
    """Return the first images of a size, uint8 [N, H, W, 3]; each size has other scenes."""
    source, first = open_source(EMBEDDED, SIZES[size]), COUNT * list(SIZES).index(size)
    return np.stack([source.read(first + number).image for number in range(count)])


def image_sets() -> dict[str, np.ndarray]:
    """Return the sets of images by name."""
    small = read_images("small")
    return {"small": small, "large": read_images("large"), "inverted": 255 - small}


def write_pngs(folder: Path, images: np.ndarray) -> Path:
    """Write images as PNG files, named in their order."""
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:06d}.png")
    return folder


def import_pytorch_fid(packages: Path, weights: Path) -> Any:
    """Return the module pytorch_fid.fid_score, whose network has the weights of a file."""
    sys.path.append(str(packages))
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    network: Any = import_module("pytorch_fid.inception")
    classifier = {"fc.weight": torch.zeros(1008, FEATURES), "fc.bias": torch.zeros(1008)}  # FID does not use it
    network.load_state_dict_from_url = lambda *_, **__: load_inception(weights).state_dict() | classifier
    return import_module("pytorch_fid.fid_score")


class Reference:
    """Features and statistics by pytorch-fid."""

    def __init__(self, packages: Path, weights: Path) -> None:
        self.fid_score = import_pytorch_fid(packages, weights)
        self.network = self.fid_score.InceptionV3([3])

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return the features [N, 2048] of images."""
        with TemporaryDirectory() as folder:
            files = sorted(write_pngs(Path(folder) / "images", images).iterdir())
            return self.fid_score.get_activations(files, self.network, num_workers=0)

    def fid(self, one: np.ndarray, other: np.ndarray) -> float:
        """Return the FID of two sets of features, computed as calculate_fid_given_paths does."""
        moments = [part for rows in (one, other) for part in (rows.mean(0), np.cov(rows, rowvar=False))]
        return float(self.fid_score.calculate_frechet_distance(*moments))


class CleanReference:
    """Features and FID by clean-fid, in its mode clean."""

    def __init__(self, weights: Path) -> None:
        self.fid_module: Any = import_module("cleanfid.fid")
        wrapper: Any = import_module("cleanfid.inception_torchscript").InceptionV3W
        self.network = wrapper.__new__(wrapper)  # its constructor loads the TorchScript file
        torch.nn.Module.__init__(self.network)
        self.network.layers, self.network.resize_inside = load_inception(weights), False

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return the features [N, 2048] of images."""
        with TemporaryDirectory() as folder:
            files = [str(path) for path in sorted(write_pngs(Path(folder) / "images", images).iterdir())]
            options: dict[str, Any] = {"num_workers": 0, "batch_size": 16, "device": "cpu", "mode": "clean"}
            return self.fid_module.get_files_features(files, self.network, verbose=False, **options)

    def fid(self, one: np.ndarray, other: np.ndarray) -> float:
        """Return the FID of two sets of features."""
        return float(self.fid_module.fid_from_feats(one, other))


def check(reference: Reference, data: Path) -> None:
    """Compare with values that pytorch-fid gave elsewhere."""
    expected = json.loads((data / "fid_reference.json").read_text())
    cifar = np.load(data / "cifar10_subset_u8.npz")
    train = reference.features(cifar["train_x"][1000:1500])
    for name, others in {
        "train[1000:1500] vs test[500:1000]": cifar["test_x"][500:1000],
        "train[1000:1500] vs 255-train[1000:1500]": 255 - cifar["train_x"][1000:1500],
    }.items():
        found = reference.fid(train, reference.features(others))
        print(f"{name}: {found:.6f}, elsewhere {expected[name]:.6f}")
        assert abs(found - expected[name]) < 1e-3


def main() -> None:
    """Write the values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--check", type=Path, metavar="DATA")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    reference = Reference(arguments.packages, arguments.weights)
    if arguments.check:
        check(reference, arguments.check)
    clean = CleanReference(arguments.weights)
    features = {name: reference.features(images) for name, images in image_sets().items()}
    clean_features = {name: clean.features(images) for name, images in image_sets().items()}
    result = {
        "command": "python scripts/fid_reference.py DIR .cache/default_1.pt tests/evaluate/fid_reference.json",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "fid": {name: reference.fid(features["small"], features[name]) for name in ("large", "inverted")},
        "clean_fid": {name: clean.fid(clean_features["small"], clean_features[name]) for name in ("large", "inverted")},
        "feature_sums": {name: rows[:3].sum(1).tolist() for name, rows in features.items()},
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
