"""Packed and encoded folders, damaged in their manifest or their rows: read as they are, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data.packed import CAPTION_FILES, EncodedManifest, LatentSource, RowWriter, StoredTensor, is_packed
from muralist.data.source import read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.tools.pack import pack
from tests.fuzz.damage import damaged, damaged_json, examples, fresh_copy, refused_or, untouched
from tests.support.images import encoded_samples, write_csv

SIZE = 8


def _packed(folder: Path) -> Path:
    pack(str(write_csv(folder / "set.csv", encoded_samples(3))), str(folder / "packed"), SIZE, workers=1)
    return folder / "packed"


def _encoded(folder: Path) -> Path:
    place = folder / "encoded"
    place.mkdir()
    tensors = {
        "latents": StoredTensor("float32", [1, 2, 4, 1, 1]),
        "embedding": StoredTensor("bfloat16", [1, 0, 2]),
        "mask": StoredTensor("bool", [3]),
        "length": StoredTensor("int64", [], is_number=True),
    }
    latents = RowWriter(place, {"latents": pyarrow.binary(32), "label": pyarrow.int32(), "caption": pyarrow.int64()})
    latents.add(np.zeros((3, 32), np.uint8), [0, 1, 0], [0, 1, 1])
    kinds = {"embedding": pyarrow.large_binary(), "embedding shape": pyarrow.binary(24), "mask": pyarrow.binary(3)}
    kinds |= {"length": pyarrow.binary(8), "text": pyarrow.string()}
    texts = RowWriter(place, kinds, CAPTION_FILES, row_bytes=64)
    shapes = np.array([[1, 0, 2], [1, 3, 2]], "<i8").view(np.uint8)
    texts.add([b"", bytes(12)], shapes, np.zeros((2, 3), np.uint8), np.zeros((2, 8), np.uint8), ["", "a car"])
    EncodedManifest(
        img_size=SIZE,
        rows_per_batch=latents.rows_per_batch,
        label_names=["a", "b"],
        files=latents.close(),
        broken=0,
        source="x",
        source_fingerprint="x",
        caption_files=texts.close(),
        captions_per_batch=texts.rows_per_batch,
        model="small",
        family="diffusers",
        frozen_parts={"vae": "x"},
        dtype="float32",
        mirrored=False,
        tensors=tensors,
    ).write(place)
    return place


@pytest.fixture(scope="module", params=[_packed, _encoded])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    made = request.param(tmp_path_factory.mktemp("set"))
    assert read_all(made) == 3
    return made


def read_all(folder: Path) -> int | UserError:
    def look() -> int:
        source = open_source(str(folder), SIZE)
        source.fingerprint()
        numbers = np.arange(min(len(source), 9))
        if isinstance(source, LatentSource):
            batch, labels, captions = source.read_latents(numbers)
            source.read_empty_caption()
            assert all(len(rows) == len(numbers) for rows in batch.text.values())
            assert len(batch.latents) == len(labels) == len(captions) == len(numbers)
        else:
            images, labels, captions = read_batch(source, numbers)
            assert images.shape == (len(numbers), SIZE, SIZE, 3)
        assert all(isinstance(caption, str) for caption in captions)
        open_held_out(str(folder), SIZE)
        return len(source)

    return refused_or(look)


@examples(82)
@given(data=st.data())
def test_damaged_manifests_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    copy = fresh_copy(folder)
    (copy / "manifest.json").write_bytes(data.draw(damaged_json(json.loads((folder / "manifest.json").read_text()))))
    with untouched(folder.parent):
        refused_or(lambda: is_packed(copy))
        read_all(copy)


@examples(44)
@given(data=st.data())
def test_damaged_rows_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """A file of another length is refused by its length; here the manifest is told the new one, as if nothing had been."""
    copy = fresh_copy(folder)
    manifest = json.loads((copy / "manifest.json").read_text())
    path = copy / data.draw(st.sampled_from([path.name for path in sorted(copy.glob("*.arrow"))]))
    content = data.draw(damaged(path.read_bytes()))
    path.unlink()
    path.write_bytes(content)
    for file in (*manifest["files"], *manifest.get("caption_files", [])):
        if file["name"] == path.name:
            file["bytes"] = len(content)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    read_all(copy)


_COLUMNS: list[Callable[[], pyarrow.Array]] = [
    lambda: pyarrow.array([b"\0" * 192] * 3, pyarrow.binary(192)),
    lambda: pyarrow.array([b"\0" * 191] * 3, pyarrow.binary(191)),
    lambda: pyarrow.array([b"\0" * 192, None, None], pyarrow.binary(192)),
    lambda: pyarrow.array([b"x", b"", None]),
    lambda: pyarrow.array([0, 1, 2**40]),
    lambda: pyarrow.array([0, -5, None]),
    lambda: pyarrow.array([0.5, float("nan"), 1.0]),
    lambda: pyarrow.array(["a", "", None]),
    lambda: pyarrow.array([[1], [], None]),
    lambda: pyarrow.nulls(3),
]


@examples(44)
@given(data=st.data())
def test_rows_of_other_columns_are_read_or_refused(data: st.DataObject, folder: Path) -> None:
    copy = fresh_copy(folder)
    manifest = json.loads((copy / "manifest.json").read_text())
    with pyarrow.memory_map(str(folder / "00000.arrow")) as memory, pyarrow.ipc.open_file(memory) as reader:
        table = reader.read_all()
    name = data.draw(st.sampled_from(table.column_names))
    how = data.draw(st.sampled_from(["replace", "drop", "rename", "double", "shorten"]))
    place = table.column_names.index(name)
    if how == "replace":
        table = table.set_column(place, name, data.draw(st.sampled_from(_COLUMNS))())
    elif how == "drop":
        table = table.drop_columns([name])
    elif how == "rename":
        table = table.rename_columns(["other" if other == name else other for other in table.column_names])
    elif how == "double":
        table = table.append_column(name, table[name])
    else:
        table = table.slice(0, 1)
    path = copy / "00000.arrow"
    path.unlink()
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.RecordBatchFileWriter(sink, table.schema) as writer:
        writer.write_table(table)
    manifest["files"][0]["bytes"] = path.stat().st_size
    (copy / "manifest.json").write_text(json.dumps(manifest))
    read_all(copy)


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    packed = _packed(tmp_path)
    manifest = json.loads((packed / "manifest.json").read_text())
    (packed / "00000.arrow").rename(tmp_path / "outside.arrow")
    for name in ("../outside.arrow", str(tmp_path / "outside.arrow")):
        manifest["files"][0]["name"] = name
        (packed / "manifest.json").write_text(json.dumps(manifest))
        found = read_all(packed)
        assert isinstance(found, UserError) and "manifest" in str(found)


@pytest.mark.parametrize("rows", [0, 10**30])
def test_a_batch_has_a_sensible_number_of_rows(rows: int, folder: Path) -> None:
    """A number beyond 64 bits; found by `make fuzz`."""
    copy = fresh_copy(folder)
    manifest = json.loads((copy / "manifest.json").read_text()) | {"rows_per_batch": rows}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "rows_per_batch" in str(read_all(copy))
