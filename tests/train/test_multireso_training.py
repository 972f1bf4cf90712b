"""HunyuanDiT and pipelines on images of several shapes: each batch has one size, and the curve is reproducible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muralist.cli import main
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.models.diffusers_model import DiffusersSpec
from muralist.models.hunyuan_dit import HunyuanDiTSpec
from muralist.tools.hydit import translate
from tests.data.driving_files import write_arrow, write_index
from tests.support.hunyuan import SMALL
from tests.support.images import EncodedSample, encoded, noise
from tests.support.runs import assert_same_state, finish, last_checkpoint, losses, metrics, start

SHAPES = {(40, 40): 9, (20, 60): 14, (60, 20): 2}  # at 32 pixels the sizes 32 x 32, 16 x 48 and 48 x 16


def shaped(count: int = 25) -> list[EncodedSample]:
    shapes = [shape for shape, number in SHAPES.items() for _ in range(number)][:count]
    return [
        EncodedSample(encoded(noise(number, width, height)), 0, f"image {number}")
        for number, (height, width) in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three shapes, with captions."""
    folder = tmp_path_factory.mktemp("shapes")
    for number, image in enumerate(shaped()):
        (folder / f"{number:02}.png").write_bytes(image.png)
        (folder / f"{number:02}.txt").write_text(image.caption)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all tests go: the small model is built once."""
    results = tmp_path_factory.mktemp("results")
    build_small_hunyuan_dit(results / "models" / "small-hunyuandit")
    return results


def words(data: Path | str, results: Path, run: str, *arguments: object) -> list[str]:
    own = ["--data_path", data, "--multireso", "--samples_per_gpu", 0, "--results_dir", results, "--run_name", run]
    return [str(word) for word in ["train", *SMALL, *own, *arguments]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Height and width of every batch that is encoded."""
    sizes: list[tuple[int, int]] = []
    encode = HunyuanDiTSpec.encode

    def watched(self: HunyuanDiTSpec, batch, keys):  # type: ignore[no-untyped-def]
        sizes.append(tuple(batch.images_u8.shape[1:3]))
        return encode(self, batch, keys)

    monkeypatch.setattr(HunyuanDiTSpec, "encode", watched)
    return sizes


def test_every_batch_has_one_size_and_resuming_is_exact(
    folder: Path, results: Path, seen: list[tuple[int, int]], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    held_out = ["--val_fraction", 0.1]
    assert main(words(folder, results, "through", *held_out, "--max_steps", 6)) == 0
    said = capfd.readouterr().out
    assert "sizes      3 in use (images each): 16 x 48 (1" in said
    assert "fewer images than a total batch of 4 at 48 x 16: a batch of such a size repeats them" in said
    assert len(seen) == 7 and seen[-1] == (32, 32), "six steps, and the held-out images at the one size of all runs"
    assert set(seen[:-1]) >= {(32, 32), (16, 48)} and set(seen) <= {(32, 32), (16, 48), (48, 16)}
    assert metrics(results / "through")[-1]["val/loss"] > 0

    assert main(words(folder, results, "halves", *held_out, "--max_steps", 3)) == 0
    monkeypatch.setattr("muralist.data.sampler.measure_shapes", None)  # the shapes are remembered
    assert main(words(folder, results, "halves", *held_out, "--max_steps", 6)) == 0
    assert losses(results / "halves") == losses(results / "through")
    assert_same_state(last_checkpoint(results / "through"), last_checkpoint(results / "halves"))


def test_without_multireso_there_are_no_buckets(folder: Path, results: Path, seen: list[tuple[int, int]]) -> None:
    arguments = [word for word in words(folder, results, "one", "--max_steps", 3) if word != "--multireso"]
    assert main(arguments) == 0
    assert seen == [(32, 32)] * 3 and not (results / "one" / "picture_shapes.npz").exists()


def test_multi_resolution_index_is_trained_at_its_own_sizes(
    results: Path, tmp_path: Path, seen: list[tuple[int, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    write_arrow(tmp_path / "a.arrow", shaped())
    groups = {"32x32": list(range(9)), "16x64": list(range(9, 25))}  # not the nearest sizes: the index counts
    index = write_index(tmp_path / "m.json", [str(tmp_path / "a.arrow")], [25], groups, group_length={})
    assert main(words(index, results, "index", "--max_steps", 6, "--reso-step", 16)) == 0
    assert "2 in use (images each): 16 x 64 (16), 32 (9)" in capfd.readouterr().out
    assert set(seen) == {(32, 32), (16, 64)} and len(seen) == 6
    assert not (results / "index" / "picture_shapes.npz").exists()


def test_driving_scenes_are_squares(results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words("driving_world", results, "squares", "--max_steps", 1)) == 0
    assert "sizes      1 in use (images each): 32 (64)" in capfd.readouterr().out


def test_images_of_other_shapes_are_other_data(folder: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, results, "changed", "--max_steps", 1)) == 0
    manifest = last_checkpoint(results / "changed") / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert len(facts["data"]["buckets"]) == 16
    with np.load(results / "changed" / "picture_shapes.npz") as file:
        changed = dict(file)
    changed["shapes"] = changed["shapes"][:, ::-1]
    np.savez(results / "changed" / "picture_shapes.npz", **changed)
    assert main(words(folder, results, "changed", "--max_steps", 2)) == 1
    assert "The data changed since this run started" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--model", "JiT-T/8"], "JiT-T/8 makes images of one size. --multireso trains images of several shapes."),
        (["--cache", "device"], "--cache device needs images of one size. With --multireso they have several."),
        (["--img_size", "32", "64"], "--multireso starts from a square, not from 32 x 64."),
        (["--reso_step", "24"], "--reso_step 24 does not fit images of 32 pixels. Give a multiple of 16"),
        (["--reso_step", "32"], "--reso_step 32 does not fit images of 32 pixels."),
        (["--no_multireso", "--reso_step", "16"], "--reso_step has no effect without --multireso."),
    ],
)
def test_invalid_settings_are_refused_before_a_run_has_a_folder(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: list[str], said: str
) -> None:
    assert main(words(folder, tmp_path / "results", "run", *wrong)) == 1
    assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "results").exists()


