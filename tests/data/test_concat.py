"""Several data sets as one: all rows in order, held-out parts together, a fingerprint that follows the order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data.decode import center_crop
from muralist.data.sampler import check_measurable
from muralist.data.source import read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import identity, load, run_name
from muralist.tools.hydit import translate
from muralist.train.dataset import open_data
from tests.data.driving_files import write_arrow, write_index
from tests.support.images import encoded_samples, write_folder, write_parquet

SIZE = 16
CHOSEN = encoded_samples(12)


@pytest.fixture
def indices(tmp_path: Path) -> list[str]:
    """Two index files of one Arrow file each, the second with a row twice."""
    paths = []
    for name, first, picked in (("a", 0, [4, 0]), ("b", 6, [1, 1, 5])):
        arrow = write_arrow(tmp_path / f"{name}.arrow", CHOSEN[first : first + 6])
        paths.append(str(write_index(tmp_path / f"{name}.json", [str(arrow)], [6], picked)))
    return paths


def test_the_rows_of_all_index_files_in_order(indices: list[str]) -> None:
    source = open_source(indices, SIZE)
    images, labels, captions = read_batch(source, np.arange(len(source)))
    expected = [CHOSEN[number] for number in (4, 0, 7, 7, 11)]
    assert captions == [sample.caption for sample in expected]
    assert np.array_equal(images, np.stack([center_crop(sample.image, SIZE) for sample in expected]))
    assert (labels.tolist(), source.label_names) == ([0] * 5, [])
    assert open_held_out(indices, SIZE) is None


def test_multireso_refuses_several_data_sets(indices: list[str]) -> None:
    with pytest.raises(UserError, match=r"^--multireso reads one data set, and a b are 2\."):
        check_measurable(open_source(indices, SIZE), "a b")


def test_order_and_count_are_part_of_the_fingerprint(indices: list[str]) -> None:
    prints = [
        open_source(paths, SIZE).fingerprint() for paths in (indices, indices[::-1], indices[:1], indices + indices)
    ]
    assert len(set(prints)) == 4
    assert open_source(list(indices), SIZE).fingerprint() == prints[0]


def test_held_out_parts_are_held_out_together(tmp_path: Path, indices: list[str]) -> None:
    for name, count in (("x", 5), ("y", 7)):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "train.parquet", encoded_samples(count))
        write_parquet(tmp_path / name / "val.parquet", encoded_samples(count - 3, first=40))
    mixed = [str(tmp_path / "x"), indices[0], str(tmp_path / "y")]
    assert len(open_source(mixed, SIZE)) == 5 + 2 + 7
    held_out = open_held_out(mixed, SIZE, same_classes=False)
    assert held_out is not None and len(held_out) == 2 + 4
    read = load(TrainSettings, ["--data_path", *mixed, "--img_size", "16"], TRAIN_FLAT_NAMES)
    data = open_data(read)
    assert (data.split.training_size, data.held_out_indices.tolist()) == (14, list(range(6)))
    of_one = open_data(load(TrainSettings, ["--data_path", *indices, "--val_fraction", "0.4"], TRAIN_FLAT_NAMES))
    assert (of_one.split.training_size, len(of_one.held_out_indices)) == (3, 2)


def test_classes_are_kept_only_if_all_have_the_same(tmp_path: Path) -> None:
    chosen = encoded_samples(6)
    same = [str(write_folder(tmp_path / name, chosen)) for name in ("one", "two")]
    first = open_source(same[0], SIZE)
    source = open_source(same, SIZE)
    assert source.label_names == first.label_names != []
    assert [source.read(6 + row).label for row in range(6)] == [first.read(row).label for row in range(6)]
    other = tmp_path / "other" / "elephants"
    other.mkdir(parents=True)
    (other / "0.png").write_bytes(chosen[0].png)
    different = [same[0], str(other.parent)]
    assert open_source(different, SIZE).label_names == []
    assert {open_source(different, SIZE).read(row).label for row in range(7)} == {0}
    read = load(TrainSettings, ["--data_path", *different, "--enable_condition"], TRAIN_FLAT_NAMES)
    with pytest.raises(UserError, match="needs labels, .*only if their classes are the same"):
        open_data(read)


def test_flags_and_yaml(tmp_path: Path) -> None:
    def read(*words: str) -> TrainSettings:
        return load(TrainSettings, words, TRAIN_FLAT_NAMES)

    assert read(*translate(["--index-file", "a.json", "b.json", "--lr", "1"])[0]).data.path == ["a.json", "b.json"]
    assert read("--data_path", "a.json").data.path == read("--data_path=a.json").data.path == "a.json"
    assert (read().data.paths, read("--data_path", "a").data.paths) == ([], ["a"])
    (tmp_path / "both.yaml").write_text("data: {path: [a.json, b.json], batch_size: 2}")
    assert read("--config", str(tmp_path / "both.yaml")).data.paths == ["a.json", "b.json"]
    (tmp_path / "one.yaml").write_text("data: {path: [a.json]}")
    assert read("--config", str(tmp_path / "one.yaml")).data.path == "a.json"
    one, both, turned = (read("--data_path", *words) for words in (["a"], ["a", "./b/"], ["b", "a"]))
    assert identity(both)["data.path"] == ["a", "b"] and identity(one)["data.path"] == "a"
    assert len({run_name(one, None), run_name(both, None), run_name(turned, None)}) == 3


def test_a_run_on_two_index_files(indices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "JiT-T/8", "--img_size", "16", "--batch_size", "5", "--num_workers", "0", "--max_steps", "2",
             "--samples_per_gpu", "0", "--val_fraction", "0", "--no_use_tensorboard", "--results_dir", str(tmp_path),
             "--run_name", "both", "--data_path", *indices]  # fmt: skip
    assert main(["train", *words]) == 0
    log = (tmp_path / "both" / "logs" / "train.log").read_text()
    assert f"data       {indices[0]} {indices[1]}: 5 images to train on, 0 held out" in log
    assert main(["train", *words[:-1], "--max_steps", "3"]) == 1
    assert "was started with other settings: data.path" in capsys.readouterr().err
    assert main(["train", *words[:-2], str(tmp_path / "gone.json"), "--run_name", "none"]) == 1
    assert "gone.json was not found" in capsys.readouterr().err
