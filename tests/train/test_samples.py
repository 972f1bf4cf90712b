"""Samples: prompts of each GPU, files with metadata, errors, and the contact sheet."""

from __future__ import annotations

import io
import logging
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.images import encode_png, to_uint8_array
from muralist.models.jit_spec import JiTSpec
from muralist.models.spec import build_spec
from muralist.settings import ModelSettings, SampleSettings, TrainSettings
from muralist.train.checkpoint import folder_name
from muralist.train.loggers import MetricsLogger
from muralist.train.parallel import SwappedWeights
from muralist.train.samples import generate_samples, read_prompts, samples_of_rank, write_samples, write_sheet
from muralist.train.step import EMA
from tests.support.disks import read_only_view

GAP, LEFT, TOP = 6, 190, 34  # of the sheet


def family(*label_names: str) -> JiTSpec:
    model = ModelSettings(name="JiT-T/8", img_size=16, enable_condition=bool(label_names))
    built = build_spec(TrainSettings(model=model), list(label_names))
    assert isinstance(built, JiTSpec)
    return built


def network(built: JiTSpec, scale: float = 1.0) -> torch.nn.Module:
    """A network whose last layer is not zero, so that images differ."""
    net = built.network()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "adaLN" in name or name.startswith("final_layer.linear"):
                parameter.copy_(scale * 0.05 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    return net


# Prompts


@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 20) | st.just("auto"), st.booleans())
def test_every_given_prompt_is_sampled_once_by_some_gpu(
    prompts: int, ranks: int, per_gpu: int | Literal["auto"], given_here: bool
) -> None:
    names = [str(index) for index in range(prompts)]
    settings = SampleSettings(per_gpu=per_gpu, prompts=names if given_here else [])
    chosen = [samples_of_rank(names, settings, rank, ranks) for rank in range(ranks)]
    together = sorted(index for mine in chosen for index in mine)
    assert together == list(range(len(together))), "each sample, and so each seed, once"
    if per_gpu == 0:
        assert not together
        return
    assert all(mine[0] == rank for rank, mine in enumerate(chosen)), "gpu_R_sample.png exists for every GPU"
    assert not given_here or len(together) >= prompts
    if per_gpu == "auto" and ranks == 1 and not given_here:
        assert 4 <= len(together) <= 8
    elif per_gpu != "auto":
        assert all(len(mine) >= per_gpu for mine in chosen)
        assert given_here or len(together) == per_gpu * ranks
    else:
        assert len(together) == max(ranks, prompts * given_here)


def test_prompts_from_flags_a_file_or_the_model(tmp_path: Path) -> None:
    pets = family("cat", "dog", "owl")
    assert read_prompts([], pets) == ["cat", "dog", "owl"]
    assert read_prompts([], family(*map(str, range(10)))) == [str(number) for number in range(8)]
    assert read_prompts([], family()) == ["unconditional"]
    assert read_prompts(["owl", " cat "], pets) == ["owl", "cat"]
    file = tmp_path / "prompts.txt"
    file.write_text("  dog \n\n1\r\nCAT\n")
    assert read_prompts([str(file)], pets) == ["dog", "1", "CAT"]


def test_invalid_prompts_are_refused(tmp_path: Path) -> None:
    pets = family("cat", "dog")
    with pytest.raises(UserError, match=r"'cta' does not name a class.*Did you mean cat\?"):
        read_prompts(["cta"], pets)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts([str(tmp_path / "empty.txt")], pets)
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(UserError, match=r"photo\.png: it is not UTF-8 text"):
        read_prompts([str(tmp_path / "photo.png")], pets)
    with pytest.raises(UserError, match="missing.txt was not found"):
        read_prompts([str(tmp_path / "missing.txt")], family())
    for long in ("long " * 1000, "图" * 200):
        assert read_prompts([long], family()) == [long.strip()]


# Images


def test_bytes_are_rounded_and_clamped() -> None:
    values = torch.tensor([-2.0, -1.0, -0.997, 0.0, 0.5, 1.0, 1.7]).view(1, 1, 1, 7).expand(1, 3, 1, 7)
    pixels = to_uint8_array(values)
    assert (pixels.shape, pixels.dtype) == ((1, 1, 7, 3), np.uint8)
    assert pixels[0, 0, :, 0].tolist() == [0, 0, 0, 128, 191, 255, 255]
    every = torch.arange(256).float() / 127.5 - 1
    assert to_uint8_array(every.view(1, 1, 16, 16).expand(1, 3, 16, 16))[0, ..., 2].ravel().tolist() == list(range(256))


def test_png_stores_prompt_seed_and_step() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    facts = {"prompt": 'Straße, 图 "quoted"', "seed": "12", "step": "500"}
    with Image.open(io.BytesIO(encode_png(pixels, facts))) as image:
        image.load()
        assert (image.format, image.info) == ("PNG", facts)
        assert np.array_equal(np.asarray(image), pixels)


