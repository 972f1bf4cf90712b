"""Image and clip files: pixels, metadata, and the same bytes every time."""

from __future__ import annotations

import importlib.util
import io
import json

import numpy as np
import pytest
from PIL import Image

from muralist.core.errors import UserError
from muralist.generate.output_dir import encode_image, file_extension
from muralist.generate.plan import Sample

SAMPLE = Sample(0, 0, 0, "000001", 42, "ein schönes Auto\n🎨", "blurry", 16, 24, "000001_seed42.png")
FACTS = {"model": "tiny", "settings": {"steps": 4}, "software": "muralist"}


def clip(frames: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)


def test_an_image_keeps_its_pixels_and_its_metadata() -> None:
    pixels = clip(1)[0]
    data = encode_image(pixels, SAMPLE, FACTS, "mp4")
    assert data == encode_image(pixels, SAMPLE, FACTS, "webp")
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(image), pixels)
        assert image.text["prompt"] == SAMPLE.prompt and image.text["negative_prompt"] == "blurry"
        assert image.text["seed"] == "42" and json.loads(image.text["settings"]) == {"steps": 4}


def test_a_webp_clip_is_lossless() -> None:
    frames = clip(5)
    data = encode_image(frames, SAMPLE, FACTS, "webp")
    assert data == encode_image(frames, SAMPLE, FACTS, "webp")
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 5
        metadata = json.loads(image.getexif()[0x010E])
        for number in range(5):
            image.seek(number)
            assert np.array_equal(np.asarray(image.convert("RGB")), frames[number])
    assert metadata["prompt"] == SAMPLE.prompt and metadata["model"] == "tiny"


def test_an_mp4_clip_has_its_frames_and_metadata() -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    frames = np.repeat(np.linspace(0, 255, 5, dtype=np.uint8), 16 * 24 * 3).reshape(5, 16, 24, 3)
    data = encode_image(frames, SAMPLE, FACTS, "mp4")
    assert data == encode_image(frames, SAMPLE, FACTS, "mp4")
    with av.open(io.BytesIO(data)) as container:
        assert json.loads(container.metadata["comment"])["prompt"] == SAMPLE.prompt
        read = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(read).astype(int) - frames).max() < 8


def test_file_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_extension(1, "mp4") == "png" and file_extension(5, "webp") == "webp"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="mp4 clips need PyAV.*--video_format webp"):
        file_extension(5, "mp4")
