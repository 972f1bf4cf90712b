"""The contract of a painter, kept by every kind of pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler
from transformers import PreTrainedModel

from muralist.errors import UserError
from muralist.generate.painter import CannotPaint, Order, Painter, Way
from muralist.generate.pipelines import made_with, settle
from tests.support.painting import (
    CAR,
    CAT,
    CPU,
    DOGS,
    NIGHT,
    SIZE,
    SNOW,
    STEPS,
    differ,
    no_beat,
    paint,
    painter_of,
    plain,
)
from tests.support.pipelines import BUILDERS

UNEVEN = ("zimage", "qwenimage")  # whose embeddings are as long as the text
Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def painters(tiny_pipeline: Build) -> Callable[[str], Painter]:
    known: dict[str, Painter] = {}

    def get(name: str) -> Painter:
        if name not in known:
            known[name] = painter_of(tiny_pipeline(name))
        return known[name]

    return get


@contextmanager
def encoder_runs() -> Iterator[list[str]]:
    """The text encoders that run meanwhile."""
    seen: list[str] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, PreTrainedModel):
            seen.append(type(module).__name__)

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_picture_depends_on_neither_its_neighbours_nor_its_place(
    name: str, painters: Callable[[str], Painter]
) -> None:
    painter = painters(name)
    first = paint(painter, CAR, NIGHT, SNOW)
    last = paint(painter, DOGS, CAT, CAR)
    copies = paint(painter, CAR, CAR, CAR)
    assert painter.batches() is (name not in UNEVEN)
    assert all(picture.shape == (*SIZE, 3) and picture.dtype == np.uint8 for picture in first)
    for picture in (last[2], *copies):
        assert np.array_equal(first[0], picture)
    assert min(differ(first[0], other) for other in (*first[1:], *last[:2])) > 5


@pytest.mark.parametrize("name", BUILDERS)
def test_that_holds_in_half_precision_too(name: str, tiny_pipeline: Build) -> None:
    painter = painter_of(tiny_pipeline(name), dtype="bf16")
    first, last = paint(painter, CAR, NIGHT), paint(painter, SNOW, CAR)
    assert np.array_equal(first[0], last[1])
    assert differ(first[0], first[1]) > 5


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_what_diffusers_alone_makes(name: str, tiny_pipeline: Build, painters: Callable[[str], Painter]) -> None:
    orders = [CAR, NIGHT] if name not in UNEVEN else [NIGHT]
    given: dict[str, Any] = {"schnell": {"guidance_scale": 1.0}}.get(name, {})
    if name == "qwenimage":
        given = {"guidance_scale": None, "true_cfg_scale": 7.5}
    expected = plain(tiny_pipeline(name), *orders, **given)
    for mine, theirs in zip(paint(painters(name), *orders), expected, strict=True):
        assert differ(mine, theirs) <= 1


@pytest.mark.parametrize("name", BUILDERS)
def test_text_is_encoded_ahead_and_then_never_again(name: str, painters: Callable[[str], Painter]) -> None:
    painter = painters(name)
    painter.prepare([SNOW])
    unprepared = paint(painter, CAR, DOGS, CAT)
    with encoder_runs() as runs:
        painter.prepare([CAR, DOGS, CAT])
    assert len(runs) >= 3
    with encoder_runs() as runs:
        prepared = paint(painter, CAR, DOGS, CAT)
        assert paint(painter, CAT)[0].shape == (*SIZE, 3)
        painter.prepare([DOGS, CAT, CAR])
    assert runs == []
    assert all(map(np.array_equal, prepared, unprepared))
    painter.prepare([SNOW])  # the others are forgotten
    with encoder_runs() as runs:
        paint(painter, CAR)
    assert runs


@pytest.mark.parametrize("name", BUILDERS)
def test_prompt_and_seed_both_count(name: str, painters: Callable[[str], Painter]) -> None:
    picture, other_seed, other_prompt = (
        paint(painters(name), order)[0] for order in (CAR, CAR._replace(seed=6), CAR._replace(prompt=NIGHT.prompt))
    )
    assert differ(picture, other_seed) > 10
    assert differ(picture, other_prompt) > 3


@pytest.mark.parametrize("name", ["hunyuan", "sd", "wan21", "zimage", "qwenimage"])
def test_the_negative_prompt_counts(name: str, painters: Callable[[str], Painter]) -> None:
    assert differ(*(paint(painters(name), CAR._replace(negative_prompt=text))[0] for text in ("", "rain at night"))) > 0


def test_the_same_noise_in_every_precision(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd3")
    exact = paint(painter_of(folder), CAR)[0].astype(int)
    rough = paint(painter_of(folder, dtype="bf16"), CAR)[0].astype(int)
    # Other noise would be another picture: the seeds of the test above are 20 levels apart and more.
    assert np.abs(exact - rough).mean() < 5


def test_a_scheduler_that_draws_noise_draws_each_pictures_own(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd")
    painter = painter_of(folder, scheduler="eulerancestraldiscrete")
    first, last = paint(painter, CAR, NIGHT, SNOW), paint(painter, DOGS, CAT, CAR)
    assert np.array_equal(first[0], last[2])
    assert differ(first[0], plain(folder, CAR, scheduler=EulerAncestralDiscreteScheduler)[0]) <= 1


def test_a_scheduler_that_does_not_fit_is_refused_with_those_that_do(tiny_pipeline: Build) -> None:
    with pytest.raises(UserError, match="DPMSolverMultistep, .*Did you mean EulerDiscrete?"):
        painter_of(tiny_pipeline("sd"), scheduler="EulerDiscret")


def test_a_beat_at_every_step_and_fewer_steps_for_a_trial(painters: Callable[[str], Painter]) -> None:
    beats: list[int] = []
    painters("wan22").paint([CAR], SIZE, lambda: beats.append(1))
    assert len(beats) == STEPS
    painters("wan22").paint([CAR], SIZE, lambda: beats.append(1), Way.TRIAL)
    assert len(beats) == STEPS + 2


@pytest.mark.parametrize(
    ("name", "wrong", "multiple"),
    [("hunyuan", (70, 64), 16), ("flux", (64, 72), 16), ("wan21", (64, 72), 16), ("sd", (60, 64), 8)],
)
def test_a_size_that_does_not_work_is_refused_with_one_that_does(
    name: str, wrong: tuple[int, int], multiple: int, painters: Callable[[str], Painter]
) -> None:
    with pytest.raises(UserError, match=f"{wrong[0]} x {wrong[1]}.*multiples of {multiple}: 64 x (64|80) will do"):
        painters(name).paint([CAR], wrong, no_beat)


def test_the_size_of_all_rows_ends_the_work_and_that_of_one_row_does_not(tiny_pipeline: Build) -> None:
    painter = painter_of(tiny_pipeline("sd"), height=60)
    with pytest.raises(CannotPaint, match="60 x 64"):
        painter.paint([CAR], (60, 64), no_beat)
    with pytest.raises(UserError, match="52 x 64") as caught:
        painter.paint([CAR], (52, 64), no_beat)
    assert not isinstance(caught.value, CannotPaint)


def test_clips(tiny_pipeline: Build) -> None:
    painter = painter_of(tiny_pipeline("wan21"), num_frames=5)
    clips = [painter.paint(orders, (32, 32), no_beat) for orders in ((CAR, NIGHT), (SNOW, CAR))]
    assert clips[0][0].shape == (5, 32, 32, 3)
    assert np.array_equal(clips[0][0], clips[1][1])
    assert differ(clips[0][0][0], clips[0][0][4]) > 0
    halved = painter_of(tiny_pipeline("wan21"), num_frames=9, enable_half_frame=True)
    assert np.array_equal(halved.paint([CAR, NIGHT], (32, 32), no_beat)[0], clips[0][0])
    with pytest.raises(UserError, match="StableDiffusionPipeline makes pictures, not clips of 5 frames"):
        painter_of(tiny_pipeline("sd"), num_frames=5)


def test_a_picture_that_overflows_is_not_stored_as_black(tiny_pipeline: Build) -> None:
    painter: Any = painter_of(tiny_pipeline("sd"))
    painter._pipe.vae.decoder.conv_out.weight.fill_(torch.inf)
    with pytest.raises(UserError, match="overflowed.*fp32"):
        paint(painter, CAR)


def test_a_picture_that_the_safety_checker_blackened_is_a_failure(
    tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    painter: Any = painter_of(tiny_pipeline("sd"))
    monkeypatch.setattr(painter._pipe, "run_safety_checker", lambda image, *_: (image * 0, [False, True]))
    with pytest.raises(UserError, match="safety checker took offence"):
        paint(painter, CAR, NIGHT)


def test_pipelines_that_need_more_or_less_than_text_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "another"
    shutil.copytree(tiny_pipeline("sd"), copy)
    index = json.loads((copy / "model_index.json").read_text())

    def names(**changes: Any) -> None:
        (copy / "model_index.json").write_text(json.dumps(index | changes))

    names(_class_name="NoSuchPipeline")
    with pytest.raises(UserError, match="cannot be loaded.*NoSuchPipeline"):
        painter_of(copy)
    names(_class_name="DDPMPipeline", **{part: [None, None] for part in ("vae", "tokenizer", "text_encoder")})
    with pytest.raises(UserError, match="DDPMPipeline does not make pictures from text alone. It takes no prompt"):
        painter_of(copy)


def test_weights_that_are_cut_short_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pipeline("sd"), copy)
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is cut short: .* Copy the model anew"):
        painter_of(copy)


def test_orders_and_their_lists_stay_as_they_were(painters: Callable[[str], Painter]) -> None:
    orders = [Order("a cat", "a dog", 3)]
    pictures = [painters("zimage").paint(orders, SIZE, no_beat)[0] for _ in range(2)]
    assert np.array_equal(*pictures)
    assert orders == [Order("a cat", "a dog", 3)]


def test_one_thread_and_no_timed_choice_of_kernels() -> None:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        settle(CPU)
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.deterministic
        assert made_with(CPU)["torch"] == torch.__version__
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
