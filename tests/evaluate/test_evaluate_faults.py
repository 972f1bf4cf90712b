"""Faults around an evaluation: broken, few, differently sized or changing images, damaged caches, interruptions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muralist.core.errors import UserError
from muralist.evaluate.features import compute_features, hash_files
from tests.support.colors import MeanColor
from tests.support.evaluating import evaluate, report, scenes, write_images

pytestmark = pytest.mark.usefixtures("clean_environment")
ALONE = {"0": "cpu"}
RECORD = 32 + 4 * 6 + 4  # bytes: hash, features of the small DINOv2, checksum


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("scores", "per_image", "warnings", "images"))


@pytest.mark.parametrize("computed", [False, True])
def test_unreadable_images_are_reported(tmp_path: Path, dinov2: Path, computed: bool) -> None:
    """Also where nothing is computed that would have to read them."""
    images = write_images(tmp_path / "images", scenes(4, 0))
    reference = write_images(tmp_path / "reference", scenes(4, 1))
    tear(images / "000001.png")
    (images / "000002.png").write_bytes(b"")
    tear(reference / "000003.png")
    model = ("--dinov2_path", dinov2) if computed else ()
    evaluate("--images", images, "--reference", reference, *model, "--output_dir", tmp_path / "out")
    found = report(tmp_path / "out")
    assert (found["images"]["count"], found["reference"]["count"]) == (2, 3)
    assert found["per_image"]["file"] == ["000000.png", "000003.png"]
    broken = found["images"]["unreadable"]
    assert [text.partition(": ")[0] for text in broken] == ["000001.png", "000002.png"]
    assert broken[1] == "000002.png: the file is empty"
    left_out = [text for text in found["warnings"] if "of the reference is left out" in text]
    assert len(left_out) == 1 and left_out[0].startswith(str(reference / "000003.png"))
    assert "2 images could not be read: 000001.png: " in (tmp_path / "out" / "report" / "index.html").read_text()


def test_fewer_than_two_readable_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(2, 0))
    tear(images / "000001.png")
    evaluate("--images", images, "--output_dir", tmp_path / "out", expect=1)
    captured = capsys.readouterr().err
    assert f"Fewer than two images of {images} can be read.\n1 are broken, the first because: " in captured
    whole = write_images(tmp_path / "whole", scenes(2, 0))
    evaluate("--images", whole, "--reference", images, "--output_dir", tmp_path / "out", expect=1)
    assert f"Fewer than two images of {images}" in capsys.readouterr().err
    (images / "000001.png").unlink()
    evaluate("--images", images, "--output_dir", tmp_path / "out", expect=1)
    assert f"Only one image was found in {images}, which --images names." in capsys.readouterr().err
    (images / "000000.png").unlink()
    evaluate("--images", images, "--output_dir", tmp_path / "out", expect=1)
    assert f"No image was found in {images}, which --images names." in capsys.readouterr().err


def test_mixed_sizes_are_reported(tmp_path: Path, dinov2: Path) -> None:
    images = write_images(tmp_path / "images", scenes(4, 0))
    reference = write_images(tmp_path / "reference", scenes(3, 1, side=40))
    evaluate("--images", images, "--reference", reference, "--dinov2_path", dinov2, "--output_dir", tmp_path / "out")
    before = report(tmp_path / "out")
    assert not any("sizes" in text for text in before["warnings"])
    write_images(images / "more", scenes(3, 0, side=40)[:, :30])
    evaluate("--images", images, "--reference", reference, "--dinov2_path", dinov2, "--output_dir", tmp_path / "out")
    found = report(tmp_path / "out")
    assert found["images"]["sizes"] == {"24 x 24": 4, "30 x 40": 3} and found["reference"]["sizes"] == {"40 x 40": 3}
    told = "The images have 2 sizes, most often 24 x 24 and 30 x 40 (height x width): each is resized on its own."
    assert told in found["warnings"]
    assert found["scores"]["fd_dinov2"]["value"] != before["scores"]["fd_dinov2"]["value"]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert told in page and "24 x 24 (4), 30 x 40 (3)" in page


def test_a_changed_image_is_not_cached_under_its_old_hash(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", scenes(3, 0))
    items = hash_files(sorted(folder.iterdir()))
    before = (folder / "000001.png").read_bytes()
    (folder / "000001.png").write_bytes((folder / "000002.png").read_bytes())
    with pytest.raises(UserError, match="000001.png changed while it was evaluated. Another process still writes"):
        compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    (folder / "000001.png").unlink()
    with pytest.raises(UserError, match="000001.png could not be read: No such file"):
        compute_features(MeanColor(), items, ALONE, tmp_path / "cache")
    (folder / "000001.png").write_bytes(before)
    found = compute_features(MeanColor(), items, ALONE, tmp_path / "cache").rows
    np.testing.assert_allclose(found, scenes(3, 0).astype(float).mean((1, 2)), rtol=1e-5)


def test_damaged_caches_are_detected(tmp_path: Path, dinov2: Path) -> None:
    """A flipped bit in the key, the numbers or the checksum of a record; the file cut short; and rubbish beside it."""
    images = write_images(tmp_path / "images", scenes(6, 0))
    arguments = ("--images", images, "--reference", images, "--dinov2_path", dinov2, "--output_dir", tmp_path / "out")
    evaluate(*arguments)
    whole = report(tmp_path / "out")
    (path,) = (tmp_path / "out" / "features").glob("dinov2-*/*.bin")
    intact = path.read_bytes()
    assert len(intact) == 6 * RECORD
    for place in (5, 32 + 7, RECORD - 1):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 16]) + intact[place + 1 :])
        evaluate(*arguments)
        assert same(report(tmp_path / "out"), whole)
        recomputed = [other for other in path.parent.glob("*.bin") if other != path]
        assert [other.stat().st_size for other in recomputed] == [RECORD]
        recomputed[0].unlink()
    path.write_bytes(intact[: 3 * RECORD + 11])
    (path.parent / "0-0.bin").write_bytes(os.urandom(1000))
    evaluate(*arguments)
    assert same(report(tmp_path / "out"), whole)


@pytest.mark.slow
def test_a_killed_command_resumes(tmp_path: Path, dinov2: Path) -> None:
    images = write_images(tmp_path / "images", scenes(600, 0))
    arguments = ["--images", images, "--reference", images, "--dinov2_path", dinov2, "--output_dir"]
    output = tmp_path / "out"
    command = [sys.executable, "-m", "muralist", "evaluate", *arguments, output]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
    kept = output / "features"
    while not any(path.stat().st_size > 20 * RECORD for path in kept.glob("*/*.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (output / "report.json").exists()
    (torn,) = kept.glob("*/*.bin")
    evaluate(*arguments, output)
    (rest,) = (path for path in kept.glob("*/*.bin") if path != torn)
    assert torn.stat().st_size // RECORD + rest.stat().st_size // RECORD == 600 and rest.stat().st_size < 590 * RECORD
    evaluate(*arguments, tmp_path / "whole")
    assert same(report(output), report(tmp_path / "whole"))
