from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muralist.core.errors import UserError
from muralist.data.sources import open_source
from tests.support.images import encoded_samples, noise, write_files, write_tar

SIZE = 16


def folder_with(*names: str) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        for name in names:
            path = place / "data" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                path.mkdir(exist_ok=True)
            elif name.endswith(".png"):
                noise(0, 9, 9).save(path)
            else:
                path.write_text("text")
        return str(place / "data")

    return write


def file_with(name: str, text: str) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        (place / name).write_text(text, encoding="utf-8")
        write_files(place, encoded_samples(3))
        return str(place / name)

    return write


def arrays_with(**arrays: np.ndarray) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        np.savez(place / "a.npz", **arrays)
        return str(place / "a.npz")

    return write


def tar_with(**members: bytes) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        with tarfile.open(place / "a.tar", "w") as archive:
            for name, data in members.items():
                (place / "member").write_bytes(data)
                archive.add(place / "member", name.replace("_", "."))
        return str(place / "a.tar")

    return write


def compressed_tar(place: Path) -> str:
    with tarfile.open(place / "a.tar", "w:gz") as archive:
        archive.add(__file__, "x")
    return str(place / "a.tar")


def short_tar(place: Path) -> str:
    path = write_tar(place / "a.tar", encoded_samples(3))
    path.write_bytes(path.read_bytes()[:4000])
    return str(path)


def metadata(csv: str = "", jsonl: str = "") -> Callable[[Path], str]:
    def write(place: Path) -> str:
        folder = folder_with("a.png")(place)
        for name, text in {"metadata.csv": csv, "metadata.jsonl": jsonl}.items():
            if text:
                (place / "data" / name).write_text(text)
        return folder

    return write


