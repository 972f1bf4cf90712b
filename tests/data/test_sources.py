"""Every kind of source: the same samples, fingerprints and shapes, and mistakes explained."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, center_crop
from muralist.data.packed import PackedSource
from muralist.data.source import CachedSource, Sample, Source, cache_in_memory, contents_of, read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.demo.driving_world import DrivingWorld
from muralist.tools.pack import pack
from tests.data.driving_files import write_arrow, write_captioned_folder, write_index
from tests.support.images import (
    EncodedSample,
    encoded_samples,
    noise,
    write_csv,
    write_files,
    write_folder,
    write_jsonl,
    write_parquet,
    write_tar,
)

SIZE = 16
TALL = (24, 16)  # height, width
COUNT = 10


def write_shards(folder: Path, chosen: list[EncodedSample], suffix: str) -> Path:
    folder.mkdir()
    half = len(chosen) // 2
    for number, part in enumerate((chosen[:half], chosen[half:])):
        path = folder / f"data-{number:04}.{suffix}"
        if suffix == "tar":
            write_tar(path, part, first=number * half, text="json" if number else "txt")
        elif suffix == "arrow":
            write_arrow(path, part, labelled=True)
        else:
            write_parquet(path, part, hub=False)
    return folder


def write_packed(folder: Path, chosen: list[EncodedSample]) -> Path:
    pack(str(write_csv(folder / "list.csv", chosen)), folder / "packed", SIZE, workers=1)
    return folder / "packed"


def write_indexed(folder: Path, chosen: list[EncodedSample]) -> Path:
    """The last image lies first in its file, and images that are not chosen lie between."""
    others = encoded_samples(2, first=90)
    write_arrow(folder / "arrows" / "a.arrow", [chosen[-1], *others, *chosen[:4]], labelled=True)
    write_arrow(folder / "arrows" / "b.arrow", [*chosen[4:-1], *others], labelled=True)
    rows = [3, 4, 5, 6, *range(7, 7 + len(chosen) - 5), 0]
    sizes = [7, len(chosen) - 3]
    return write_index(folder / "jsons" / "x.json", ["./arrows/a.arrow", "./arrows/b.arrow"], sizes, rows)


# Each writes the same images; the labels are 0, 1, 2 in order.
WRITERS: dict[str, Callable[[Path, list[EncodedSample]], Path]] = {
    "folder": lambda place, chosen: write_folder(place / "images", chosen),
    "csv": lambda place, chosen: write_csv(place / "list.csv", chosen),
    "tsv": lambda place, chosen: write_csv(place / "list.tsv", chosen, delimiter="\t"),
    "jsonl": lambda place, chosen: write_jsonl(place / "list.jsonl", chosen),
    "tar": lambda place, chosen: write_tar(place / "all.tar", chosen),
    "folder of tars": lambda place, chosen: write_shards(place / "tars", chosen, "tar"),
    "tar pattern": lambda place, chosen: write_shards(place / "tars", chosen, "tar") / "data-{0000..0001}.tar",
    "parquet": lambda place, chosen: write_parquet(place / "all.parquet", chosen),
    "folder of parquets": lambda place, chosen: write_shards(place / "parquets", chosen, "parquet"),
    "arrow": lambda place, chosen: write_arrow(place / "all.arrow", chosen, labelled=True),
    "folder of arrows": lambda place, chosen: write_shards(place / "arrows", chosen, "arrow"),
    "index": write_indexed,
    "folder with texts": lambda place, chosen: write_captioned_folder(place / "images", chosen, metadata=False),
    "folder with metadata": lambda place, chosen: write_captioned_folder(place / "images", chosen, metadata=True),
    "packed": write_packed,
}


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def same(item: Sample, other: Sample) -> bool:
    return np.array_equal(item.image, other.image) and item[1:] == other[1:]


def test_every_source_gives_the_same_pixels_labels_and_captions(kind: str, tmp_path: Path) -> None:
    chosen = encoded_samples(COUNT)
    path = str(WRITERS[kind](tmp_path, chosen))
    source = open_source(path, SIZE)
    assert (len(source), len(source.label_names)) == (COUNT, 3)
    items = [source.read(index) for index in range(COUNT)]
    for item, sample in zip(items, chosen, strict=True):
        assert item.image.dtype == np.uint8 and item.image.flags.writeable
        assert np.array_equal(item.image, center_crop(sample.image, SIZE))
        assert (item.label, item.caption) == (sample.label, "" if kind == "folder" else sample.caption)
    indices = [7, 0, 9, 3, 3, 8, 1]
    images, labels, captions = read_batch(source, np.array(indices))
    assert images.shape == (7, SIZE, SIZE, 3) and images.dtype == np.uint8 and labels.dtype == np.int64
    for slot, index in enumerate(indices):
        assert same(Sample(images[slot], int(labels[slot]), captions[slot]), items[index])
    copy: Source = pickle.loads(pickle.dumps(source))  # whatever it opened must not travel
    assert copy.label_names == source.label_names and copy.fingerprint() == source.fingerprint()
    assert all(same(copy.read(index), items[index]) for index in (9, 0, 4))
    if kind != "packed":
        upright = open_source(path, TALL)
        for index, sample in enumerate(chosen):
            assert np.array_equal(upright.read(index).image, center_crop(sample.image, TALL))
        assert upright.fingerprint() == source.fingerprint()


def test_a_forked_process_reads_the_same(kind: str, tmp_path: Path) -> None:
    source = open_source(str(WRITERS[kind](tmp_path, encoded_samples(COUNT))), SIZE)
    expected = [source.read(index) for index in range(COUNT)]
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send([source.read(index) for index in range(COUNT)]))
    child.start()
    assert receiver.poll(20)
    assert all(same(item, other) for item, other in zip(receiver.recv(), expected, strict=True))
    child.join(20)
    assert child.exitcode == 0


def test_the_fingerprint_follows_the_data_and_not_the_place(kind: str, tmp_path: Path) -> None:
    prints = []
    for name, first in {"one": 0, "two": 0, "other": 50}.items():
        (tmp_path / name).mkdir()
        path = WRITERS[kind](tmp_path / name, encoded_samples(COUNT, first))
        prints.append(open_source(str(path), SIZE).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert len(prints[0]) == 16


def test_the_order_is_the_same_in_every_process(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", encoded_samples(COUNT))
    program = "import sys; from muralist.data.sources import *; print(open_source(sys.argv[1], 16).fingerprint())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {open_source(str(folder), SIZE).fingerprint()}


def test_reading_data_does_not_import_torch(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "all.parquet", encoded_samples(3))
    program = (
        "import sys; from muralist.tools.pack import *; from muralist.data.sources import *;"
        "open_source(sys.argv[1], 16).read(0); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


# -- folders


def test_class_folders_are_labels_in_sorted_order(tmp_path: Path) -> None:
    for name in ("zebra", "Ape", "bee", "bee-b", "bee.c"):
        (tmp_path / name / "more").mkdir(parents=True)
        for image in ("0.jpeg", "more/x.jpeg"):
            noise(0, 9, 9).save(tmp_path / name / image)
    (tmp_path / "README.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "bee" / ".hidden.png").write_bytes(b"")
    source = open_source(str(tmp_path), SIZE)
    assert source.label_names == ["Ape", "bee", "bee-b", "bee.c", "zebra"]
    assert [source.read(index).label for index in range(len(source))] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_flat_folder_has_no_classes(tmp_path: Path) -> None:
    for number in range(3):
        noise(number, 20, 30).save(tmp_path / f"{number}.bmp")
    source = open_source(str(tmp_path), SIZE)
    assert (len(source), source.label_names, source.read(2).label) == (3, [], 0)
    assert np.array_equal(source.read(1).image, center_crop(noise(1, 20, 30), SIZE))


def test_links_to_class_folders_are_followed_without_cycles(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    noise(0, 9, 9).save(elsewhere / "a.png")
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "linked").symlink_to(elsewhere)
    assert open_source(str(folder), SIZE).label_names == ["linked"]
    (elsewhere / "round").symlink_to(folder)
    with pytest.raises(UserError, match="link"):
        open_source(str(folder), SIZE)


def test_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    noise(0, 9, 9).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"b\.png could not be read"):
        open_source(str(tmp_path), SIZE).read(1)


def test_file_names_need_not_be_unicode(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe.png"
    with open(path, "wb") as file:  # noqa: PTH123
        noise(1, SIZE, SIZE).save(file, "PNG")
    source = open_source(str(tmp_path), SIZE)
    assert np.array_equal(source.read(0).image, np.asarray(noise(1, SIZE, SIZE)))
    assert len(source.fingerprint()) == 16


# -- tables


def test_paths_of_a_table_may_lead_out_of_its_folder(tmp_path: Path) -> None:
    names = write_files(tmp_path, encoded_samples(2))
    (tmp_path / "lists").mkdir()
    table = tmp_path / "lists" / "a.csv"
    table.write_text(f"img_path,text_zh\n../{names[0]},一\n{tmp_path / names[1]},二\n", encoding="utf-8")
    source = open_source(str(table), SIZE)
    assert [source.read(index).caption for index in range(2)] == ["一", "二"]
    assert np.array_equal(source.read(1).image, center_crop(encoded_samples(2)[1].image, SIZE))
    assert (source.label_names, source.read(0).label) == ([], 0)


def test_missing_files_are_found_among_many_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    names = [f"files/{number}.png" for number in range(600)]
    for name in names:
        (tmp_path / name).touch()
    table = tmp_path / "a.csv"
    table.write_text("\n".join(["path", *names]))
    assert len(open_source(str(table), SIZE)) == 600
    (tmp_path / names[498]).unlink()
    with pytest.raises(UserError, match=r"Line 500 of .* files/498\.png.*1 of 600 rows"):
        open_source(str(table), SIZE)


# -- Parquet


def test_class_names_of_the_hub_are_kept(tmp_path: Path) -> None:
    chosen = encoded_samples(COUNT)
    hub = open_source(str(write_parquet(tmp_path / "a.parquet", chosen)), SIZE)
    plain = open_source(str(write_parquet(tmp_path / "b.parquet", chosen, hub=False)), SIZE)
    assert hub.label_names == ["class_0", "class_1", "class_2"]
    assert plain.label_names == ["0", "1", "2"]


def test_parquet_without_images_lists_its_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"url": ["a"], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"columns are url \(string\), label \(int64\)"):
        open_source(str(tmp_path / "a.parquet"), SIZE)


# -- tar files


@pytest.mark.parametrize(
    ("name", "write", "broken"),
    [("a.tar", write_tar, r"000001\.png in \S*a\.tar"), ("a.parquet", write_parquet, r"row 1 of \S*a\.parquet")],
)
def test_a_broken_image_is_named(name: str, write: Callable[..., Path], broken: str, tmp_path: Path) -> None:
    chosen = encoded_samples(3)
    chosen[1] = chosen[1]._replace(png=chosen[1].png[:-60])
    source = open_source(str(write(tmp_path / name, chosen)), SIZE)
    with pytest.raises(ImageDecodeError, match=rf"{broken} is a broken image"):
        source.read(1)
    assert source.read(2).label == chosen[2].label


def test_more_tar_files_than_may_be_open(tmp_path: Path) -> None:
    chosen = encoded_samples(70)
    for number, sample in enumerate(chosen):
        write_tar(tmp_path / f"{number:02}.tar", [sample], first=number)
    source = open_source(str(tmp_path), SIZE)
    for index in (*range(70), 0, 69):
        assert np.array_equal(source.read(index).image, center_crop(chosen[index].image, SIZE))


def test_metadata_beside_tar_files_is_not_the_data_set(tmp_path: Path) -> None:
    write_tar(tmp_path / "00000.tar", encoded_samples(4))
    (tmp_path / "00000.parquet").write_text("img2dataset writes urls here")
    (tmp_path / "00000_stats.json").write_text("{}")
    assert len(open_source(str(tmp_path), SIZE)) == 4


# -- arrays


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("names", [("train_x", "train_y"), ("images", "labels"), ("x", "y"), ("arr_0", "arr_1")])
def test_arrays(layout: str, names: tuple[str, str], tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 20, 24, 3), dtype=np.uint8)
    stored = images if layout == "NHWC" else images.transpose(0, 3, 1, 2)
    np.savez_compressed(tmp_path / "a.npz", **{names[0]: stored, names[1]: np.array([2, 0, 1, 2], np.uint8)})
    source = open_source(str(tmp_path / "a.npz"), SIZE)
    assert source.label_names == ["0", "1", "2"]
    for index in range(4):
        assert np.array_equal(source.read(index).image, center_crop(Image.fromarray(images[index]), SIZE))
    assert [source.read(index).label for index in range(4)] == [2, 0, 1, 2]
    assert len(pickle.dumps(source)) < 2000  # loader processes load the pixels themselves
    assert same(pickle.loads(pickle.dumps(source)).read(3), source.read(3))
    assert open_held_out(str(tmp_path / "a.npz"), SIZE) is None


# -- held-out parts


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_a_folder_beside_train_is_held_out_with_the_labels_of_train(name: str, tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(COUNT))
    assert open_held_out(str(train), SIZE) is None
    chosen = [sample for sample in encoded_samples(6, first=30) if sample.label == 2]
    write_folder(tmp_path / name, chosen)
    held_out = open_held_out(str(train), SIZE)
    assert held_out is not None
    assert held_out.label_names == ["class_0", "class_1", "class_2"]
    assert [held_out.read(index).label for index in range(len(held_out))] == [2, 2]
    assert np.array_equal(held_out.read(0).image, center_crop(chosen[0].image, SIZE))
    assert open_held_out(str(tmp_path / name), SIZE) is None


def test_held_out_classes_must_be_known(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(COUNT))
    write_folder(tmp_path / "val", encoded_samples(COUNT))
    (tmp_path / "val" / "class_1").rename(tmp_path / "val" / "klass_1")
    with pytest.raises(UserError, match=r"class folder klass_1.* Did you mean class_1\?"):
        open_held_out(str(train), SIZE)
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    noise(0, 9, 9).save(tmp_path / "val" / "a.png")
    with pytest.raises(UserError, match="no sub-folders"):
        open_held_out(str(train), SIZE)


@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_files_named_after_parts_are_kept_apart(suffix: str, tmp_path: Path) -> None:
    write = write_tar if suffix == "tar" else write_parquet
    write(tmp_path / f"train-0.{suffix}", encoded_samples(COUNT))
    write(tmp_path / f"test-0.{suffix}", encoded_samples(4, first=40))
    assert len(open_source(str(tmp_path), SIZE)) == COUNT
    held_out = open_held_out(str(tmp_path), SIZE)
    assert held_out is not None and len(held_out) == 4
    write(tmp_path / f"validation-0.{suffix}", encoded_samples(3, first=60))
    held_out = open_held_out(str(tmp_path), SIZE)
    assert held_out is not None
    assert np.array_equal(held_out.read(0).image, center_crop(encoded_samples(3, first=60)[0].image, SIZE))
    write(tmp_path / f"validation-0.{suffix}", [encoded_samples(1)[0]._replace(label=3)])
    with pytest.raises(UserError, match=r"label 3, but .* 3 classes 0 to 2"):
        open_held_out(str(tmp_path), SIZE)


def test_the_embedded_data_set_has_both_parts() -> None:
    source, held_out = open_source("driving_world", 32), open_held_out("driving_world", 32)
    assert held_out is not None and len(held_out) == 512
    assert held_out.label_names == source.label_names
    assert held_out.fingerprint() != source.fingerprint()
    assert not np.array_equal(held_out.read(0).image, source.read(0).image)


def test_the_label_of_a_json_member_gives_way_to_a_cls_member(tmp_path: Path) -> None:
    for order in (("a.json", "a.cls"), ("a.cls", "a.json")):
        members = {"a.json": json.dumps({"label": 5, "prompt": "a cat"}).encode(), "a.cls": b"2"}
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for name, data in [("a.webp", encoded_samples(1)[0].png), *((name, members[name]) for name in order)]:
                (tmp_path / "member").write_bytes(data)
                archive.add(tmp_path / "member", name)
        item = open_source(str(tmp_path / "a.tar"), SIZE).read(0)
        assert (item.label, item.caption) == (2, "a cat")


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
    "identifier as label": (file_with("a.csv", f"path,label\nfiles/0.png,{10**30}\n"), "labels are from 0 to 999,999"),
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


def test_the_held_out_images_of_an_archive_as_rectangles(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 20, 24, 3), dtype=np.uint8)
    path = str(tmp_path / "a.npz")
    np.savez(path, train_x=images, train_y=np.array([2, 0, 1, 0]), test_x=images[::-1], test_y=np.array([1, 0, 1, 1]))
    source, held_out = open_source(path, (10, 24)), open_held_out(path, (10, 24))
    assert held_out is not None
    assert np.array_equal(source.read(1).image, images[1, 5:15])
    assert np.array_equal(held_out.read(0).image, images[3, 5:15])
    assert held_out.label_names == source.label_names and held_out.read(0).label == 1
    assert source.fingerprint() != held_out.fingerprint()


def test_the_cache_counts_the_pixels_of_rectangles() -> None:
    world = DrivingWorld((16, 1024))
    assert isinstance(cache_in_memory(world, 20_000, (16, 1024), workers=0), CachedSource)
    assert cache_in_memory(world, 20_000, (32, 1024), workers=0) is world


def test_packed_rectangles(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(9))
    write_folder(tmp_path / "val", encoded_samples(3, first=70))
    report = pack(str(train), tmp_path / "packed", TALL, workers=1)
    assert (report.images, report.held_out) == (9, 3)
    assert json.loads((tmp_path / "packed" / "manifest.json").read_text())["img_size"] == list(TALL)
    source, held_out = open_source(str(tmp_path / "packed"), TALL), open_held_out(str(tmp_path / "packed"), TALL)
    assert isinstance(source, PackedSource) and held_out is not None
    images, _, _ = read_batch(source, np.arange(9))
    assert np.array_equal(images, np.stack([center_crop(sample.image, TALL) for sample in encoded_samples(9)]))
    assert held_out.read(0).image.shape == (*TALL, 3)
    with pyarrow.ipc.open_file(tmp_path / "packed" / "00000.arrow") as file:
        assert str(file.schema.field("image").type) == f"fixed_size_binary[{24 * 16 * 3}]"
    assert pack(str(train), tmp_path / "packed", TALL, workers=1).finished_before
    for other, words in ((16, "16"), ((16, 24), "16 x 24")):
        with pytest.raises(UserError, match=f"packed at 24 x 16 pixels, but --img_size is {words}"):
            open_source(str(tmp_path / "packed"), other)
        with pytest.raises(UserError, match="another pack: of .* at 24 x 16 pixels"):
            pack(str(train), tmp_path / "packed", other, workers=1)


def test_a_pack_of_equal_sides_is_that_of_a_square(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "list.csv", encoded_samples(4))
    for name, size in {"one": 16, "two": (16, 16)}.items():
        pack(str(table), tmp_path / name, size, workers=1)
    for file in ("00000.arrow", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert len(open_source(str(tmp_path / "one"), (16, 16))) == 4


def test_missing_captions_and_skipped_files_are_counted(tmp_path: Path) -> None:
    image = BytesIO()
    Image.new("RGB", (20, 20)).save(image, "PNG")
    members = {"0.png": image.getvalue(), "0.txt": b"a road", "1.png": image.getvalue(), "2.heic": b"", "3.avif": b""}
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in members.items():
            (tmp_path / "folder" / name).write_bytes(content)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
    (tmp_path / "folder" / "notes.txt").write_text("not a caption")
    (tmp_path / "table.csv").write_text("image,caption\nfolder/0.png,a road\nfolder/1.png, \nfolder/1.png,\n")
    kinds = {".heic": 1, ".avif": 1}
    expected = {"folder": (1, kinds | {".txt": 1}), "a.tar": (1, kinds), "table.csv": (2, {})}
    for name, contents in expected.items():
        assert contents_of(open_source(str(tmp_path / name), SIZE)) == contents, name
    both = open_source([str(tmp_path / "folder"), str(tmp_path / "a.tar")], SIZE)
    assert contents_of(both) == (2, {".heic": 2, ".avif": 2, ".txt": 1})
    captioned = open_source(str(tmp_path / "folder"), SIZE, "A photo")
    assert contents_of(captioned).uncaptioned == 0
