"""Pictures and clips as files that say how they were made; the same pixels and facts are the same bytes everywhere."""

from __future__ import annotations

import importlib.util
import io
import json
from typing import Any

import numpy as np
from PIL import Image

from muralist.errors import UserError
from muralist.generate.plan import Sample
from muralist.pictures import encode_png

_FRAMES_PER_SECOND = 16  # Wan's own


def extension(frames: int, video_format: str) -> str:
    """How files end: one frame is a picture; more are a clip, which needs an encoder."""
    if frames == 1:
        return "png"
    if video_format == "mp4" and importlib.util.find_spec("av") is None:
        raise UserError(
            "mp4 clips need PyAV, which is not installed.",
            fix="Install it with `pip install 'muralist[video]'`, or give --video_format webp.",
        )
    return video_format


def encode(pixels: np.ndarray, sample: Sample, facts: dict[str, Any], video_format: str) -> bytes:
    """A file of pixels [H, W, 3], or of frames [F, H, W, 3], with its prompt, seed, model and settings inside."""
    told = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": str(sample.seed)}
    told |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    if pixels.ndim == 3:
        return encode_png(pixels, told)
    return _webp(pixels, told) if video_format == "webp" else _mp4(pixels, told)


def _webp(frames: np.ndarray, told: dict[str, str]) -> bytes:
    pictures = [Image.fromarray(frame) for frame in frames]
    exif = Image.Exif()
    exif[0x010E] = json.dumps(told)  # ImageDescription
    buffer = io.BytesIO()
    pictures[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=pictures[1:],
        duration=round(1000 / _FRAMES_PER_SECOND),
        loop=0,
        lossless=True,
        exif=exif.tobytes(),
    )
    return buffer.getvalue()


def _mp4(frames: np.ndarray, told: dict[str, str]) -> bytes:
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(f"A clip of {height} x {width} cannot be an mp4, whose sides are even.", fix="Use webp.")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(told)
        stream: Any = container.add_stream("libx264", rate=_FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # with several, the bytes would depend on their number
        stream.options = {"crf": "12"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
