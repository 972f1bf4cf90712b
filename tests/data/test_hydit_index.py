"""HunyuanDiT's own files: its CSV, the Arrow files of csv2arrow, and the index files of IndexKits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, center_crop
from muralist.data.sampler import BucketedSource, Buckets, check_measurable
from muralist.data.source import Source, read_batch
from muralist.data.sources import open_source
from muralist.data.sources.hydit_index import IndexSource
from tests.data.driving_files import write_arrow, write_index
from tests.support.images import EncodedSample, encoded_samples

SIZE = 16
CHOSEN = encoded_samples(12)


def check(source: Source, numbers: list[int]) -> None:
    """Expect the chosen images of these numbers, in this order."""
    images, _, captions = read_batch(source, np.arange(len(source)))
    assert captions == [CHOSEN[number].caption for number in numbers]
    assert np.array_equal(images, np.stack([center_crop(CHOSEN[number].image, SIZE) for number in numbers]))


@pytest.fixture
def arrows(tmp_path: Path) -> Path:
    """As csv2arrow leaves it after a CSV of exactly two files' worth of rows: with a third file that is empty."""
    folder = tmp_path / "dataset" / "porcelain" / "arrows"
    write_arrow(folder / "00000.arrow", CHOSEN[:5])
    write_arrow(folder / "00001.arrow", CHOSEN[5:])
    write_arrow(folder / "00002.arrow", [])
    return folder


@pytest.mark.parametrize("column", ["img_path", "image_path"])
def test_csv_paths_relative_to_the_folder_of_the_run(column: str, tmp_path: Path) -> None:
    images = tmp_path / "dataset" / "porcelain" / "images"
    images.mkdir(parents=True)
    for number in range(2):
        (images / f"{number}.png").write_bytes(CHOSEN[number].png)
    table = tmp_path / "dataset" / "porcelain" / "csvfile" / "image_text.csv"
    table.parent.mkdir()
    rows = [f"./dataset/porcelain/images/{number}.png,青花瓷风格 {number}" for number in range(2)]
    table.write_text("\n".join([f"{column},text_zh", *rows]), encoding="utf-8")
    source = open_source(str(table), SIZE)
    assert [source.read(number).caption for number in range(2)] == ["青花瓷风格 0", "青花瓷风格 1"]
    assert np.array_equal(source.read(1).image, center_crop(CHOSEN[1].image, SIZE))


