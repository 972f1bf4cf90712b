"""Data sets of every kind, damaged: a reader gives images of the size asked for, or refuses in words."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data.sources import open_held_out, open_source
from muralist.data.sources.webdataset import expand_ranges
from tests.data.driving_files import write_arrow, write_captioned_folder, write_index, write_waymo
from tests.fuzz.damage import BAD_JSON, damaged, damaged_json, examples, nonsense, refused_or, untouched
from tests.support.images import encoded_samples, write_csv, write_jsonl, write_parquet, write_tar

SIZE = 8
CHOSEN = encoded_samples(3)


def read_all(path: Path) -> int | UserError:
    """Open a data set and look at everything in it; how many images it has, or the refusal."""

    def look() -> int:
        source = open_source(str(path), SIZE)
        source.fingerprint()
        for index in range(len(source)):
            image = refused_or(lambda: source.read(index))  # noqa: B023  (one bad image is its own error)
            if not isinstance(image, UserError):
                assert image.image.shape == (SIZE, SIZE, 3) and image.image.dtype == np.uint8
                image.caption.encode()
            if hasattr(source, "shape"):
                refused_or(lambda: source.shape(index))  # type: ignore[attr-defined]  # noqa: B023
        open_held_out(str(path), SIZE)
        return len(source)

    return refused_or(look)


def _npz(folder: Path) -> Path:
    images = np.stack([np.full((10, 12, 3), number, np.uint8) for number in range(3)])
    np.savez_compressed(
        folder / "set.npz", train_x=images, train_y=np.arange(3), test_x=images[:1], test_y=np.zeros(1, int)
    )
    return folder / "set.npz"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "csv": lambda folder: write_csv(folder / "set.csv", CHOSEN),
    "tsv": lambda folder: write_csv(folder / "set.tsv", CHOSEN, "\t"),
    "jsonl": lambda folder: write_jsonl(folder / "set.jsonl", CHOSEN),
    "tar": lambda folder: write_tar(folder / "set.tar", CHOSEN),
    "tar of json": lambda folder: write_tar(folder / "set.tar", CHOSEN, text="json"),
    "parquet": lambda folder: write_parquet(folder / "set.parquet", CHOSEN),
    "waymo": lambda folder: write_waymo(folder / "set.parquet", CHOSEN, [1, 2, 5]),
    "arrow": lambda folder: write_arrow(folder / "set.arrow", CHOSEN, labelled=True, batch=2),
    "npz": _npz,
}


@pytest.fixture(scope="module", params=list(WRITERS))
def valid(request: Any, tmp_path_factory: Any) -> Path:
    """One data set of each kind, in a folder with all it needs."""
    path = WRITERS[request.param](tmp_path_factory.mktemp("set"))
    assert read_all(path) == 3
    return path


@examples(33)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(valid: Path, data: st.DataObject) -> None:
    broken = valid.with_name(f"broken{valid.suffix}")
    broken.unlink(missing_ok=True)  # not written over: a file that is mapped must not change under its reader
    broken.write_bytes(data.draw(damaged(valid.read_bytes())))
    with untouched(valid.parent):
        read_all(broken)


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".tar", ".parquet", ".arrow", ".npz", ".json"])
def test_files_that_are_something_else_are_refused(kind: str, tmp_path: Path) -> None:
    others = [WRITERS[name](tmp_path).read_bytes() for name in WRITERS if WRITERS[name](tmp_path).suffix != kind]
    for content in (*BAD_JSON, *others):
        path = tmp_path / f"other{kind}"
        path.write_bytes(content)
        assert isinstance(read_all(path), UserError)
        path.unlink()


@examples(33)
@given(data=st.data())
def test_rows_of_nonsense_in_tables(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("set") / "set.jsonl", CHOSEN)
    rows = data.draw(nonsense([json.loads(line) for line in path.read_text().splitlines()]))
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])))
    read_all(path)


def _column(draw: Callable[[Any], Any]) -> pyarrow.Array:
    values = draw(
        st.sampled_from(
            [
                [b"", b"\x89PNG", None],
                ["a", "", None],
                [1, 2, 3],
                [2**62, -1, None],
                [float("nan"), 1e308, None],
                [True, False, None],
                [[1], [], None],
                [{"bytes": b"x", "path": None}, {"bytes": None, "path": "p"}, None],
                [{"bytes": "text"}, {"bytes": None}, None],
                [{"bytes": 5}, None, None],
                [{"path": "x"}, None, None],
                [CHOSEN[0].png, CHOSEN[1].png, CHOSEN[2].png],
            ]
        )
    )
    return pyarrow.array(values)


_NAMES = ["image", "label", "caption", "text", "height", "width", "class", "bytes", "key.camera_name",
          "[CameraImageComponent].image", "", "é"]  # fmt: skip
_HUB = (b"", b"{", b"[]", b"null", b'{"info": 5}', b'{"info": {"features": []}}', b'{"info": {"features": {"label": 1}}}',
        b'{"info": {"features": {"label": {"names": [1, null, [], "x"]}}}}', b"\xff")  # fmt: skip


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@examples(82)
@given(data=st.data())
def test_columns_of_all_types_and_names(kind: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("set") / f"set.{kind}"
    names = ["image", *data.draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4))]
    table = pyarrow.Table.from_arrays([_column(data.draw) for _ in names], names)
    if data.draw(st.booleans()):
        table = table.replace_schema_metadata({b"huggingface": data.draw(st.sampled_from(_HUB))})
    if kind == "parquet":
        try:
            pyarrow.parquet.write_table(table, path)
        except pyarrow.ArrowException:
            return  # such a file cannot be
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.RecordBatchFileWriter(sink, table.schema) as writer:
            writer.write_table(table)
    read_all(path)


INDEX = {
    "arrow_files": ["one.arrow", "two.arrow"],
    "cum_length": [3, 5],
    "indices": [0, 4, 4],
    "group_length": [3, 2],
    "indices_file": "",
}
SHAPED = INDEX | {"indices": {"512x768": [0, 1], "768x512": [4]}, "group_length": {"512x768": 2}}
BESIDE = INDEX | {"indices": [], "indices_file": "rows.npz"}


@pytest.mark.parametrize("index", [INDEX, SHAPED, BESIDE], ids=["plain", "of shapes", "with rows beside"])
@examples(66)
@given(data=st.data())
def test_damaged_indices_are_read_or_refused(index: dict[str, Any], data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "indices"
    path = folder / "index.json"
    if not folder.exists():
        write_arrow(folder / "one.arrow", CHOSEN)
        write_arrow(folder / "two.arrow", CHOSEN[:2])
        np.savez(folder / "rows.npz", x=np.array([0, 4]))
        for whole in (INDEX, SHAPED, BESIDE):
            path.write_text(json.dumps(whole))
            assert isinstance(read_all(path), int)
    path.write_bytes(data.draw(damaged_json(index)))
    with untouched(folder):
        read_all(path)


def test_an_index_as_the_official_tool_writes_it_is_read(tmp_path: Path) -> None:
    write_arrow(tmp_path / "one.arrow", CHOSEN)
    assert read_all(write_index(tmp_path / "index.json", ["one.arrow"], [3], [2, 0])) == 2


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
@examples(33)
@given(data=st.data())
def test_damaged_captions_of_folders(table: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = write_captioned_folder(tmp_path_factory.mktemp("set") / "train", CHOSEN, metadata=True)
    (found,) = (path for path in folder.rglob("metadata.*"))
    rows = found.read_bytes()
    found.unlink()
    found.with_name(table).write_bytes(data.draw(damaged(rows)))
    read_all(folder)


@examples(16)
@given(data=st.data())
def test_damaged_text_files_beside_images(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = write_captioned_folder(tmp_path_factory.mktemp("set") / "train", CHOSEN, metadata=False)
    text = next(folder.rglob("*.txt"))
    text.write_bytes(data.draw(damaged(text.read_bytes())))
    found = read_all(folder)
    assert found == 3 or isinstance(found, UserError)


def _member(name: str, data: bytes, **changes: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512)


@pytest.mark.parametrize("kind", ["png", "txt", "cls", "json"])
@pytest.mark.parametrize("size", [-1, -(2**60), 10**6, 2**40, 2**62])
def test_tar_members_with_a_lying_size(kind: str, size: int, tmp_path: Path) -> None:
    content = _member("a.png", CHOSEN[0].png) + _member(f"b.{kind}", b"1", size=size) + b"\0" * 1024
    (tmp_path / "set.tar").write_bytes(content)
    read_all(tmp_path / "set.tar")


@pytest.mark.parametrize("name", ["../../a.png", "/a.png", "a\0b.png", "x" * 5000 + ".png", "..", "", "é\udcff.png"])
def test_tar_members_with_names_that_lead_out_stay_inside(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "one" / "two"
    inside.mkdir(parents=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for member in (name, "good.png"):
            info = tarfile.TarInfo(member)
            info.size = len(CHOSEN[0].png)
            archive.addfile(info, io.BytesIO(CHOSEN[0].png))
    (inside / "set.tar").write_bytes(buffer.getvalue())
    with untouched(tmp_path):
        assert read_all(inside / "set.tar") in (1, 2)


@pytest.mark.parametrize("member", [b"[" * 200_000, b'{"caption": 5}', b'{"label": []}', b"\xff", b'{"label": 1e400}'])
def test_tar_members_of_nonsense(member: bytes, tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(_member("a.png", CHOSEN[0].png) + _member("a.json", member) + b"\0" * 1024)
    assert isinstance(read_all(tmp_path / "set.tar"), UserError)


@pytest.mark.parametrize(
    "pattern", ["{0..99999999999}.tar", "{5..1}.tar", f"{{0..{'9' * 5000}}}.tar", "{0..9}" * 30, "{1..2}.tar"]
)
def test_ranges_of_too_many_files_are_refused(pattern: str) -> None:
    found = refused_or(lambda: expand_ranges(pattern))
    assert isinstance(found, UserError) or len(found) <= 2


_NPY = b"\x93NUMPY\x01\x00"


def _array_file(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return _NPY + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 10, 10, 3), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 0, 10, 3), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 4, 4, 3), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': 'no such type', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '|u1')] * 5, 'fortran_order': False, 'shape': (1,), }",
        "(" * 5000,
        "{" * 300,
        "nonsense",
        "",
    ],
)
def test_arrays_with_a_lying_header(header: str, tmp_path: Path) -> None:
    import zipfile

    for name in ("train_x.npy", "test_x.npy", "train_y.npy"):
        path = tmp_path / name.replace(".npy", ".npz")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                "train_x.npy",
                _array_file(str({"descr": "|u1", "fortran_order": False, "shape": (1, 2, 2, 3)}), b"\0" * 12),
            )
            archive.writestr(name, _array_file(header))
        assert isinstance(read_all(path), UserError)