PNG = encoded_samples(1)[0].png
MISTAKES: dict[str, tuple[Callable[[Path], str], str]] = {
    "misspelt": (lambda place: folder_with("train/a.png")(place) + "/trian", r"no entry trian. Did you mean train\?"),
    "missing parent": (lambda place: str(place / "dta" / "train"), r"The folder \S*/dta does not exist"),
    "missing shard": (lambda place: str(place / "a-{0..3}.tar"), r"a-0\.tar was not found.* Give a folder, a file,"),
    "no images": (folder_with("a/b.txt", "c.heic", "d.heic"), r"\.jpg .*found 2 x \.heic, 1 x \.txt"),
    "empty folder": (folder_with("a/"), "found no files at all"),
    "empty class": (folder_with("a/b.png", "c/d.txt"), r"class folder \S*/c has no images"),
    "images and classes": (folder_with("a/b.png", "c.png"), r"both images \(c\.png\) and sub-folders"),
    "parts": (folder_with("train/a/b.png", "val/a/b.png"), r"Give \S*/data/train"),
    "tars and classes": (folder_with("a/b.png", "c.tar"), r"both \.tar files \(c\.tar\) and a"),
    "unknown file": (file_with("a.xlsx", ""), r"not a kind of file .*\.csv"),
    "no image column": (file_with("a.csv", "photo,text\n1.png,x\n"), "columns are photo, text"),
    "missing file": (
        file_with("a.csv", "path\nfiles/0.png\nfiles/7.png\n"),
        r"Line 3 of .* names files/7\.png.*1 of 2",
    ),
    "no image in row": (file_with("a.csv", 'path,text\nfiles/0.png,x\n"",y\n'), "no image in line 3"),
    "unquoted comma": (file_with("a.csv", "path,text\nfiles/0.png,red, blue\n"), "Line 2 .* 3 fields.* header has 2"),
    "word as label": (file_with("a.csv", "path,label\nfiles/0.png,cat\n"), "label 'cat' in line 2 .* an integer"),
    "negative label": (file_with("a.csv", "path,label\nfiles/0.png,-1\n"), "label -1"),
    "identifier as label": (file_with("a.csv", f"path,label\nfiles/0.png,{10**30}\n"), "at most 1,000,000"),
    "header only": (file_with("a.csv", "path,label\n"), "has no rows"),
    "empty table": (file_with("a.tsv", ""), "has no rows"),
    "no JSON": (file_with("a.jsonl", '{"path": "files/0.png"}\n{path}\n'), "Line 2 .* not JSON"),
    "no object": (file_with("a.jsonl", "[1]\n"), "not a JSON object"),
    "fraction as label": (file_with("a.jsonl", '{"path": "files/0.png", "label": 1.5}\n'), r"label 1\.5"),
    "truth as label": (file_with("a.jsonl", '{"path": "files/0.png", "label": true}\n'), "label True"),
    "some labels": (
        file_with("a.jsonl", '{"path": "files/0.png"}\n{"path": "files/1.png", "label": 1}\n'),
        "Some rows .* line 2",
    ),
    "list as caption": (file_with("a.jsonl", '{"path": "files/0.png", "text": ["a"]}\n'), r"caption .* \['a'\]"),
    "half a character": (file_with("a.jsonl", r'{"path": "files/0.png", "text": "\ud800"}'), "not valid Unicode"),
    "compressed tar": (compressed_tar, "compressed"),
    "short tar": (short_tar, "could not be read"),
    "tar without images": (tar_with(a_txt=b"x"), "no images in"),
    "two images": (tar_with(a_png=PNG, a_jpg=PNG), r"a\.png and a\.jpg"),
    "tar word as label": (tar_with(a_png=PNG, a_cls=b"cat"), "label 'cat'"),
    "some tar labels": (tar_with(a_png=PNG, a_cls=b"1", b_png=PNG), r"first change is at b\.png"),
    "tar text not UTF-8": (tar_with(a_png=PNG, a_txt=b"\xff"), "not valid text"),
    "no npz": (file_with("a.npz", "text"), r"is not an \.npz archive, or is truncated.*numpy\.savez"),
    "objects": (arrays_with(x=np.array([{}, {}])), r"not be read as an \.npz.*numpy\.savez"),
    "no array": (arrays_with(pixels=np.zeros(3)), "arrays are pixels"),
    "float pixels": (arrays_with(x=np.zeros((2, 4, 4, 3))), "float64, not uint8"),
    "odd shape": (arrays_with(x=np.zeros((2, 4, 4), np.uint8)), r"shape \(2, 4, 4\)"),
    "ambiguous shape": (arrays_with(x=np.zeros((2, 3, 8, 3), np.uint8)), "one axis of 3 for the color channels"),
    "empty array": (arrays_with(x=np.zeros((0, 4, 4, 3), np.uint8)), "is empty"),
    "label count": (arrays_with(x=np.zeros((2, 4, 4, 3), np.uint8), y=np.zeros(3, int)), r"shape \(3,\).* 2 images"),
    "float labels": (arrays_with(x=np.zeros((2, 4, 4, 3), np.uint8), y=np.zeros(2)), "not integers"),
    "no parquet": (file_with("a.parquet", "text"), "Parquet file .* could not be read"),
    "no arrow": (file_with("a.arrow", "text"), "Arrow file .* could not be read"),
    "arrows and images": (folder_with("a.arrow", "b.png"), r"both \.arrow files \(a\.arrow\) and b\.png"),
    "no index": (file_with("a.json", "{"), r"index \S*a\.json could not be read"),
    "another JSON file": (file_with("a.json", '{"images": []}'), "no arrow_files.* fields are images"),
    "a JSON list": (file_with("a.json", "[1]"), "no arrow_files.* fields are none"),
    "metadata without names": (metadata("photo,text\na.png,x\n"), r"no file_name in line 2 of \S*csv.*photo, text"),
    "metadata of a missing file": (metadata("file_name,text\na.png,x\nb.png,y\n"), r"Line 3 of .* names b\.png, but"),
    "metadata out of the folder": (metadata("file_name,text\n../a.png,x\n"), r"Line 2 of .* names \.\./a\.png, but"),
    "metadata with a comma": (metadata("file_name,text\na.png,x, y\n"), "Line 2 .* 3 fields.* header has 2"),
    "metadata in two tables": (
        metadata("file_name\na.png\n", '{"file_name": "a.png"}'),
        "both metadata.csv and metadata",
    ),
    "metadata with lists": (metadata(jsonl='{"file_name": "a.png", "text": ["x"]}'), r"a\.png is not text but \['x'\]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_opening_explains_what_is_wrong(mistake: str, tmp_path: Path) -> None:
    write, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        open_source(write(tmp_path), SIZE)
