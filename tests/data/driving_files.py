"""Small data sets in the formats of others: Waymo's Parquet files, HunyuanDiT's Arrow and index files, captioned folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from tests.support.images import EncodedSample, encoded, write_folder

# The schema of CameraImageComponent in waymo_open_dataset/v2/perception/camera_image.py.
WAYMO_SCHEMA = pyarrow.schema(
    {
        "key.segment_context_name": pyarrow.string(),
        "key.frame_timestamp_micros": pyarrow.int64(),
        "key.camera_name": pyarrow.int8(),
        "[CameraImageComponent].image": pyarrow.binary(),
        "[CameraImageComponent].pose.transform": pyarrow.list_(pyarrow.float64(), 16),
        **{
            f"[CameraImageComponent].velocity.{kind}_velocity.{axis}": number
            for kind, number in (("linear", pyarrow.float32()), ("angular", pyarrow.float64()))
            for axis in "xyz"
        },
        "[CameraImageComponent].pose_timestamp": pyarrow.float64(),
        **{
            f"[CameraImageComponent].rolling_shutter_params.{name}": pyarrow.float64()
            for name in ("shutter", "camera_trigger_time", "camera_readout_done_time")
        },
    }
)


def write_waymo(path: Path, chosen: Sequence[EncodedSample], cameras: Sequence[int], row_group: int = 4) -> Path:
    """Write one segment: row n is a JPEG of image n, by camera n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {field.name: pyarrow.nulls(len(chosen), field.type) for field in WAYMO_SCHEMA}
    columns["key.segment_context_name"] = pyarrow.array([path.stem] * len(chosen))
    columns["key.frame_timestamp_micros"] = pyarrow.array(
        range(1_550_083_467_346_370, 1_550_083_467_346_370 + len(chosen))
    )
    columns["key.camera_name"] = pyarrow.array(cameras, pyarrow.int8())
    columns["[CameraImageComponent].image"] = pyarrow.array([encoded(sample.image, "JPEG") for sample in chosen])
    pyarrow.parquet.write_table(pyarrow.table(columns, WAYMO_SCHEMA), path, row_group_size=row_group)
    return path


def write_arrow(
    path: Path,
    chosen: Sequence[EncodedSample],
    labelled: bool = False,
    batch: int = 4,
    images: dict[int, bytes] | None = None,
) -> Path:
    """Write a file like HunyuanDiT's csv2arrow; without images its columns are untyped, as pandas makes them.

    `images` are put in place of those of some rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = [(images or {}).get(row, sample.png) for row, sample in enumerate(chosen)]
    table = pyarrow.table(
        {
            "text_zh": pyarrow.array([sample.caption for sample in chosen] or pyarrow.nulls(0)),
            "md5": pyarrow.array([hashlib.md5(sample.png).hexdigest() for sample in chosen] or pyarrow.nulls(0)),
            "width": pyarrow.array([sample.image.width for sample in chosen] or pyarrow.nulls(0)),
            "height": pyarrow.array([sample.image.height for sample in chosen] or pyarrow.nulls(0)),
            "image": pyarrow.array(stored or pyarrow.nulls(0)),
            **({"label": pyarrow.array([sample.label for sample in chosen])} if labelled else {}),
        }
    )
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.RecordBatchFileWriter(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_index(path: Path, files: Sequence[str], lengths: Sequence[int], indices: object, **more: object) -> Path:
    """Write an index as HunyuanDiT's `idk base` does."""
    content = {
        "data_type": ["Keep md5 duplicates."],
        "config_file": "x.yaml",
        "indices_file": "",
        "arrow_files": list(files),
        "cum_length": np.cumsum(lengths).tolist(),
        "group_length": list(lengths),
        "indices": indices,
        "example_indices": [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | more, indent=4, ensure_ascii=False), encoding="utf-8")
    return path


def write_captioned_folder(folder: Path, chosen: list[EncodedSample], metadata: bool) -> Path:
    """Write class folders with the captions beside the images, or in one table of them all."""
    write_folder(folder, chosen)
    places = sorted(folder.rglob("*.PNG"), key=lambda place: str(place.relative_to(folder)))
    rows = []
    for place, sample in zip(places, chosen, strict=True):
        if metadata:
            rows.append({"file_name": str(place.relative_to(folder)), "text": sample.caption, "size": 3})
        else:
            place.with_suffix(".txt").write_text(sample.caption, encoding="utf-8")
    if metadata:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
