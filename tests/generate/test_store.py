"""Files that say how they were made, the same bytes every time."""

from __future__ import annotations

import importlib.util
import io
import json

import numpy as np
import pytest
from PIL import Image

from muralist.errors import UserError
from muralist.generate import store
from muralist.generate.plan import Sample

SAMPLE = Sample(0, 0, 0, "000001", 42, "ein schönes Auto\n🎨", "blurry", 16, 24, "000001_seed42.png")
FACTS = {"model": "tiny", "settings": {"steps": 4}, "software": "muralist"}


def clip(frames: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)


def test_a_picture_keeps_its_pixels_and_its_facts() -> None:
    pixels = clip(1)[0]
    data = store.encode(pixels, SAMPLE, FACTS, "mp4")
    assert data == store.encode(pixels, SAMPLE, FACTS, "webp")
    with Image.open(io.BytesIO(data)) as picture:
        assert np.array_equal(np.asarray(picture), pixels)
        assert picture.text["prompt"] == SAMPLE.prompt and picture.text["negative_prompt"] == "blurry"
        assert picture.text["seed"] == "42" and json.loads(picture.text["settings"]) == {"steps": 4}


def test_a_webp_clip_keeps_every_frame_to_the_bit() -> None:
    frames = clip(5)
    data = store.encode(frames, SAMPLE, FACTS, "webp")
    assert data == store.encode(frames, SAMPLE, FACTS, "webp")
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.n_frames == 5
        told = json.loads(picture.getexif()[0x010E])
        for number in range(5):
            picture.seek(number)
            assert np.array_equal(np.asarray(picture.convert("RGB")), frames[number])
    assert told["prompt"] == SAMPLE.prompt and told["model"] == "tiny"


def test_an_mp4_clip_has_its_frames_and_facts() -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    frames = np.repeat(np.linspace(0, 255, 5, dtype=np.uint8), 16 * 24 * 3).reshape(5, 16, 24, 3)
    data = store.encode(frames, SAMPLE, FACTS, "mp4")
    assert data == store.encode(frames, SAMPLE, FACTS, "mp4")
    with av.open(io.BytesIO(data)) as container:
        assert json.loads(container.metadata["comment"])["prompt"] == SAMPLE.prompt
        read = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(read).astype(int) - frames).max() < 8


def test_how_files_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.extension(1, "mp4") == "png" and store.extension(5, "webp") == "webp"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="mp4 clips need PyAV.*--video_format webp"):
        store.extension(5, "mp4")
