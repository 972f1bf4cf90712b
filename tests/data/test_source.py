"""Captions from text files, tables, columns and templates; several data sets as one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data.decode import center_crop
from muralist.data.sampler import check_measurable
from muralist.data.source import CaptionTemplate, Source, read_batch
from muralist.data.sources import open_held_out, open_source
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import identity, load, run_name
from muralist.tools.hydit import translate
from muralist.tools.pack import pack
from muralist.train.dataset import open_data
from muralist.train.preflight import check_settings
from tests.data.driving_files import write_arrow, write_index
from tests.support.images import encoded_samples, noise, write_csv, write_files, write_folder, write_parquet, write_tar

SIZE = 16


def captions(source: Source) -> list[str]:
    return read_batch(source, np.arange(len(source)))[2]


def flat_folder(folder: Path, **texts: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(texts.items()):
        noise(number, 9, 9).save(folder / f"{name}.png")
        if text is not None:
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


# -- the rule itself


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("text", "a red car"),
        ("TEXT", "a red car"),
        ("hour of day", "noon"),
        ("{text}, {hour of day}", "a red car, noon"),
        ("{key.camera_name}: {text}", "3: a red car"),
        ("{[Part].speed} m/s", "1.5 m/s"),
        ("a driving scene", "a driving scene"),
        ("{text}", "a red car"),
        ("{count}", "7"),
        ("{gone} {nothing}!", " !"),
    ],
)
def test_one_word_names_a_column_and_several_words_are_a_template(rule: str, expected: str) -> None:
    row = {
        "text": "a red car",
        "hour of day": "noon",
        "key.camera_name": 3,
        "[Part].speed": 1.5,
        "count": 7,
        "gone": None,
        "nothing": float("nan"),
    }
    assert CaptionTemplate.resolve(rule, row, "here").format(row, "row 0") == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("caption", r"no column 'caption' in here.*one word.*columns are text, label\."),
        ("txt", r"Did you mean text\?"),
        ("a photo of {lable}", r"no column 'lable' in here.*columns are text, label\. Did you mean label\?"),
        ("a photo of {}", "no column ''"),
        ("a photo of {label", "unpaired brace, near 'a photo of {label'"),
        ("label}", "unpaired brace"),
        ("{{label}}", "unpaired brace"),
        (" ", "caption is empty"),
    ],
)
def test_invalid_caption_rules_are_refused(rule: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CaptionTemplate.resolve(rule, ["text", "label"], "here")


def test_lists_are_refused_as_captions() -> None:
    with pytest.raises(UserError, match=r"caption in row 4 is not text but \['a'\]"):
        CaptionTemplate.resolve("a {tags}", ["tags"], "here").format({"tags": ["a"]}, "row 4")


# -- text files in folders


def test_text_files_beside_images_are_captions(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "flat", a="a red car\n", b=None, c="", d="\ufeffein grünes Haus 图")
    (folder / "notes.txt").write_text("not a caption")
    source = open_source(str(folder), SIZE)
    assert captions(source) == ["a red car", "", "", "ein grünes Haus 图"]
    assert captions(pickle.loads(pickle.dumps(source))) == captions(source)
    for name in ("street", "road"):
        flat_folder(tmp_path / "classes" / name, x=f"one {name}", y=None)
    assert captions(open_source(str(tmp_path / "classes"), SIZE)) == ["one road", "", "one street", ""]


def test_text_files_are_read_with_their_images(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path, a="first", b="second")
    source = open_source(str(folder), SIZE)
    (folder / "b.txt").write_text("changed since")
    assert source.read(1).caption == "changed since"
    (folder / "b.txt").unlink()
    with pytest.raises(UserError, match=r"caption .*b\.txt could not be read: No such file"):
        source.read(1)
    (folder / "a.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"caption .*a\.txt is not UTF-8"):
        source.read(0)


def test_captions_are_part_of_a_folder_fingerprint(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path, a="first one", b="other one", c=None)
    (folder / "notes.txt").write_text("no caption")

    def fingerprint(**options: str) -> str:
        return open_source(str(folder), SIZE, **options).fingerprint()

    seen = [
        fingerprint(),
        fingerprint(caption="a car"),
        fingerprint(caption="a bus"),
        fingerprint(caption="a {caption}"),
    ]
    assert seen[0] == fingerprint()
    (folder / "a.txt").write_text("worst one")  # as long as before
    seen.append(fingerprint())
    (folder / "c.txt").write_text("")
    seen.append(fingerprint())
    (folder / "a.txt").rename(folder / "kept")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)
    assert fingerprint(caption="a car") == seen[1]  # whose captions do not come from texts
    for text in ("b.txt", "c.txt", "notes.txt"):
        (folder / text).unlink()
    (folder / "kept").unlink()
    plain = fingerprint()
    (folder / "notes.txt").write_text("no caption")
    assert fingerprint() == plain and plain not in seen


def test_one_changed_caption_among_many_changes_the_fingerprint(tmp_path: Path) -> None:
    flat_folder(tmp_path, **{f"{number:03}": f"caption number {number}" for number in range(200)})
    before = open_source(str(tmp_path), SIZE).fingerprint()
    (tmp_path / "117.txt").write_text("Caption number 117")
    assert open_source(str(tmp_path), SIZE).fingerprint() != before


# -- metadata tables in folders


def test_metadata_table_of_a_folder(tmp_path: Path) -> None:
    folder = flat_folder(tmp_path / "train", a=None, b="from the text file", c=None, d=None)
    flat_folder(tmp_path / "val", x=None)
    table = "file_name,Text,weather\n./c.png,a house,fog\na.png,a car,rain\nb.png,overruled,sun\n"
    (folder / "metadata.csv").write_text(table)
    (tmp_path / "val" / "metadata.csv").write_text("file_name,text,weather\nx.png,held out,snow\n")
    assert captions(open_source(str(folder), SIZE)) == ["a car", "from the text file", "a house", ""]
    assert captions(open_source(str(folder), SIZE, "weather")) == ["rain", "sun", "fog", ""]
    held_out = open_held_out(str(folder), SIZE, caption="{caption} in {weather}")
    assert held_out is not None and captions(held_out) == ["held out in snow"]
    expected = ["a car in rain", "from the text file in sun", "a house in fog", " in "]
    assert captions(open_source(str(folder), SIZE, "{caption} in {weather}")) == expected

    before = open_source(str(folder), SIZE).fingerprint()
    (folder / "metadata.csv").write_text(table.replace("fog", "ice"))
    assert open_source(str(folder), SIZE).fingerprint() == before
    (folder / "metadata.csv").write_text(table.replace("a house", "a mouse"))
    assert open_source(str(folder), SIZE).fingerprint() != before


def test_metadata_above_and_inside_class_folders(tmp_path: Path) -> None:
    for name in ("road", "street"):
        flat_folder(tmp_path / name, a=None, b=None)
    rows = [{"file_name": f"{name}/a.png", "caption": f"above {name}", "tags": ["x"]} for name in ("road", "street")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "street" / "metadata.csv").write_text("file_name,prompt,lane\nb.png,inside,2\na.png,wins,1\n")
    source = open_source(str(tmp_path), SIZE)
    assert source.label_names == ["road", "street"]
    assert captions(source) == ["above road", "", "wins", "inside"]
    template = open_source(str(tmp_path), SIZE, "{caption} of a {label}, lane {lane}")
    expected = [
        "above road of a road, lane ",
        " of a road, lane ",
        "wins of a street, lane 1",
        "inside of a street, lane 2",
    ]
    assert captions(template) == expected
    with pytest.raises(UserError, match=r"columns are caption, tags, prompt, lane, label"):
        open_source(str(tmp_path), SIZE, "weather")
    with pytest.raises(UserError, match=r"road/a\.png is not text but \['x'\]"):
        open_source(str(tmp_path), SIZE, "tags")


# -- templates for every kind of source


def test_class_names_make_captions(tmp_path: Path) -> None:
    chosen = encoded_samples(6)
    folder = write_folder(tmp_path / "train", chosen)
    write_folder(tmp_path / "val", chosen[:2])
    rule = "A photo of {label}"
    expected = [f"A photo of class_{sample.label}" for sample in chosen]
    assert captions(open_source(str(folder), SIZE, rule)) == expected
    held_out = open_held_out(str(folder), SIZE, caption=rule)
    assert held_out is not None and captions(held_out) == expected[:2]
    assert captions(open_source(str(write_parquet(tmp_path / "a.parquet", chosen)), SIZE, rule)) == expected


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "tar", "npz", "packed"])
def test_labels_and_captions_fill_templates_everywhere(kind: str, tmp_path: Path) -> None:
    chosen = [sample._replace(caption="" if kind == "npz" else sample.caption) for sample in encoded_samples(6)]
    path, field = tmp_path / f"a.{kind}", "caption"
    if kind == "csv":
        write_csv(path, chosen)
    elif kind == "parquet":
        write_parquet(path, chosen, hub=False)
        field = "text"
    elif kind == "arrow":
        write_arrow(path, chosen, labelled=True)
        field = "text_zh"
    elif kind == "tar":
        write_tar(path, chosen)
    elif kind == "npz":
        np.savez(path, x=np.zeros((6, 9, 8, 3), np.uint8), y=np.array([sample.label for sample in chosen]))
    else:
        pack(str(write_csv(tmp_path / "list.csv", chosen)), path, SIZE, workers=1)
    plain, filled = open_source(str(path), SIZE), open_source(str(path), SIZE, f"kind {{label}}: {{{field}}}")
    assert captions(plain) == [sample.caption for sample in chosen]
    assert captions(filled) == [f"kind {sample.label}: {sample.caption}" for sample in chosen]
    assert [item.caption for item in map(filled.read, range(6))] == captions(filled)
    assert captions(pickle.loads(pickle.dumps(filled))) == captions(filled)
    assert captions(open_source(str(path), SIZE, "one caption for all")) == ["one caption for all"] * 6
    assert filled.fingerprint() not in (plain.fingerprint(), open_source(str(path), SIZE, "kind {label}").fingerprint())
    with pytest.raises(UserError, match=rf"no column 'color' in .*{field}.*label"):
        open_source(str(path), SIZE, "a {color} car")


def test_labels_called_class_fill_templates_too(tmp_path: Path) -> None:
    names = write_files(tmp_path, encoded_samples(2))
    (tmp_path / "a.csv").write_text(f"path,class\n{names[0]},1\n{names[1]},0\n")
    assert captions(open_source(str(tmp_path / "a.csv"), SIZE, "{label} or {class}")) == ["1 or 1", "0 or 0"]


def test_the_embedded_data_set_takes_templates() -> None:
    source, held_out = (opener("driving_world", SIZE, caption="{label}!") for opener in (open_source, open_held_out))
    assert held_out is not None
    assert source.read(1).caption == "An urban intersection with traffic lights and multiple vehicles!"
    assert held_out.read(2).caption == "A highway scene with clear lane markings and distant cars!"
    plain = open_source("driving_world", SIZE)
    assert source.fingerprint().startswith(f"{plain.fingerprint()}-")


def test_parquet_takes_any_column_of_text_or_numbers(tmp_path: Path) -> None:
    path = str(write_parquet(tmp_path / "a.parquet", encoded_samples(3)))
    assert captions(open_source(path, SIZE, "Text")) == [sample.caption for sample in encoded_samples(3)]
    with pytest.raises(UserError, match=r"no column 'image' .*columns are label, text\."):
        open_source(path, SIZE, "image")


def test_pack_stores_templated_captions(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", encoded_samples(3))
    write_folder(tmp_path / "val", encoded_samples(3))
    pack(str(train), tmp_path / "packed", SIZE, workers=1, caption="A photo of {label}")
    for source in (open_source(str(tmp_path / "packed"), SIZE), open_held_out(str(tmp_path / "packed"), SIZE)):
        assert source is not None
        assert captions(source) == ["A photo of class_0", "A photo of class_1", "A photo of class_2"]
    assert pack(str(train), tmp_path / "packed", SIZE, workers=1, caption="A photo of {label}").finished_before
    with pytest.raises(UserError, match="another pack"):
        pack(str(train), tmp_path / "packed", SIZE, workers=1)


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


def test_classes_of_one_name_are_one_class(tmp_path: Path) -> None:
    chosen = encoded_samples(6)
    same = [str(write_folder(tmp_path / name / "train", chosen)) for name in ("one", "two")]
    first = open_source(same[0], SIZE)
    source = open_source(same, SIZE)
    assert source.label_names == first.label_names != []
    assert [source.read(6 + row).label for row in range(6)] == [first.read(row).label for row in range(6)]
    shared = first.label_names[1]
    for part in ("train", "val"):
        for name in ("aardvarks", shared):
            (tmp_path / "other" / part / name).mkdir(parents=True)
            (tmp_path / "other" / part / name / "0.png").write_bytes(chosen[0].png)
    different = [same[0], str(tmp_path / "other" / "train")]
    source = open_source(different, SIZE)
    assert source.label_names == [*first.label_names, "aardvarks"]
    assert [source.read(row).label for row in range(6)] == [first.read(row).label for row in range(6)]
    assert [source.label_names[source.read(6 + row).label] for row in range(2)] == ["aardvarks", shared]
    held_out = open_held_out(different, SIZE)  # of the second data set alone, with the numbers of both
    assert held_out is not None and held_out.label_names == source.label_names
    assert [source.label_names[held_out.read(row).label] for row in range(2)] == ["aardvarks", shared]


def test_labels_and_captions_do_not_mix(tmp_path: Path, indices: list[str]) -> None:
    labeled = str(write_folder(tmp_path / "labeled", encoded_samples(3)))
    captioned = str(tmp_path / "captioned")
    Path(captioned).mkdir()
    (tmp_path / "captioned" / "0.png").write_bytes(encoded_samples(1)[0].png)
    (tmp_path / "captioned" / "0.txt").write_text("a car")
    read = load(TrainSettings, ["--data_path", labeled, captioned, "--enable_condition"], TRAIN_FLAT_NAMES)
    with pytest.raises(
        UserError, match=f"--enable_condition needs labels, and {captioned} has none. .*captions are not"
    ):
        open_data(read)
    words = ["--model", "HunyuanDiT", "--img_size", "32", "--val_fraction", "0", "--data_path", labeled, captioned]
    with pytest.raises(UserError, match=f"{labeled} has class labels and no captions, and {captioned} has captions."):
        open_data(load(TrainSettings, words, TRAIN_FLAT_NAMES))
    open_data(load(TrainSettings, words[:-1], TRAIN_FLAT_NAMES))


def test_weights_give_each_data_set_its_share(tmp_path: Path) -> None:
    counts = {"small": 4, "large": 30}
    paths = [str(write_folder(tmp_path / name, encoded_samples(count))) for name, count in counts.items()]
    words = ["--data_path", *paths, "--img_size", "16", "--val_fraction", "0.06", "--data_weights", "3", "1"]
    data = open_data(load(TrainSettings, words, TRAIN_FLAT_NAMES))
    assert data.weighted is not None and sum(data.weighted.sizes) == data.split.training_size == 32
    small = data.weighted.sizes[0]
    order = data.order(seed=5, total_batch=8)
    stream = order.positions(np.arange(20 * 32))
    assert np.array_equal(stream[100:150], order.positions(np.arange(100, 150))), "a function of the sample index"
    for epoch in stream.reshape(20, 32):
        assert np.sum(epoch < small) == 24
    seen = np.bincount(stream, minlength=32)
    assert seen[:small].max() - seen[:small].min() <= 1 and seen[small:].max() - seen[small:].min() <= 1
    held_out = {*data.held_out_indices.tolist()}
    assert not held_out & {*data.split.training_index(stream).tolist()}
    assert not np.array_equal(stream, data.order(seed=6, total_batch=8).positions(np.arange(20 * 32)))
    lines = data.share_lines(paths)
    assert lines[0] == f"shares     {paths[0]}: 24 samples per epoch from {small} images" and len(lines) == 2
    with pytest.raises(UserError, match="--data_weights has 1 numbers, and --data_path 2 data sets"):
        check_settings(load(TrainSettings, [*words[:-1]], TRAIN_FLAT_NAMES))


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