def test_samples_use_ema_weights_and_leave_the_network_unchanged() -> None:
    pets = family("cat", "dog")
    net, other = network(pets), network(pets, scale=-2.0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    settings = SampleSettings(steps=2, seed=5)
    ema = EMA(dict(other.named_parameters()), 1.0)
    images = generate_samples(
        pets, SwappedWeights(net, dict(ema.items())).eval(), ["cat", "dog"], [1, 0], settings, None
    )
    expected = to_uint8_array(pets.sample(other.eval(), ["dog", "cat"], [6, 5], settings))
    assert np.array_equal(images, expected)
    assert not np.array_equal(images, to_uint8_array(pets.sample(net.eval(), ["dog", "cat"], [6, 5], settings)))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Shown(MetricsLogger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.images: dict[str, tuple[int, np.ndarray, str]] = {}

    def image(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        self.images[name] = (step, image_u8, caption)


def test_files_of_two_gpus(tmp_path: Path) -> None:
    pets = family("cat", "dog", "owl")
    net = network(pets)
    net.train()
    settings, shown = SampleSettings(steps=2, seed=5, per_gpu=2), Shown()
    for rank in (1, 0):
        write_samples(
            tmp_path, 500, rank, 2, pets, net, ["cat", "dog", "owl"], settings, None, [shown], at_once=rank + 1
        )
    assert net.training
    folder = tmp_path / "step_0000500"
    expected = {"gpu_0_sample": "cat", "gpu_0_sample_2": "owl", "gpu_1_sample": "dog", "gpu_1_sample_2": "cat"}
    seeds = {"gpu_0_sample": 5, "gpu_0_sample_2": 7, "gpu_1_sample": 6, "gpu_1_sample_2": 8}
    for name, prompt in expected.items():
        assert (folder / f"{name.replace('sample', 'prompt')}.txt").read_text() == f"{prompt}\n"
        seed = seeds[name]
        with Image.open(folder / f"{name}.png") as image:
            image.load()
            assert image.info == {"prompt": prompt, "seed": str(seed), "step": "500"}
            alone = to_uint8_array(pets.sample(net.eval(), [prompt], [seed], settings))[0]
            assert np.abs(np.asarray(image).astype(int) - alone).max() <= 1
        step, kept, caption = shown.images[f"samples/{name.replace('_sample', '')}"]
        assert (step, caption) == (500, prompt)
        assert np.abs(kept.astype(int) - alone).max() <= 1
    assert len(list(folder.iterdir())) == 8
    rows = cells(tmp_path / "sheet.png", 4, 1, 96)  # a second row for the second cat
    assert all(not np.array_equal(one, other) for one, other in combinations(rows, 2))


# What goes wrong


def sample_on_two_gpus(folders: list[Path]) -> list[str]:
    """Both ranks' samples of step 500, each into the folder it sees; returns what is logged as an error."""
    pets = family("cat", "dog")
    net = network(pets)
    net.train()
    records: list[logging.LogRecord] = []
    mine = logging.Logger("mine")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    mine.addHandler(handler)
    for rank, folder in enumerate(folders):
        write_samples(folder, 500, rank, 2, pets, net, ["cat", "dog"], SampleSettings(steps=2), None, [], mine)
        assert net.training, "training goes on"
    return [record.getMessage() for record in records if record.levelno == logging.ERROR]


def test_rank_that_cannot_write_logs_it_and_the_other_continues(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    with read_only_view(folder, tmp_path / "view") as view:
        errors = sample_on_two_gpus([folder, view])
        assert len(errors) == 1 and "Read-only file system" in errors[0]
        assert errors[0].startswith("Error during sampling on GPU 1: ")
    assert {path.name for path in (folder / "step_0000500").iterdir()} == {"gpu_0_sample.png", "gpu_0_prompt.txt"}


def test_file_in_place_of_the_samples_folder(tmp_path: Path) -> None:
    (tmp_path / "step_0000500").write_text("in the way")
    errors = sample_on_two_gpus([tmp_path, tmp_path])
    assert [error.partition(": ")[0] for error in errors] == [f"Error during sampling on GPU {rank}" for rank in (0, 1)]
    assert all("step_0000500" in error for error in errors)
    assert (tmp_path / "step_0000500").read_text() == "in the way"


def test_error_is_written_beside_the_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "step_0000500"
    (folder / "gpu_1_sample.png").mkdir(parents=True)
    (error,) = sample_on_two_gpus([tmp_path, tmp_path])
    assert error == f"Error during sampling on GPU 1: {(folder / 'gpu_1_error.txt').read_text().strip()}"
    assert (
        "directory" in error and (folder / "gpu_0_sample.png").is_file() and not (folder / "gpu_0_error.txt").exists()
    )


# The sheet


def place(folder: Path, step: int, prompt: str, pixels: np.ndarray, rank: int = 0) -> None:
    target = folder / folder_name(step)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"gpu_{rank}_sample.png").write_bytes(encode_png(pixels, {}))
    (target / f"gpu_{rank}_prompt.txt").write_text(prompt + "\n")


def cells(sheet: Path, rows: int, columns: int, side: int) -> np.ndarray:
    """The cells of a sheet, [rows, columns, side, side, 3], after checking its size."""
    with Image.open(sheet) as image:
        assert image.size == (LEFT + columns * (side + GAP) + GAP, TOP + rows * (side + GAP) + GAP)
        pixels = np.asarray(image.convert("RGB"))
    across = [LEFT + column * (side + GAP) for column in range(columns)]
    down = [TOP + row * (side + GAP) for row in range(rows)]
    return np.stack([np.stack([pixels[y : y + side, x : x + side] for x in across]) for y in down])


def test_each_image_is_in_its_row_and_column(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (2, 3, 128, 128, 3), dtype=np.uint8)
    for row, prompt in enumerate(("zebra", "apple")):  # the order of the prompts, not of the alphabet
        for column, step in enumerate((50, 500, 5000)):
            if (row, column) != (1, 0):
                place(tmp_path, step, prompt, images[row, column], rank=1 - row)
    sheet = write_sheet(tmp_path, ["zebra", "never sampled", "apple"])
    assert sheet == tmp_path / "sheet.png"
    shown = cells(sheet, 2, 3, 128)
    for row in range(2):
        for column in range(3):
            if (row, column) != (1, 0):
                assert np.array_equal(shown[row, column], images[row, column])
    missing = shown[1, 0]
    assert len(np.unique(missing[1:-1, 1:-1].reshape(-1, 3), axis=0)) == 1  # an empty frame
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["sheet.png"]


@pytest.mark.parametrize(("width", "side"), [(8, 96), (16, 96), (32, 96), (64, 128), (100, 100), (512, 256)])
def test_small_images_are_enlarged_and_large_ones_reduced(tmp_path: Path, width: int, side: int) -> None:
    pixels = np.zeros((width, width, 3), np.uint8)
    pixels[: width // 2, : width // 2] = (200, 40, 10)
    pixels[width // 2 :, width // 2 :] = (10, 40, 200)
    place(tmp_path, 10, "a", pixels)
    sheet = write_sheet(tmp_path, ["a"])
    assert sheet is not None
    cell = cells(sheet, 1, 1, side)[0, 0]
    quarter = side // 4
    assert np.abs(cell[quarter, quarter].astype(int) - (200, 40, 10)).max() <= 12
    assert np.abs(cell[-quarter, -quarter].astype(int) - (10, 40, 200)).max() <= 12
    assert cell[quarter, -quarter].max() <= 12


def test_many_checkpoints_are_thinned_to_ten_with_the_first_and_the_last(tmp_path: Path) -> None:
    steps = [9_999_900 + 10 * number for number in range(33)]  # over the edge where names grow longer
    for number, step in enumerate(steps):
        place(tmp_path, step, "a", np.full((96, 96, 3), 7 * number, np.uint8))
    (tmp_path / "step_backup").mkdir()
    sheet = write_sheet(tmp_path, ["a"])
    assert sheet is not None
    shown = [int(cell[0, 0, 0]) // 7 for cell in cells(sheet, 1, 10, 96)[0]]
    assert (shown[0], shown[-1]) == (0, 32)
    assert set(np.diff(shown)) <= {3, 4}
    for extra in steps[10:]:
        for path in (tmp_path / folder_name(extra)).iterdir():
            path.unlink()
    sheet = write_sheet(tmp_path, ["a"])
    assert sheet is not None
    assert [int(cell[0, 0, 0]) // 7 for cell in cells(sheet, 1, 10, 96)[0]] == list(range(10))


def test_without_samples_there_is_no_sheet(tmp_path: Path) -> None:
    assert write_sheet(tmp_path, ["a"]) is None
    place(tmp_path, 1, "b", np.zeros((8, 8, 3), np.uint8))
    assert write_sheet(tmp_path, ["a"]) is None
    (tmp_path / "step_0000001" / "gpu_0_sample.png").unlink()
    assert write_sheet(tmp_path, ["b"]) is None
    assert not (tmp_path / "sheet.png").exists()


def test_the_sheet_names_prompts_and_steps(tmp_path: Path) -> None:
    place(tmp_path, 500, "a", np.zeros((96, 96, 3), np.uint8))
    first = write_sheet(tmp_path, ["a"])
    assert first is not None
    with Image.open(first) as image:
        pixels = np.asarray(image.convert("L"))
    assert (pixels[TOP : TOP + 96, :LEFT] < 128).sum() > 5  # the prompt
    assert (pixels[:TOP, LEFT:] < 190).sum() > 20  # the step
