from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from muralist.core.errors import UserError
from muralist.data import packed
from muralist.data.decode import center_crop
from muralist.data.packed import PackedSource
from muralist.data.source import read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.tools import pack as packing
from muralist.tools.pack import pack
from tests.support.images import EncodedSample, contents, encoded, encoded_samples, noise, write_csv, write_folder

SIZE = 16
COUNT = 24


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return write_csv(tmp_path / "source" / "list.csv", encoded_samples(COUNT))


@pytest.fixture
def place(table: Path, tmp_path: Path) -> Path:
    """A finished pack of the table."""
    pack(str(table), tmp_path / "packed", SIZE, workers=1)
    return tmp_path / "packed"


def check(source: PackedSource, expected: list[EncodedSample]) -> None:
    assert len(source) == len(expected)
    images, labels, captions = source.read_batch(np.arange(len(expected)))
    for slot, sample in enumerate(expected):
        assert np.array_equal(images[slot], center_crop(sample.image, SIZE))
    assert labels.tolist() == [sample.label for sample in expected]
    assert captions == [sample.caption for sample in expected]


def test_packed_images_are_the_cropped_ones_bit_for_bit(table: Path, tmp_path: Path) -> None:
    report = pack(str(table), tmp_path / "packed", SIZE, workers=1)
    check(PackedSource(tmp_path / "packed", SIZE), encoded_samples(COUNT))
    assert (report.images, report.broken, report.held_out, report.finished_before) == (COUNT, 0, 0, False)
    assert report.bytes == (tmp_path / "packed" / "00000.arrow").stat().st_size
    assert sorted(contents(tmp_path / "packed")) == ["00000.arrow", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "source"]


def test_the_bytes_do_not_depend_on_the_number_of_workers(table: Path, tmp_path: Path) -> None:
    (table.parent / "files" / "5.png").write_bytes(b"broken")
    for workers in (1, 2):
        pack(str(table), tmp_path / str(workers), SIZE, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_the_files_are_plain_arrow_with_a_manifest(table: Path, place: Path) -> None:
    with pyarrow.ipc.open_file(place / "00000.arrow") as file:
        content = file.read_all()
    assert content.schema.names == ["image", "label", "caption"]
    assert [str(kind) for kind in content.schema.types] == [f"fixed_size_binary[{SIZE * SIZE * 3}]", "int32", "string"]
    assert content["image"][3].as_py() == center_crop(encoded_samples(COUNT)[3].image, SIZE).tobytes()
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["img_size"], manifest["version"], manifest["source"]) == (SIZE, 1, str(table))
    assert manifest["label_names"] == ["0", "1", "2"]
    assert manifest["source_fingerprint"] == open_source(str(table), SIZE).fingerprint()
    assert [(file["name"], file["rows"]) for file in manifest["files"]] == [("00000.arrow", COUNT)]


def test_broken_images_are_left_out_and_named(table: Path, tmp_path: Path) -> None:
    files = table.parent / "files"
    (files / "5.png").write_bytes(b"no image")
    (files / "11.png").write_bytes((files / "11.png").read_bytes()[:-80])
    report = pack(str(table), tmp_path / "packed", SIZE, workers=2)
    intact = [sample for number, sample in enumerate(encoded_samples(COUNT)) if number not in (5, 11)]
    check(PackedSource(tmp_path / "packed", SIZE), intact)
    assert (report.images, report.broken) == (COUNT - 2, 2)
    lines = [line.split("\t") for line in (tmp_path / "packed" / "broken.txt").read_text().splitlines()]
    assert [name for name, _ in lines] == [str(files / "5.png"), str(files / "11.png")]
    assert lines[0][1] == "no image decoder recognizes its content"
    assert "truncated" in lines[1][1]