def test_csv_paths_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "images").mkdir(parents=True)
    (tmp_path / "run" / "images" / "0.png").write_bytes(CHOSEN[0].png)
    (tmp_path / "lists").mkdir()
    table = tmp_path / "lists" / "a.csv"
    table.write_text("image_path,text_zh\n./images/0.png,一\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"no such file.*relative to \S*/lists"):
        open_source(str(table), SIZE)
    monkeypatch.chdir(tmp_path / "run")
    source = open_source(str(table), SIZE)
    monkeypatch.chdir(tmp_path)
    assert source.read(0).caption == "一"


def test_arrow_files(arrows: Path) -> None:
    check(open_source(str(arrows / "00000.arrow"), SIZE), [0, 1, 2, 3, 4])
    check(open_source(str(arrows), SIZE), list(range(12)))
    source = open_source(str(arrows), SIZE, "{width} x {height}: {text_zh}")
    expected = f"{CHOSEN[7].image.width} x {CHOSEN[7].image.height}: {CHOSEN[7].caption}"
    assert source.read(7).caption == expected


def test_the_column_may_be_called_binary(tmp_path: Path) -> None:
    table = pyarrow.table({"text_zh": [None, "二"], "binary": pyarrow.array([p.png for p in CHOSEN[:2]])})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    source = open_source(str(tmp_path / "a.arrow"), SIZE)
    assert [source.read(row).caption for row in range(2)] == ["", "二"]


def index_of(arrows: Path, indices: object, **more: object) -> Path:
    names = [f"./dataset/porcelain/arrows/0000{number}.arrow" for number in range(3)]
    return write_index(arrows.parent / "jsons" / "porcelain.json", names, [5, 7, 0], indices, **more)


def test_an_index_selects_and_repeats_rows(arrows: Path) -> None:
    picked = [0, 4, 5, 5, 5, 9, 11]
    check(open_source(str(index_of(arrows, picked)), SIZE), picked)


def test_an_index_with_its_rows_in_a_file_beside_it(arrows: Path) -> None:
    path = index_of(arrows, [], indices_file="porcelain.index.npz")
    np.savez_compressed(path.parent / "porcelain.index.npz", x=np.array([3, 6, 11]))
    check(open_source(str(path), SIZE), [3, 6, 11])


def test_a_multi_resolution_index_is_read_by_shape_at_one_size(arrows: Path) -> None:
    groups = {"1280x768": [1, 8], "1024x1024": [0, 2, 2], "768x1280": [5, 11]}
    lengths = {key: [1, 1, 0] for key in groups}
    path = index_of(arrows, {}, indices_file="m.index.npz", group_length=lengths)
    np.savez_compressed(path.parent / "m.index.npz", **{key: np.array(rows) for key, rows in groups.items()})
    check(open_source(str(path), SIZE), [5, 11, 0, 2, 2, 1, 8])


def index_of_sizes(arrows: Path, groups: dict[str, list[int]]) -> IndexSource:
    source = open_source(str(index_of(arrows, groups, group_length={})), SIZE)
    assert isinstance(source, IndexSource)
    return source


def test_index_groups_are_the_buckets_of_multireso(arrows: Path) -> None:
    source = index_of_sizes(arrows, {"32x16": [1, 8], "16x16": [0, 2, 2], "16x32": [5, 11], "48x16": []})
    buckets = Buckets.of_index(source, 6)
    assert buckets.sizes == [(16, 32), (16, 16), (32, 16)] and buckets.of_image.tolist() == [0, 0, 1, 1, 1, 2]
    divided = BucketedSource(check_measurable(source, "m.json"), buckets)
    for index, row in enumerate([5, 11, 0, 2, 2, 1]):
        size = buckets.sizes[buckets.of_image[index]]
        assert np.array_equal(divided.read(index).image, center_crop(CHOSEN[row].image, size))
        assert divided.read(index).caption == CHOSEN[row].caption
    with pytest.raises(UserError, match=r"index m\.json has images of 16 x 40 pixels\. Both sides.*multiples of 16"):
        check_measurable(index_of_sizes(arrows, {"16x40": [1, 8]}), "m.json")


def test_the_fingerprint_follows_the_rows_and_the_files(arrows: Path) -> None:
    def fingerprint(indices: list[int]) -> str:
        return open_source(str(index_of(arrows, indices)), SIZE).fingerprint()

    first = fingerprint([0, 4, 5])
    assert first == fingerprint([0, 4, 5]) != fingerprint([0, 4, 6])
    shutil.move(arrows.parents[1], arrows.parents[2] / "moved")
    moved = arrows.parents[2] / "moved" / "porcelain" / "arrows"
    path = write_index(
        moved.parent / "x.json", [str(moved / f"0000{number}.arrow") for number in range(3)], [5, 7, 0], [0, 4, 5]
    )
    assert open_source(str(path), SIZE).fingerprint() == first
    write_arrow(moved / "00000.arrow", [*CHOSEN[:4], CHOSEN[11]])
    assert open_source(str(path), SIZE).fingerprint() != first


def test_broken_images_are_named_and_never_white(arrows: Path) -> None:
    write_arrow(arrows / "00001.arrow", CHOSEN[5:], images={3: CHOSEN[8].png[:-70], 4: b""})
    source = open_source(str(index_of(arrows, [0, 8, 9, 10])), SIZE)
    for index, row in ((1, 3), (2, 4)):
        with pytest.raises(ImageDecodeError, match=rf"row {row} of \S*00001\.arrow is a broken image"):
            source.read(index)
    assert source.read(3).caption == CHOSEN[10].caption


def test_a_damaged_offset_is_an_error_and_not_a_crash(arrows: Path) -> None:
    path = arrows / "00000.arrow"
    with pyarrow.ipc.open_file(path) as file:
        offsets = np.frombuffer(file.get_batch(0)["image"].buffers()[1], dtype=np.int32, count=5)
    content = path.read_bytes()
    place = content.find(offsets.tobytes())
    assert place > 0
    path.write_bytes(content[: place + 8] + np.int32(2**30).tobytes() + content[place + 12 :])
    with pytest.raises(UserError, match=r"Arrow file \S*00000\.arrow is damaged"):
        open_source(str(path), SIZE).read(1)


# -- mistakes


def mistaken(arrows: Path, **changes: object) -> Path:
    return index_of(arrows, changes.pop("indices", [0, 4]), **changes)


INDEX_MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "empty": ({"indices": []}, r"index \S*porcelain\.json selects no rows"),
    "past the end": ({"indices": [0, 11, 12, 40]}, r"past the end: to row 12, but .* 12 rows\. 2 of its 4 rows"),
    "before the start": ({"indices": [-1]}, "to row -1"),
    "fractions": ({"indices": [0.5]}, "indices of the index .* not integers"),
    "words": ({"indices": "all"}, "indices of the index .* not integers"),
    "no files": ({"arrow_files": []}, "names no Arrow files"),
    "missing file": (
        {"arrow_files": ["./dataset/porcelain/arrows/00000.arrow", "b.arrow", "c.arrow"]},
        r"names \S*/b\.arrow, but there is no such file\. 2 of its 3",
    ),
    "fewer counts": ({"cum_length": [5, 12]}, "names 3 Arrow files, but counts the rows of 2"),
    "other counts": ({"cum_length": [5, 14, 14]}, r"00001\.arrow has 7 rows, but the index .* counts 9"),
    "no rows beside": ({"indices_file": "gone.npz"}, r"keeps its rows in gone\.npz, which is missing"),
    "no archive beside": ({"indices_file": "porcelain.json"}, r"porcelain\.json is not an \.npz archive"),
    "no array": ({"indices_file": "y.npz"}, r"y\.npz has no array x"),
    "no size": ({"indices": {"large": [1]}}, "group 'large', which is not a size"),
}


