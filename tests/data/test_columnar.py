"""Camera images of the Waymo Open Dataset v2, from small files in its published schema."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data.decode import ImageDecodeError, center_crop
from muralist.data.source import read_batch
from muralist.data.sources import columnar, open_held_out, open_source
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import identity, load
from muralist.tools.pack import pack
from muralist.train.dataset import open_data
from tests.data.driving_files import write_waymo
from tests.support.images import encoded, encoded_samples, write_parquet

SIZE = (16, 24)
CAMERAS = [1, 2, 4, 3, 5]
WORDS = ["front", "front left", "side left", "front right", "side right"]


def seen(jpeg: bytes) -> np.ndarray:
    return center_crop(Image.open(io.BytesIO(jpeg)).convert("RGB"), SIZE)


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Two segments of ten and five images, the second one written first."""
    folder = tmp_path / "training" / "camera_image"
    chosen = encoded_samples(15)
    write_waymo(folder / "99_000.parquet", chosen[10:], CAMERAS)
    write_waymo(folder / "10023947602400723454_1120_000_1140_000.parquet", chosen[:10], CAMERAS * 2)
    return folder


def test_images_come_by_file_and_row_with_the_camera_in_the_caption(training: Path) -> None:
    source = open_source(str(training), SIZE)
    assert (len(source), source.label_names) == (15, [])
    images, labels, captions = read_batch(source, np.arange(15))
    assert np.array_equal(images, np.stack([seen(encoded(sample.image, "JPEG")) for sample in encoded_samples(15)]))
    assert not labels.any()
    assert captions == [f"A driving scene seen by the {words} camera" for words in WORDS] * 3
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(7).caption == captions[7] and np.array_equal(copy.read(7).image, images[7])
    assert copy.fingerprint() == source.fingerprint()


def test_one_file_and_captions_by_template(training: Path) -> None:
    path = str(training / "99_000.parquet")
    assert len(open_source(path, SIZE)) == 5
    source = open_source(path, SIZE, "a driving scene, {camera} camera of {key.segment_context_name}")
    assert source.read(2).caption == "a driving scene, side left camera of 99_000"
    assert open_source(path, SIZE, "key.camera_name").read(2).caption == "4"
    assert source.fingerprint() != open_source(path, SIZE).fingerprint()
    with pytest.raises(UserError, match=r"no column 'weather' .*key\.segment_context_name.* camera\."):
        open_source(path, SIZE, "in {weather} weather")


