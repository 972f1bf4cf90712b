"""`muralist evaluate` and `muralist stats`, from folders to report.json, with broken, few and mixed images."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import fid_reference

import muralist.api as muralist
from muralist.cli import main
from muralist.data.sources import open_source
from muralist.evaluate.encoders import InceptionEncoder
from muralist.evaluate.features import compute_features, hash_files
from muralist.evaluate.inception import load_classifier, load_inception
from muralist.evaluate.inputs import find_images, match_table, read_ledger
from muralist.evaluate.metrics import inception_score
from tests.support.evaluating import evaluate, inception_weights, scenes, write_images

pytestmark = pytest.mark.usefixtures("clean_environment")
AGAINST_REFERENCE = ["fid", "kid", "precision", "recall", "density", "coverage"]
RECORD = 32 + 4 * 6 + 4  # bytes of the feature cache: hash, features of the small DINOv2, checksum
METRICS = [*AGAINST_REFERENCE, "clip_score", "cmmd", "fd_dinov2", "inception_score"]


def write_prompts(path: Path, prompts: list[str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image_id", "prompt"), *((f"{i:06d}", p) for i, p in enumerate(prompts))])
    return path


def line(index: int, status: str, **more: Any) -> str:
    about = {"index": index, "copy": 0, "id": f"{index:06d}", "seed": 42 + index, "prompt": f"prompt {index}"}
    about |= {"file": f"{index:06d}.png", "gpu": str(index % 2), "seconds": 0.5, "key": "k"}
    if status == "done":
        more |= {"bytes": 1, "changed": 1, "sha256": "x"}
    return json.dumps({"status": status, **about, **more}) + "\n"


def test_other_metrics_are_computed_without_inception(
    tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "warning", lambda text, *values: captured.append(text % values))
    images = write_images(tmp_path / "images", scenes(5, 0))
    (images / "torn.png").write_bytes(b"\x89PNG")
    header = '{"format": "muralist ledger", "version": 1}\n'
    lines = [
        line(0, "failed", error="once"),
        *(line(index, "done") for index in range(4)),
        line(7, "failed", error="bad"),
    ]
    (images / "ledger.jsonl").write_text(header + "".join(lines))
    reference = write_images(tmp_path / "reference", scenes(6, 1))
    found = evaluate(tmp_path / "out", "--images", images, "--reference", reference, "--clip_path", clip)
    assert list(found["scores"]) == METRICS
    assert [entry["metric"] for entry in found["missing"]] == [*AGAINST_REFERENCE, "fd_dinov2", "inception_score"]
    lacking = [line for line in captured if "--inception_weights" in line]  # logged once, for all metrics that need it
    assert len(lacking) == 1 and lacking[0].startswith(f"No {', '.join(AGAINST_REFERENCE)}, inception_score: FID, KID,")
    assert found["fid"] is None and found["kid"] is None
    assert found["images"]["count"] == 5
    assert found["images"]["unreadable"][0].startswith("torn.png: ")
    assert sum("cannot be read: torn.png: " in line for line in captured) == 1
    assert found["per_image"]["file"] == [f"{index:06d}.png" for index in range(5)]
    assert found["per_image"]["prompt"] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3", None]
    scores = found["per_image"]["clip_score"]
    assert scores[4] is None and found["scores"]["clip_score"]["value"] == pytest.approx(np.mean(scores[:4]))
    assert found["scores"]["cmmd"]["value"] > 0
    low, high = (found["scores"]["clip_score"][name] for name in ("low", "high"))
    assert low <= found["scores"]["clip_score"]["value"] <= high
    failure = {"id": "000007", "seed": 49, "prompt": "prompt 7", "error": "bad", "gpu": "1"}
    assert found["failures"] == [failure]
    assert found["speed"] == {gpu: {"images": 2, "images_per_second": 2.0} for gpu in ("0", "1")}
    assert any("1 of 5 images have no known prompt" in warning for warning in found["warnings"])
    assert found["settings"]["resizing"].startswith("bilinear to 299 x 299 without antialiasing")
    assert "clip_score" in capsys.readouterr().out


def test_without_reference_and_clip_there_is_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But nothing was measured, which is a failure."""
    images = write_images(tmp_path / "images", scenes(2, 0))
    evaluate(images / "out", "--images", images, expect=1)
    captured = capsys.readouterr()
    assert "muralist: Nothing was measured.\nEach score lacks an input" in captured.err
    assert "The report is" in captured.out
    found = json.loads((images / "out" / "report.json").read_text())
    assert [entry["metric"] for entry in found["missing"]] == METRICS
    assert "no --reference was given" in found["missing"][0]["reason"]
    assert "--clip_path" in found["missing"][6]["reason"]
    assert found["images"]["count"] == 2


