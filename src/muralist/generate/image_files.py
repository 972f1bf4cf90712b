"""Image and clip files with their metadata; the same pixels and metadata give the same bytes everywhere."""

from __future__ import annotations

import importlib.util
import io
import json
from typing import Any

import numpy as np
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.images import encode_png
from muralist.generate.plan import Sample

_FRAMES_PER_SECOND = 16  # Wan's own
_EXIF_IMAGE_DESCRIPTION = 0x010E


def extension(frames: int, video_format: str) -> str:
    """The file extension: png for one frame, else the clip's format, whose encoder must be installed."""
    if frames == 1:
        return "png"
    if video_format == "mp4" and importlib.util.find_spec("av") is None:
        raise UserError(
            "mp4 clips need PyAV, which is not installed.",
            fix="Install it with `pip install 'muralist[video]'`, or give --video_format webp.",
        )
    return video_format


def encode(pixels: np.ndarray, sample: Sample, facts: dict[str, Any], video_format: str) -> bytes:
    """Encode pixels [H, W, 3] or frames [F, H, W, 3] with prompt, seed, model and settings as metadata."""
    metadata = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": str(sample.seed)}
    metadata |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    if pixels.ndim == 3:
        return encode_png(pixels, metadata)
    return _webp(pixels, metadata) if video_format == "webp" else _mp4(pixels, metadata)


def _webp(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    exif = Image.Exif()
    exif[_EXIF_IMAGE_DESCRIPTION] = json.dumps(metadata)
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / _FRAMES_PER_SECOND),
        loop=0,
        lossless=True,
        exif=exif.tobytes(),
    )
    return buffer.getvalue()


def _mp4(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(
            f"A clip of {height} x {width} cannot be an mp4, whose sides are even.", fix="Give --video_format webp."
        )
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(metadata)
        stream: Any = container.add_stream("libx264", rate=_FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # the bytes depend on the number of threads
        stream.options = {"crf": "12"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