@pytest.mark.parametrize("mistake", INDEX_MISTAKES)
def test_invalid_indices_are_explained(mistake: str, arrows: Path) -> None:
    changes, message = INDEX_MISTAKES[mistake]
    path = mistaken(arrows, **changes)
    np.savez(path.parent / "y.npz", y=np.arange(3))
    with pytest.raises(UserError, match=message):
        open_source(str(path), SIZE)


def test_files_that_are_not_arrow(tmp_path: Path) -> None:
    folder = tmp_path / "arrows"
    whole = write_arrow(folder / "00000.arrow", CHOSEN[:3])
    whole.write_bytes(whole.read_bytes()[:-100])
    for path in (whole, folder):
        with pytest.raises(UserError, match=r"Arrow file \S*00000\.arrow could not be read: .*truncated"):
            open_source(str(path), SIZE)
    table = pyarrow.table({"image": pyarrow.array([CHOSEN[0].png])})
    with pyarrow.OSFile(str(whole), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(UserError, match="a stream of Hugging Face datasets"):
        open_source(str(whole), SIZE)


def test_arrow_files_without_rows_or_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.arrow has no rows"):
        open_source(str(write_arrow(tmp_path / "a.arrow", [])), SIZE)
    table = pyarrow.table({"text_zh": ["x"], "md5": ["y"]})
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match=r"Arrow file .* no column of images .* text_zh \(string\), md5 \(string\)"):
        open_source(str(tmp_path / "b.arrow"), SIZE)
    write_arrow(tmp_path / "b.arrow", CHOSEN[:1], labelled=True)
    with pytest.raises(
        UserError, match=r"b\.arrow has the columns text_zh, md5, .*, label, but \S*a\.arrow has text_zh"
    ):
        open_source(str(tmp_path), SIZE)


def test_numbers_are_captions_only_on_request(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", [EncodedSample(CHOSEN[0].png, 0, 7)])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"caption in row 0 of \S*a\.arrow is not text but 7"):
        open_source(str(path), SIZE).read(0)
    assert open_source(str(path), SIZE, "text_zh").read(0).caption == "7"