def test_every_metric_of_a_few_images(tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(3, 0))
    prompts = write_prompts(tmp_path / "prompts.csv", ["a", "b " * 100, "c"])
    common = ("--images", images, "--inception_weights", inception_weights(), "--clip_path", clip)
    found = evaluate(tmp_path / "out", "--reference", images, "--prompts_csv", prompts, *common)
    assert [entry["metric"] for entry in found["missing"]] == ["fd_dinov2", "inception_score"]
    assert found["fid"] == found["scores"]["fid"]["value"] == pytest.approx(0, abs=1e-6)
    assert found["scores"]["cmmd"]["value"] == pytest.approx(0, abs=1e-9)
    assert [found["scores"][name]["value"] for name in ("precision", "recall", "coverage")] == [1, 1, 1]
    assert found["kid"] < 0  # unbiased: a set against itself comes out below zero
    sha256 = found["reference"].pop("sha256")
    assert found["reference"] == {"path": str(images), "count": 3, "sizes": {"24 x 24": 3}} and len(sha256) == 64
    for text in (
        "3 images are fewer than the 2,048 features",
        "3 images are few for Precision, Recall, Density, Coverage: the distance to the nearest neighbors grows",
        "1 prompt is longer than the 77 tokens CLIP reads, and is truncated.",
        "CMMD is computed with CLIP ViT/8 at 16 px: published values use ViT-L/14 at 336 px ",
    ):
        assert any(text in warning for warning in found["warnings"])
    # All three are within the manifold: the interval of 3 of 3 is not 1 to 1.
    low, high = (found["scores"]["precision"][name] for name in ("low", "high"))
    assert (round(low, 3), high) == (0.292, 1)  # 0.025 = low^3
    assert "precision       1.0  (0.3 to 1.0)\n" in capsys.readouterr().out
    # Statistics of other tools suffice for FID alone; the images' features are cached.
    np.savez(tmp_path / "others.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    found = evaluate(tmp_path / "out", "--reference", tmp_path / "others.npz", *common)
    assert [entry["metric"] for entry in found["missing"]] == METRICS[1:]
    assert found["fid"] > 1000 and found["reference"]["count"] is None


def test_evaluate_reads_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(3, 0))
    weights = ("--inception_weights", inception_weights())
    assert main(["stats", str(images), "-o", str(tmp_path / "stats.npz"), *map(str, weights)]) == 0
    assert "statistics of 3 images" in capsys.readouterr().out
    with np.load(tmp_path / "stats.npz") as held:
        assert (held["mu"].shape, held["sigma"].shape, int(held["number"])) == ((2048,), (2048, 2048), 3)
        np.testing.assert_allclose(held["sigma"], np.cov(held["features"].astype(float), rowvar=False), atol=1e-10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "stats.npz"]
    arguments = ("--images", images, "--reference", tmp_path / "stats.npz", *weights)
    found = evaluate(tmp_path / "out", *arguments)
    assert found["fid"] == pytest.approx(0, abs=1e-6)
    assert [entry["metric"] for entry in found["missing"]] == METRICS[6:]
    # Statistics belong to one way of resizing; features of the other are not taken from the cache.
    capsys.readouterr()
    evaluate(tmp_path / "out", *arguments, "--resize", "clean-fid", expect=1)
    assert "resized as pytorch-fid does, and --resize is clean-fid." in capsys.readouterr().err
    words = ["stats", str(images), "-o", str(tmp_path / "clean.npz"), *map(str, weights), "--resize", "clean-fid"]
    assert main(words) == 0
    clean = ("--images", images, "--reference", tmp_path / "clean.npz", *weights, "--resize", "clean-fid")
    assert evaluate(tmp_path / "out", *clean)["fid"] == pytest.approx(0, abs=1e-6)
    with np.load(tmp_path / "clean.npz") as held, np.load(tmp_path / "stats.npz") as other:
        assert np.abs(held["features"] - other["features"]).max() > 0.01