def test_only_what_is_needed_is_read(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[str]]] = []
    read_row_group = pyarrow.parquet.ParquetFile.read_row_group

    def watched(file: object, group: int, columns: list[str], **options: object) -> object:
        asked.append((group, columns))
        return read_row_group(file, group, columns=columns, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", watched)
    source = open_source(str(training), SIZE)
    assert asked == []
    source.read(9)
    source.read(8)
    assert asked == [(2, ["[CameraImageComponent].image", "key.camera_name"])]


def test_the_cache_of_row_groups_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_waymo(tmp_path / "a.parquet", encoded_samples(10), CAMERAS * 2, row_group=2)
    monkeypatch.setattr(columnar, "_MAX_CACHED_BYTES", 1)
    reads: list[int] = []
    read_group = columnar._ParquetReader.read_group
    monkeypatch.setattr(
        columnar._ParquetReader,
        "read_group",
        lambda reader, group, columns: reads.append(group) or read_group(reader, group, columns),
    )
    source = open_source(str(path), SIZE)
    for index in (0, 1, 9, 8, 0):
        source.read(index)
    assert reads == [0, 4, 0]


def test_the_validation_set_is_held_out(training: Path) -> None:
    assert open_held_out(str(training), SIZE) is None
    write_waymo(
        training.parents[1] / "validation" / "camera_image" / "5.parquet", encoded_samples(3, first=60), [5, 1, 1]
    )
    held_out = open_held_out(str(training), SIZE, caption="the {camera} camera")
    assert held_out is not None
    assert read_batch(held_out, np.arange(3))[2] == ["the side right camera", "the front camera", "the front camera"]
    assert open_held_out(str(training.parents[1] / "validation" / "camera_image"), SIZE) is None


def test_cameras_selects_rows(training: Path) -> None:
    source = open_source(str(training), SIZE, cameras=["SIDE_LEFT", "front"])
    everything = open_source(str(training), SIZE)
    rows = [0, 2, 5, 7, 10, 12]  # by file and row as before, whatever the order of the names
    images, _, captions = read_batch(source, np.arange(len(source)))
    assert np.array_equal(images, read_batch(everything, np.array(rows))[0])
    assert captions == [f"A driving scene seen by the {words} camera" for words in ("front", "side left")] * 3
    assert source.fingerprint() == open_source(str(training), SIZE, cameras=["FRONT", "side-left"]).fingerprint()
    other = open_source(str(training), SIZE, cameras=["FRONT", "SIDE_RIGHT"])
    assert len({source.fingerprint(), other.fingerprint(), everything.fingerprint()}) == 3
    validation = training.parents[1] / "validation" / "camera_image" / "5.parquet"
    write_waymo(validation, encoded_samples(3, first=60), [5, 1, 1])
    held_out = open_held_out(str(training), SIZE, cameras=["FRONT"])
    assert held_out is not None and len(held_out) == 2
    with pytest.raises(UserError, match=r"/validation/camera_image has no image of the cameras SIDE_LEFT"):
        open_held_out(str(training), SIZE, cameras=["SIDE_LEFT"])


def test_invalid_cameras_are_refused(training: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no camera FRONT_LEFF\. There are FRONT, FRONT_LEFT, .* mean FRONT_LEFT\?"):
        open_source(str(training), SIZE, cameras=["FRONT_LEFF"])
    pack(str(training), tmp_path / "packed", SIZE, workers=1)
    plain = write_parquet(tmp_path / "plain.parquet", encoded_samples(2))
    for other in ("driving_world", str(tmp_path / "packed"), str(plain)):
        with pytest.raises(UserError, match=r"cameras of the Waymo Open Dataset, and \S+ does not belong to it"):
            open_source(other, SIZE, cameras=["FRONT"])


def test_pack_with_selected_cameras(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pack", str(training), str(tmp_path / "packed"), "--img_size", "16", "24", "--num_workers", "1"]
    assert main([*words, "--cameras", "FRONT", "FRONT_LEFT"]) == 0
    captions = read_batch(open_source(str(tmp_path / "packed"), SIZE), np.arange(6))[2]
    assert captions == ["A driving scene seen by the front camera", "A driving scene seen by the front left camera"] * 3
    assert main([*words, "--cameras", "FRONT"]) == 1
    read = load(TrainSettings, ["--data_path", str(training), "--cameras", "FRONT", "--img_size", "16", "24",
                                "--val_fraction", "0"], TRAIN_FLAT_NAMES)  # fmt: skip
    assert open_data(read).split.training_size == 3
    assert identity(read)["data.cameras"] == ["FRONT"]


def test_broken_images_are_named(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(write_waymo(tmp_path / "a.parquet", encoded_samples(3), [1, 2, 3]))
    jpegs = table["[CameraImageComponent].image"].to_pylist()
    for row, damaged in enumerate((jpegs[0][:-200], None)):
        jpegs[row] = damaged
    place = table.schema.get_field_index("[CameraImageComponent].image")
    table = table.set_column(place, "[CameraImageComponent].image", pyarrow.array(jpegs))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"), SIZE)
    for row, reason in enumerate(("truncated", "no bytes")):
        with pytest.raises(ImageDecodeError, match=rf"row {row} of \S*a\.parquet is a broken image: .*{reason}"):
            source.read(row)
    assert source.read(2).caption == "A driving scene seen by the front right camera"


def test_an_unknown_camera_is_named(tmp_path: Path) -> None:
    source = open_source(str(write_waymo(tmp_path / "a.parquet", encoded_samples(2), [0, 1])), SIZE)
    with pytest.raises(UserError, match=r"key\.camera_name in row 0 of \S*a\.parquet is 0\. Known are 1 \(front\)"):
        source.read(0)


def test_camera_numbers_as_text_are_accepted(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(write_waymo(tmp_path / "a.parquet", encoded_samples(1), [4]))
    table = table.set_column(2, "key.camera_name", pyarrow.array(["4"]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert open_source(str(tmp_path / "a.parquet"), SIZE).read(0).caption.endswith("the side left camera")


def test_other_components_are_refused(training: Path) -> None:
    part = training.parent
    (part / "camera_segmentation").mkdir()
    table = pyarrow.table(
        {
            "key.segment_context_name": ["99_000"],
            "key.camera_name": pyarrow.array([1], pyarrow.int8()),
            "[CameraSegmentationLabelComponent].panoptic_label": pyarrow.array([encoded_samples(1)[0].png]),
        }
    )
    pyarrow.parquet.write_table(table, part / "camera_segmentation" / "99_000.parquet")
    with pytest.raises(UserError, match=r"no column .*Component.\.image\. .*panoptic_label.* component camera_image"):
        open_source(str(part / "camera_segmentation"), SIZE)
    with pytest.raises(UserError, match=r"no images in .*Give \S*/training/camera_image"):
        open_source(str(part), SIZE)
    cut = pyarrow.parquet.read_table(training / "99_000.parquet").drop_columns(["key.camera_name"])
    pyarrow.parquet.write_table(cut, training / "99_000.parquet")
    with pytest.raises(UserError, match=r"no column key\.camera_name"):
        open_source(str(training / "99_000.parquet"), SIZE)