def test_official_multireso_flags_are_accepted() -> None:
    assert translate(["--multireso", "--reso-step", "64"])[0] == ["--multireso", "--reso-step", "64"]


def pipeline_words(model: Path, data: Path, results: Path, run: str, *arguments: object) -> list[str]:
    return words(data, results, run, "--model", "diffusers", "--model.path", model, "--val_fraction", 0.1, *arguments)


@pytest.mark.parametrize("name", ["flux", pytest.param("sd", marks=pytest.mark.slow)])
def test_pipelines_have_buckets(
    name: str, folder: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A U-Net, and a transformer whose latents are packed."""
    sizes: list[tuple[int, ...]] = []
    encode, model = DiffusersSpec.encode, tiny_pipeline(name)

    def watched(self: DiffusersSpec, batch: Any, keys: Any) -> Any:
        inputs = encode(self, batch, keys)
        sizes.append((*batch.images_u8.shape[1:3], inputs[0][0].numel()))
        return inputs

    monkeypatch.setattr(DiffusersSpec, "encode", watched)
    assert main(pipeline_words(model, folder, tmp_path, "through", "--max_steps", 6)) == 0
    assert set(sizes) >= {(32, 32, 64), (16, 48, 48)}, "numbers of latents: 4 for 64 pixels"
    for steps in (3, 6):
        assert main(pipeline_words(model, folder, tmp_path, "halves", "--max_steps", steps)) == 0
    assert losses(tmp_path / "halves") == losses(tmp_path / "through")
    assert_same_state(last_checkpoint(tmp_path / "through"), last_checkpoint(tmp_path / "halves"))


def test_sizes_that_a_pipeline_does_not_make_are_refused(
    folder: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(pipeline_words(tiny_pipeline("ltx"), folder, tmp_path, "run", "--max_steps", 1)) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "LTXPipeline cannot be trained on images of 16 x 48 pixels: `height` and `width` have to be divisible" in said
    )
    assert "Give --img_size and --reso_step in multiples of what it needs" in said


@pytest.mark.slow
def test_two_ranks_of_a_pipeline_have_the_same_curve(
    folder: Path, tmp_path: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    arguments = [tiny_pipeline("flux"), folder, tmp_path]
    length = ["--max_steps", 6, "--global_batch_size", 4]
    assert main(pipeline_words(*arguments, "alone", *length)) == 0
    finish(start("muralist", "launch", "--nproc", 2, *pipeline_words(*arguments, "together", *length)))
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    last = [metrics(tmp_path / run)[-1]["val/loss"] for run in ("together", "alone")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_have_the_same_curve(folder: Path, results: Path) -> None:
    arguments = ["--max_steps", 6, "--global_batch_size", 4, "--val_fraction", 0.1]
    assert main(words(folder, results, "alone", *arguments)) == 0
    finish(start("muralist", "launch", "--nproc", 2, *words(folder, results, "together", *arguments)))
    assert losses(results / "together") == pytest.approx(losses(results / "alone"), rel=1e-5)
    last = [metrics(results / run)[-1]["val/loss"] for run in ("together", "alone")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)