def test_stats_of_a_data_set_use_the_crops_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("driving_world", 32)
    images = write_images(tmp_path / "images", np.stack([source.read(index).image for index in range(4)]))
    weights = ["--inception_weights", str(inception_weights())]
    assert main(["stats", str(images), "-o", str(tmp_path / "folder.npz"), *weights]) == 0
    words = ["stats", "driving_world", "--img_size", "32", "--max_samples", "4", *weights, "-o"]
    assert main([*words, str(tmp_path / "one.npz")]) == 0
    monkeypatch.setenv("NPROC", "2")
    assert main([*words, str(tmp_path / "two.npz")]) == 0
    found = [np.load(tmp_path / f"{name}.npz") for name in ("folder", "one", "two")]
    for other in found[1:]:
        np.testing.assert_array_equal(other["features"], found[0]["features"])
        np.testing.assert_array_equal(other["sigma"], found[0]["sigma"])


@pytest.mark.parametrize("words", [["driving_world"], ["images", "--max_samples", "3"]])
def test_stats_without_img_size_need_a_folder(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ["--inception_weights", str(inception_weights())]
    assert main(["stats", *words, "-o", str(tmp_path / "stats.npz"), *weights]) == 1
    assert "Give --img_size as in training" in capsys.readouterr().err


def test_the_inception_score_needs_the_classifier(tmp_path: Path) -> None:
    """Neither a reference nor CLIP is needed; the usual file of weights holds 1,008 classes, with a bias."""
    images = write_images(tmp_path / "images", scenes(12, 0))
    few = write_images(tmp_path / "few", scenes(12, 0)[:3])
    weights, output = tmp_path / "usual.pth", tmp_path / "out"
    tensors = load_inception(inception_weights()).state_dict()
    classifier = torch.randn(1008, 2048, generator=torch.manual_seed(0))
    torch.save({**tensors, "fc.weight": classifier, "fc.bias": torch.arange(1008.0)}, weights)
    found = evaluate(output, "--images", images, "--inception_weights", weights)
    assert [entry["metric"] for entry in found["missing"]] == METRICS[:-1]
    score = found["scores"]["inception_score"]
    cached = compute_features(
        InceptionEncoder.from_file(weights), hash_files(sorted(images.iterdir())), {"0": "cpu"}, output / "features"
    )
    assert cached.cached == 12
    assert score["value"] == inception_score(cached.rows, classifier.numpy()).value > 1
    assert score["note"].startswith(
        "mean of 10 splits, shuffled; 1,008 classes, logits without bias, as torch-fidelity; bili"
    )
    assert any(text.startswith("12 images are few for the Inception score") for text in found["warnings"])
    assert "Inception score" in (output / "report" / "index.html").read_text()
    evaluate(output, "--images", few, "--inception_weights", weights, expect=1)
    note = json.loads((output / "report.json").read_text())["scores"]["inception_score"]["note"]
    assert note == "it is the mean over 10 splits, and there are 3 images."
    assert load_classifier(inception_weights()) is None


def test_chosen_metrics(tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(3, 0))
    reference = write_images(tmp_path / "reference", scenes(3, 1))
    prompts = write_prompts(tmp_path / "prompts.csv", ["a", "b", "c"])
    common = ("--images", images, "--reference", reference, "--prompts_csv", prompts, "--clip_path", clip)
    common += ("--inception_weights", tmp_path / "nowhere.pth")  # which no chosen metric reads
    found = evaluate(tmp_path / "out", *common, "--metrics", "CLIP,cmmd")
    assert list(found["scores"]) == ["clip_score", "cmmd"] and found["missing"] == [] and found["fid"] is None
    assert all(score["value"] is not None for score in found["scores"].values())
    assert [path.name.split("-")[0] for path in (tmp_path / "out" / "features").iterdir()].count("inception") == 0
    settings: dict[str, Any] = {"metrics": "clip", "clip_path": clip, "prompts_csv": prompts}
    from_python = muralist.evaluate(images, reference, tmp_path / "python", **settings)
    assert from_python["scores"] == {"clip_score": found["scores"]["clip_score"]}
    capsys.readouterr()
    evaluate(tmp_path / "none", *common, "--metrics", "fid", "clap", expect=1)
    assert "unknown score: clap.\nDid you mean clip?\nThere are fid, kid," in capsys.readouterr().err
    evaluate(tmp_path / "none", *common, "--metrics", "clip,dinov2", expect=1)
    told = "--metrics names fd_dinov2, which cannot be computed.\nThe reason: it needs a DINOv2 model"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_scores_by_category(tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(5, 0))
    cells = [("a", "Night", "x"), ("b", "Day", "x"), ("c", "Night", "y"), ("d", "", "y"), ("e", "Night", "y")]
    table = tmp_path / "prompts.csv"
    table.write_text("image_id,prompt,Category,level\n" + "".join(
        f"{row:06d},{prompt},{category},{level}\n" for row, (prompt, category, level) in enumerate(cells)
    ))  # fmt: skip
    common = ("--images", images, "--clip_path", clip, "--prompts_csv", table, "--metrics", "clip")
    found = evaluate(tmp_path / "out", *common)
    values = np.array(found["per_image"]["clip_score"])
    night = found["categories"]["category"]["Night"]
    assert list(found["categories"]) == ["category"] and list(found["categories"]["category"]) == ["Day", "Night"]
    assert night["count"] == 3 and night["scores"]["clip_score"]["value"] == pytest.approx(values[[0, 2, 4]].mean())
    low, value = (night["scores"]["clip_score"][name] for name in ("low", "value"))
    assert values[[0, 2, 4]].min() - 1e-9 < low < value
    assert found["categories"]["category"]["Day"]["scores"]["clip_score"]["low"] is None, "one image has no interval"
    assert ">Night</button> <small>3</small>" in (tmp_path / "out" / "report" / "index.html").read_text()
    found = evaluate(tmp_path / "out", *common, "--category_column", "Level")
    assert {name: part["count"] for name, part in found["categories"]["level"].items()} == {"x": 2, "y": 3}
    capsys.readouterr()
    evaluate(tmp_path / "none", *common, "--category_column", "levle", expect=1)
    told = "--category_column levle is not a column of the prompt table.\nDid you mean level?\nIts further columns are"
    assert told in capsys.readouterr().err


def test_a_dry_run_checks_all_inputs_and_writes_nothing(
    tmp_path: Path, clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.csv", ["a", "b"])
    common = ["--images", tmp_path / "later", "--prompts_csv", prompts, "--clip_path", clip, "--dry_run"]
    arguments = ["evaluate", *map(str, common), "--output_dir", str(tmp_path / "later" / "evaluation")]
    assert main(arguments) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "Scores to be computed: clip_score."
    compares = "it compares two sets, and no --reference was given."
    assert told[1] == f"No {', '.join(AGAINST_REFERENCE)}, cmmd, fd_dinov2: {compares}"
    assert told[2].startswith("No inception_score: ") and told[3] == f"{tmp_path / 'later'} holds no images yet."
    assert main([*arguments, "--metrics", "clip"]) == 0
    assert "\nNo " not in capsys.readouterr().out, "by which run_full_evaluation.sh knows that scores are missing"
    plan = muralist.evaluate(tmp_path / "later", None, tmp_path / "out", clip_path=clip, dry_run=True)
    assert plan["metrics"] == ["clip_score"] and plan["missing"][0] == {"metric": "fid", "reason": compares}
    broken = tmp_path / "broken"
    shutil.copytree(clip, broken)
    tear(broken / "model.safetensors")
    torch.save({"fc.weight": torch.zeros(1008, 2048)}, tmp_path / "other.pth")
    for flags, message in (
        (["--clip_path", broken], f"The CLIP model in {broken} cannot be loaded."),
        (["--reference", tmp_path / "nowhere"], f"{tmp_path / 'nowhere'}, which --reference names, does not exist."),
        (["--inception_weights", tmp_path / "other.pth"], "does not hold the Inception weights of 2015-12-05"),
        (["--metrics", "fid"], "--metrics names fid, which cannot be computed.\nThe reason: it compares two sets"),
    ):
        assert main([*arguments, *map(str, flags)]) == 1
        assert message in capsys.readouterr().err
    tensors = load_file(clip / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert main([*arguments, "--clip_path", str(broken)]) == 1
    assert "It lacks the tensor visual_projection.weight, and 1 in all." in capsys.readouterr().err
    shutil.copy(clip / "model.safetensors", broken)
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert main([*arguments, "--clip_path", str(broken)]) == 1
    assert f"The tokenizer or the image processor in {broken} cannot be loaded." in capsys.readouterr().err
    assert not (tmp_path / "later").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("reference", "message"),
    [("none", "does not exist"), ("empty", "No image was found"), ("bad.npz", "cannot be read as reference statistics"),
     ("other.npz", "holds no 'sigma'"), ("narrow.npz", "statistics of other features")],
)  # fmt: skip
def test_an_invalid_reference_is_refused_before_anything_is_computed(
    reference: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "images", scenes(2, 0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "other.npz", mu=np.zeros(2048))
    np.savez(tmp_path / "narrow.npz", mu=np.zeros(64), sigma=np.eye(64))
    evaluate(tmp_path / "out", "--images", images, "--reference", tmp_path / reference, expect=1)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prompts_are_matched_to_files(tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("image_id,prompt,seed\na,one,1\nb,two,1\nb,three,2\nc_seed5,four,\n")
    names = ["a.png", "a_seed9.png", "b_seed1.png", "b_seed2.png", "b_seed3.png", "c_seed5.jpg", "d.png"]
    assert match_table(str(table), [tmp_path / name for name in names], {}).prompts == {
        "a.png": "one",
        "a_seed9.png": "one",
        "b_seed1.png": "two",
        "b_seed2.png": "three",
        "c_seed5.jpg": "four",
    }
    assert read_ledger(tmp_path).speed == {}


def test_rows_that_share_an_id_are_told_apart_by_the_ledger(tmp_path: Path, clip: Path) -> None:
    """As the captions of one photograph do: no image gets the prompt of another row."""
    images = write_images(tmp_path / "images", scenes(3, 0))
    for number, name in enumerate(("7_seed42", "7_seed43", "8_seed44")):
        (images / f"{number:06d}.png").rename(images / f"{name}.png")
    table = tmp_path / "prompts.csv"
    table.write_text("image_id,prompt,category\n7,a cat,one\n7,a dog,two\n8,a car,three\n")
    common = ("--images", images, "--prompts_csv", table, "--clip_path", clip, "--metrics", "clip")
    found = evaluate(tmp_path / "out", *common)
    assert found["per_image"]["prompt"] == [None, None, "a car"]
    told = (
        f"Several rows of {table} with other prompts share the id of 7_seed42.png; so it is for 2 of 3 images, whose "
    )
    assert any(text.startswith(told) for text in found["warnings"])
    lines = [
        line(number, "done", file=f"{name}.png", prompt=prompt)
        for number, (name, prompt) in enumerate((("7_seed42", "a cat"), ("7_seed43", "a dog"), ("8_seed44", "a car")))
    ]
    (images / "ledger.jsonl").write_text('{"format": "muralist ledger", "version": 1}\n' + "".join(lines))
    found = evaluate(tmp_path / "out", *common)
    assert found["per_image"]["prompt"] == ["a cat", "a dog", "a car"] and found["warnings"] == []
    assert {name: part["count"] for name, part in found["categories"]["category"].items()} == {
        "one": 1, "two": 1, "three": 1,
    }  # fmt: skip


def test_images_are_found_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In linked folders, as by train, and in the output folder; a link to nothing is an error, not an image less."""
    images = write_images(tmp_path / "out" / "images", scenes(2, 0))
    elsewhere = write_images(tmp_path / "elsewhere", scenes(3, 1))
    (images / "linked").symlink_to(elsewhere)
    (elsewhere / "around").symlink_to(images)
    write_images(images / ".hidden", scenes(1, 2))
    (images / "evaluation").mkdir()
    (images / "evaluation" / "page.png").write_bytes(b"")
    found = [file.relative_to(images).as_posix() for file in find_images(images, "--images", images / "evaluation")]
    assert found == ["000000.png", "000001.png", *(f"linked/00000{number}.png" for number in range(3))]
    assert len(find_images(images, "--images", tmp_path / "out")) == 6, "the folder of the images is below the output"
    (images / "lost.png").symlink_to(tmp_path / "nowhere.png")
    evaluate(tmp_path / "report", "--images", images, expect=1)
    assert "lost.png could not be read: No such file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    evaluate(tmp_path / "file", "--images", images, expect=1)
    assert f"--output_dir {tmp_path / 'file'} is not a folder." in capsys.readouterr().err


def generated_in_both_modes(folder: Path) -> Path:
    images = scenes(4, 0)
    write_images(folder, images)
    write_images(folder / ".exact", np.clip(images[:3].astype(int) + 20, 0, 255).astype(np.uint8))
    lines = [
        line(row, "done", gpu="0", gpu_busy=0.5, **({"psnr_to_exact": 30.0 + row} if row < 3 else {}))
        for row in range(4)
    ]
    (folder / "ledger.jsonl").write_text("".join(lines))
    return folder


def test_the_report_compares_fast_with_exact_mode(tmp_path: Path, clip: Path) -> None:
    images = generated_in_both_modes(tmp_path / "images")
    found = evaluate(tmp_path / "out", "--images", images, "--clip_path", clip)
    assert found["images"]["count"] == 4  # without those of exact mode
    distance = found["distance_to_exact_mode"]
    assert distance["pictures"] == 3 and distance["psnr_db"] == {"mean": 31.0, "worst": 30.0}
    scores = found["per_image"]["clip_score"]
    assert distance["clip_score"]["fast"] == pytest.approx(np.mean(scores[:3]), abs=1e-3)
    assert distance["clip_score"]["exact"] != distance["clip_score"]["fast"]
    warnings = [warning for warning in found["warnings"] if "in fast mode: 31.0 dB PSNR (worst 30.0 dB)" in warning]
    assert len(warnings) == 1 and "CLIP score" in warnings[0]
    assert "in fast mode: 31.0 dB" in (tmp_path / "out" / "report" / "index.html").read_text()
    assert found["speed"]["0"]["gpu_busy"] == 0.5
    assert read_ledger(write_images(tmp_path / "others", scenes(2, 0))).exact_pairs is None


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("scores", "categories", "per_image", "warnings", "images"))


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_results(
    tmp_path: Path, clip: Path, dinov2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every metric; tests/evaluate/test_scores.py does the same with the scores of single images."""
    images = write_images(tmp_path / "images", scenes(5, 0))
    reference = write_images(tmp_path / "reference", scenes(4, 1, side=40))
    table = tmp_path / "prompts.csv"
    table.write_text("image_id,prompt,category\n" + "".join(f"{i:06d},thing {i},{i % 2}\n" for i in range(5)))
    models = ("--prompts_csv", table, "--clip_path", clip, "--dinov2_path", dinov2)
    found = []
    for processes in (1, 2, 3):
        monkeypatch.setenv("NPROC", str(processes))
        output = tmp_path / f"out{processes}"
        weights = ("--inception_weights", inception_weights())
        found.append(evaluate(output, "--images", images, "--reference", reference, *weights, *models))
        assert found[-1]["fid"] > 1 and [entry["metric"] for entry in found[-1]["missing"]] == ["inception_score"]
        # Each process left a file of its own.
        assert len(list(output.glob("features/inception-*/*.bin"))) == processes
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.slow
@pytest.mark.parametrize(("resize", "values"), [("pytorch-fid", "fid"), ("clean-fid", "clean_fid")])
def test_fid_equals_that_of_other_tools(
    resize: str, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values were computed by the tools themselves: scripts/fid_reference.py. Images are enlarged and shrunk."""
    expected = json.loads(Path(__file__).with_name("fid_reference.json").read_text())[values]
    flags = ("--inception_weights", inception_weights(), "--resize", resize, "--metrics", "fid")
    monkeypatch.setenv("NPROC", "2")
    folders = {name: write_images(tmp_path / name, images) for name, images in fid_reference.image_sets().items()}
    for name, value in expected.items():
        found = evaluate(tmp_path / "out", "--images", folders["small"], "--reference", folders[name], *flags)
        assert found["fid"] == pytest.approx(value, abs=1e-2)
        assert found["scores"]["fid"]["low"] < found["fid"] < found["scores"]["fid"]["high"]
        assert f"as {resize} does" in found["scores"]["fid"]["note"] and found["settings"]["resize"] == resize


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("computed", [False, True])
def test_unreadable_images_are_reported(tmp_path: Path, dinov2: Path, computed: bool) -> None:
    """Also where nothing is computed that would have to read them."""
    images = write_images(tmp_path / "images", scenes(4, 0))
    reference = write_images(tmp_path / "reference", scenes(4, 1))
    tear(images / "000001.png")
    (images / "000002.png").write_bytes(b"")
    tear(reference / "000003.png")
    model = ("--dinov2_path", dinov2) if computed else ()
    evaluate(tmp_path / "out", "--images", images, "--reference", reference, *model, expect=int(not computed))
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (found["images"]["count"], found["reference"]["count"]) == (2, 3)
    assert found["per_image"]["file"] == ["000000.png", "000003.png"]
    broken = found["images"]["unreadable"]
    assert [text.partition(": ")[0] for text in broken] == ["000001.png", "000002.png"]
    assert broken[1] == "000002.png: the file is empty"
    left_out = [text for text in found["warnings"] if "of the reference is left out" in text]
    assert len(left_out) == 1 and left_out[0].startswith(str(reference / "000003.png"))
    assert "2 images could not be read: 000001.png: " in (tmp_path / "out" / "report" / "index.html").read_text()


def test_fewer_than_two_readable_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "images", scenes(2, 0))
    tear(images / "000001.png")
    evaluate(tmp_path / "out", "--images", images, expect=1)
    captured = capsys.readouterr().err
    assert f"Fewer than two images of {images} can be read.\n1 are broken, the first because: " in captured
    whole = write_images(tmp_path / "whole", scenes(2, 0))
    evaluate(tmp_path / "out", "--images", whole, "--reference", images, expect=1)
    assert f"Fewer than two images of {images}" in capsys.readouterr().err
    (images / "000001.png").unlink()
    evaluate(tmp_path / "out", "--images", images, expect=1)
    assert f"Only one image was found in {images}, which --images names." in capsys.readouterr().err
    (images / "000000.png").unlink()
    evaluate(tmp_path / "out", "--images", images, expect=1)
    assert f"No image was found in {images}, which --images names." in capsys.readouterr().err


def test_mixed_sizes_are_reported(tmp_path: Path, dinov2: Path) -> None:
    images = write_images(tmp_path / "images", scenes(4, 0))
    reference = write_images(tmp_path / "reference", scenes(3, 1, side=40))
    arguments = ("--images", images, "--reference", reference, "--dinov2_path", dinov2)
    before = evaluate(tmp_path / "out", *arguments)
    assert not any("sizes" in text for text in before["warnings"])
    write_images(images / "more", scenes(3, 0, side=40)[:, :30])
    found = evaluate(tmp_path / "out", *arguments)
    assert found["images"]["sizes"] == {"24 x 24": 4, "30 x 40": 3} and found["reference"]["sizes"] == {"40 x 40": 3}
    told = "The images have 2 sizes, most often 24 x 24 and 30 x 40 (height x width): each is resized on its own."
    assert told in found["warnings"]
    assert found["scores"]["fd_dinov2"]["value"] != before["scores"]["fd_dinov2"]["value"]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert told in page and "24 x 24 (4), 30 x 40 (3)" in page


def digits(output: Path) -> dict[str, Any]:
    report = json.loads((output / "report.json").read_text())
    del report["seconds"], report["settings"]["output_dir"]
    return report


def workers(command: int) -> list[int]:
    """Return the processes that a command has started to compute features."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == command and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def undisturbed(dinov2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """Return arguments of the command and the result of a command that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    images = write_images(folder / "images", scenes(600, 0))
    reference = write_images(folder / "reference", scenes(50, 1))
    arguments = ["--images", images, "--reference", reference, "--dinov2_path", dinov2]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MURALIST_INCEPTION", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        patch.setenv("NPROC", "2")
        patch.setenv("XDG_CACHE_HOME", str(folder))  # which the report names
        evaluate(folder / "out", *arguments)
    return arguments, folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "worker"])
def test_evaluation_survives_sigkill(tmp_path: Path, undisturbed: tuple[list[object], Path], victim: str) -> None:
    """A killed command resumes from the cached features, a killed worker's share is taken over: same digits."""
    arguments, expected = undisturbed

    def start(output: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "muralist", "evaluate", *arguments, "--output_dir", output]
        environment = os.environ | {"NPROC": "2", "XDG_CACHE_HOME": str(expected.parent)}
        return subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment)

    def cached(output: Path) -> dict[int, int]:
        """Return the number of records by process."""
        files = output.glob("features/*/*.bin")
        return {int(path.name.partition("-")[0]): path.stat().st_size // RECORD for path in files}

    output = tmp_path / "out"
    process = start(output)
    while not any(count > 10 for count in cached(output).values()):
        assert process.poll() is None
        time.sleep(0.01)
    running = workers(process.pid)
    busy = max(cached(output), key=cached(output).__getitem__)
    assert len(running) == 2 and busy in running
    os.kill(process.pid if victim == "command" else busy, signal.SIGKILL)
    told = process.communicate(timeout=600)[1]
    if victim == "command":
        assert process.returncode == -signal.SIGKILL and not (output / "report.json").exists()
        deadline = time.monotonic() + 60
        while any(map(is_alive, running)):
            assert time.monotonic() < deadline, "a worker outlives its command"
            time.sleep(0.05)
        kept = sum(cached(output).values())
        resumed = start(output)
        assert f"features of {650 - kept} computed, of {kept} cached" in resumed.communicate(timeout=600)[1]
        assert resumed.returncode == 0 and 10 < kept < 650
    else:
        assert process.returncode == 0
        assert "was killed by SIGKILL. The others take over its share." in told
        assert 10 < cached(output)[busy] < 650
    assert digits(output) == digits(expected)
    assert digits(output)["scores"]["fd_dinov2"]["low"] is not None