def test_a_data_set_of_broken_images_is_an_error(table: Path, tmp_path: Path) -> None:
    for path in (table.parent / "files").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"All {COUNT} images .* broken.*0\.png: the file is empty"):
        pack(str(table), tmp_path / "packed", SIZE, workers=1)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_cannot_be_read_stops_the_pack(workers: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", encoded_samples(COUNT))
    (folder / "class_1" / "lost.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"lost\.png could not be read"):
        pack(str(folder), tmp_path / "packed", SIZE, workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_many_batches_and_files(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SIZE * SIZE * 3
    monkeypatch.setattr(packed, "_BATCH_BYTES", 5 * row)
    monkeypatch.setattr(packing, "_CHUNK_BYTES", 3 * row)
    monkeypatch.setattr(packed, "_FOOTER_BYTES", 1000)
    monkeypatch.setattr(packed, "_MAX_FILE_BYTES", 12 * row + 1000)
    (table.parent / "files" / "2.png").write_bytes(b"broken")
    pack(str(table), tmp_path / "packed", SIZE, workers=1)
    source = PackedSource(tmp_path / "packed", SIZE)
    assert [file.rows for file in source.manifest.files] == [10, 10, 3]
    assert all(file.bytes <= 12 * row + 1000 for file in source.manifest.files)
    expected = [sample for number, sample in enumerate(encoded_samples(COUNT)) if number != 2]
    check(source, expected)
    order = np.random.default_rng(0).permutation(len(expected))
    images, labels, captions = read_batch(source, order)
    for slot, index in enumerate(order.tolist()):
        assert np.array_equal(images[slot], center_crop(expected[index].image, SIZE))
        assert (labels[slot], captions[slot]) == expected[index][1:]
        assert np.array_equal(source.read(index).image, images[slot])


def test_reading_a_pack(place: Path) -> None:
    source = PackedSource(place, SIZE)
    for index in (-1, COUNT):
        with pytest.raises(IndexError):
            source.read(index)
    images, labels, captions = source.read_batch(np.array([], dtype=np.int64))
    assert (images.shape, labels.shape, captions) == ((0, SIZE, SIZE, 3), (0,), [])
    source.read(0).image[:] = 0  # samples are writable copies
    assert np.array_equal(source.read(0).image, center_crop(encoded_samples(COUNT)[0].image, SIZE))


def test_no_file_stays_open(place: Path) -> None:
    source = PackedSource(place, SIZE)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    source.read(0)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert len(pickle.dumps(source)) < 2000


def test_the_held_out_part_is_packed_too(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(9))
    write_folder(tmp_path / "val", encoded_samples(6, first=70))
    report = pack(str(train), tmp_path / "packed", SIZE, workers=1)
    assert (report.images, report.held_out) == (9, 6)
    source, held_out = (opener(str(tmp_path / "packed"), SIZE) for opener in (open_source, open_held_out))
    assert source is not None and held_out is not None
    assert source.label_names == held_out.label_names == ["class_0", "class_1", "class_2"]
    original = open_held_out(str(train), SIZE)
    assert original is not None
    for index in range(6):
        assert np.array_equal(held_out.read(index).image, original.read(index).image)
        assert held_out.read(index).label == original.read(index).label
    assert open_held_out(str(tmp_path / "packed" / "held_out"), SIZE) is None


def test_a_finished_pack_is_not_made_again(table: Path, place: Path) -> None:
    before = {path: path.stat() for path in place.iterdir()}
    report = pack(str(table), place, SIZE, workers=1)
    assert report.finished_before and report.images == COUNT
    assert {path: path.stat() for path in place.iterdir()} == before


def test_an_occupied_destination_is_refused(table: Path, tmp_path: Path) -> None:
    place = tmp_path / "packed"
    place.mkdir()
    pack(str(table), place, SIZE, workers=1)  # an empty folder is no obstacle
    with pytest.raises(UserError, match=r"another pack: of \S*list\.csv at 16 pixels"):
        pack(str(table), place, 8, workers=1)
    shutil.copy(table.parent / "files" / "0.png", table.parent / "files" / "1.png")
    with pytest.raises(UserError, match="have changed since"):
        pack(str(table), place, SIZE, workers=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="exists and is not empty"):
        pack(str(table), tmp_path / "other", SIZE, workers=1)
    assert contents(tmp_path / "other") == {"thesis.txt": b"precious"}


def test_a_pack_without_the_held_out_part_is_another_pack(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(6))
    with pytest.raises(UserError, match="inside the data set"):
        pack(str(train), train / "packed", SIZE, workers=1)
    pack(str(train), tmp_path / "packed", SIZE, workers=1)
    write_folder(tmp_path / "val", encoded_samples(6))
    with pytest.raises(UserError, match="another pack"):
        pack(str(train), tmp_path / "packed", SIZE, workers=1)


def test_too_little_disk_space_is_refused(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 0))
    with pytest.raises(UserError, match=r"need 0\.0 GB, but .* has 0\.0 GB free"):
        pack(str(table), tmp_path / "packed", SIZE, workers=1)
    assert not (tmp_path / "packed").exists()


def start_pack(place: Path, workers: int, count: int = 40) -> subprocess.Popen[bytes]:
    """Start to pack large images in another process, and return in the middle of it."""
    (place / "source").mkdir()
    first = place / "source" / "000.png"
    first.write_bytes(encoded(noise(0, 700, 700), compress_level=0))
    for number in range(1, count):
        (place / "source" / f"{number:03}.png").hardlink_to(first)
    command = (  # SIGINT as a terminal would have it: what a shell starts in the background ignores it
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from muralist.tools.pack import pack; pack('source', 'packed', 256, workers={workers})"
    )
    child = subprocess.Popen([sys.executable, "-c", command], cwd=place, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (place / ".packed.packing").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.005)
    time.sleep(0.05)
    return child


def test_a_killed_pack_leaves_no_finished_folder_and_can_be_repeated(tmp_path: Path) -> None:
    child = start_pack(tmp_path, workers=1)
    child.send_signal(signal.SIGSTOP)
    folder, workplace = str(tmp_path / "source"), tmp_path / ".packed.packing"
    with pytest.raises(UserError, match="Another process is packing"):
        pack(folder, tmp_path / "packed", 256, workers=1)
    child.kill()
    assert child.wait(20) == -signal.SIGKILL
    assert not (tmp_path / "packed").exists()
    assert workplace.exists() and not (workplace / "manifest.json").exists()
    (workplace / "00007.arrow").write_bytes(b"half a file")
    assert pack(folder, tmp_path / "packed", 256, workers=1).images == 40
    assert sorted(contents(tmp_path / "packed")) == ["00000.arrow", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "source"]


def test_an_interrupted_pack_cleans_up(tmp_path: Path) -> None:
    child = start_pack(tmp_path, workers=2, count=400)  # many: this process may be kept waiting before it interrupts
    child.send_signal(signal.SIGINT)
    assert child.wait(20) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_damage_is_found(place: Path) -> None:
    with pytest.raises(UserError, match="packed at 16 pixels, but --img_size is 32"):
        open_source(str(place), 32)
    file, whole = place / "00000.arrow", (place / "00000.arrow").read_bytes()

    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"00000\.arrow has {len(whole) - 1:,} bytes instead of {len(whole):,}"):
        open_source(str(place), SIZE)
    file.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match=r"00000\.arrow is damaged"):
        PackedSource(place, SIZE).read(0)
    file.unlink()
    with pytest.raises(UserError, match=r"00000\.arrow is missing"):
        open_source(str(place), SIZE)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "manifest of .* is damaged"), (None, "no manifest.json"), ('"version": 2', "version 2")],
)
def test_a_damaged_manifest_is_not_a_folder_without_images(content: str | None, message: str, place: Path) -> None:
    manifest = place / "manifest.json"
    if content is None:
        manifest.unlink()
    else:
        changed = manifest.read_text().replace('"version": 1', content)
        manifest.write_text(changed if "version" in content else content)
    with pytest.raises(UserError, match=message):
        open_source(str(place), SIZE)
