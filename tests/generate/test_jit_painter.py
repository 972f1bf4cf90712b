"""Models trained here as painters: JiT in all its forms, and HunyuanDiT with trained weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from muralist.errors import UserError
from muralist.generate.models import check_model
from muralist.generate.painter import Order, Painter
from muralist.generate.pipelines import open_painter
from muralist.models.export import export
from muralist.models.jit_family import JiTFamily
from muralist.models.lora import Lora
from muralist.models.small_hunyuan import build_small_hunyuan
from muralist.pictures import to_u8
from muralist.settings import ExportSettings, GenerateSettings, SampleSettings
from tests.support.hunyuan import small_family
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.support.painting import CPU, differ, no_beat

DOG, CAT = Order("dog", "", 3), Order("cat", "", 4)


def given(path: Path, **changes: Any) -> GenerateSettings:
    plain = {"num_inference_steps": 4, "dtype": "fp32"} | changes
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(path), **plain)


def painter_of(path: Path, **changes: Any) -> Painter:
    return open_painter(given(path, **changes), CPU)


def paint(painter: Painter, *orders: Order) -> list[np.ndarray]:
    return painter.paint(orders, (SIDE, SIDE), no_beat)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JiTFamily, torch.nn.Module]:
    chosen = family("cat", "dog", "bird")
    network = network_of(chosen)
    run = checkpoint(tmp_path_factory.mktemp("runs") / "pets", chosen.describe(), network.state_dict())
    return run, chosen, network


def test_numbers_that_are_none_make_no_picture(tmp_path: Path) -> None:
    chosen = family("cat", "dog", "bird")
    weights = network_of(chosen).state_dict()
    weights["final_layer.linear.bias"] = torch.full_like(weights["final_layer.linear.bias"], torch.nan)
    painter = painter_of(checkpoint(tmp_path / "run", chosen.describe(), weights))
    with pytest.raises(UserError, match="no picture: some of its numbers overflowed"):
        paint(painter, DOG)


def test_it_paints_what_the_family_draws(pets: tuple[Path, JiTFamily, torch.nn.Module]) -> None:
    run, chosen, network = pets
    painter = painter_of(run)
    assert painter.batches()
    painter.prepare([DOG])
    drawn = to_u8(chosen.sample(network, ["dog", "cat", "2"], [3, 4, 5], SampleSettings(steps=4, guidance=2.9)))
    painted = paint(painter, DOG, CAT, Order("bird", "", 5))
    assert all(map(np.array_equal, painted, drawn))
    assert np.array_equal(paint(painter, CAT, CAT, DOG)[2], painted[0])
    assert differ(painted[0], painted[1]) > 5


def test_noise_is_drawn_ahead_once_and_is_the_same(
    pets: tuple[Path, JiTFamily, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    unprepared = paint(painter_of(pets[0]), DOG, CAT)
    painter, drawn, draw = painter_of(pets[0]), [], JiTFamily.sample_noise

    def watched(family: JiTFamily, seeds: list[int]) -> torch.Tensor:
        drawn.append(list(seeds))
        return draw(family, seeds)

    monkeypatch.setattr(JiTFamily, "sample_noise", watched)
    painter.prepare([DOG, CAT])
    painter.prepare([CAT, DOG, DOG])  # as the window moves on
    assert all(map(np.array_equal, paint(painter, DOG, CAT), unprepared))
    assert sorted(drawn) == [[DOG.seed], [CAT.seed]]
    painter.prepare([CAT])  # the other is forgotten
    assert all(map(np.array_equal, paint(painter, DOG, CAT), unprepared))
    assert drawn[2:] == [[DOG.seed, CAT.seed]]


def test_noise_that_could_not_be_drawn_is_drawn_again(
    pets: tuple[Path, JiTFamily, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    painter, draw, failed = painter_of(pets[0]), JiTFamily.sample_noise, []

    def short_of_memory(family: JiTFamily, seeds: list[int]) -> torch.Tensor:
        if not failed:
            failed.append(seeds)
            raise MemoryError
        return draw(family, seeds)

    monkeypatch.setattr(JiTFamily, "sample_noise", short_of_memory)
    painter.prepare([DOG])
    with pytest.raises(MemoryError):
        paint(painter, DOG)
    assert paint(painter, DOG)[0].shape == (SIDE, SIDE, 3)


def test_every_form_of_the_weights_is_the_same_model(
    pets: tuple[Path, JiTFamily, torch.nn.Module], tmp_path: Path
) -> None:
    run, _, network = pets
    export(ExportSettings(source=str(run), destination=str(tmp_path / "export")))
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    torch.save({"model": {}, "model_ema1": state, "model_ema2": {}}, tmp_path / "official.pth")
    (tmp_path / "folder").mkdir()
    torch.save({"model": {}, "model_ema1": state, "model_ema2": {}}, tmp_path / "folder" / "checkpoint-last.pth")
    expected = paint(painter_of(run), DOG)[0]
    assert np.array_equal(paint(painter_of(run / "checkpoints" / "step_0000001"), DOG)[0], expected)
    assert np.array_equal(paint(painter_of(tmp_path / "export"), DOG)[0], expected)
    for name in ("weights.safetensors", "official.pth", "folder"):  # they know classes by number alone
        assert np.array_equal(paint(painter_of(tmp_path / name), DOG._replace(prompt="1"))[0], expected)
    with pytest.raises(UserError, match="'dog' names no class.*numbers from 0 to 2"):
        paint(painter_of(tmp_path / "official.pth"), DOG)


def test_guidance_that_ends_early(pets: tuple[Path, JiTFamily, torch.nn.Module]) -> None:
    run, _, _ = pets

    def painted(**changes: Any) -> tuple[np.ndarray, int]:
        beats: list[int] = []
        picture = painter_of(run, num_inference_steps=10, **changes).paint([DOG], (SIDE, SIDE), lambda: beats.append(1))
        return picture[0], len(beats)

    whole, passes = painted()
    none, fewest = painted(guidance_scale=1.0)
    assert fewest == 19  # two stages a step, and one for the last
    for cut, expected in ((10, whole), (12, whole), (0, none), (1, none)):  # it never was on before 0.1 of the way
        assert np.array_equal(painted(cfg_truncation_step=cut)[0], expected), cut
    cut, fewer = painted(cfg_truncation_step=5)
    assert fewest < fewer < passes
    assert differ(cut, whole) > 0
    assert differ(cut, none) > 0


def test_the_interval_of_guidance(pets: tuple[Path, JiTFamily, torch.nn.Module]) -> None:
    run, chosen, network = pets

    def painted(**changes: Any) -> np.ndarray:
        return paint(painter_of(run, num_inference_steps=10, **changes), DOG)[0]

    usual = painted()
    assert np.array_equal(painted(guidance_interval=(0.1, 1)), usual)
    sampling = SampleSettings(steps=10, guidance=2.9, interval=(0.3, 0.6))
    drawn = to_u8(chosen.sample(network, ["dog"], [3], sampling))[0]
    assert np.array_equal(painted(guidance_interval=(0.3, 0.6)), drawn)
    assert differ(drawn, usual) > 0
    # A cut ends it early and never prolongs it.
    assert np.array_equal(painted(guidance_interval=(0.3, 0.6), cfg_truncation_step=8), drawn)
    none = painted(guidance_scale=1.0)
    assert np.array_equal(painted(guidance_interval=(0.3, 0.6), cfg_truncation_step=2), none)
    with pytest.raises(UserError, match="interval 0.5 to 0.2 is empty"):
        check_model(given(run, guidance_interval=(0.5, 0.2)))


def test_the_official_last_step(pets: tuple[Path, JiTFamily, torch.nn.Module]) -> None:
    run, chosen, network = pets

    def painted(**changes: Any) -> np.ndarray:
        return paint(painter_of(run, num_inference_steps=50, **changes), DOG)[0]

    sampling = SampleSettings(steps=50, guidance=2.9, official_last_step=True)
    official = painted(official_last_step=True)
    assert np.array_equal(official, to_u8(chosen.sample(network, ["dog"], [3], sampling))[0])
    assert (
        differ(official, painted()) > 0
    )  # the noise that it leaves: 1 - t is 0.02 in the last step, the clamp at 0.05


def test_half_precision_is_what_autocast_makes_of_whole_weights(
    pets: tuple[Path, JiTFamily, torch.nn.Module],
) -> None:
    run, chosen, network = pets
    with torch.autocast("cpu", torch.bfloat16):
        expected = to_u8(chosen.sample(network, ["dog"], [3], SampleSettings(steps=4, guidance=2.9)))[0]
    assert np.array_equal(paint(painter_of(run, dtype="bf16"), DOG)[0], expected)
    assert differ(expected, paint(painter_of(run), DOG)[0]) > 0


def test_which_weights(pets: tuple[Path, JiTFamily, torch.nn.Module], tmp_path: Path) -> None:
    _, chosen, network = pets
    run = checkpoint(tmp_path / "run", chosen.describe(), network.state_dict())
    step = run / "checkpoints" / "step_0000001"
    with pytest.raises(UserError, match="no weights at .*ema2.safetensors"):
        check_model(given(run, weights="ema2"))
    other = {name: value * 1.5 for name, value in network.state_dict().items()}
    save_file(other, step / "ema2.safetensors")
    first, second = (paint(painter_of(run, weights=which), DOG)[0] for which in ("ema1", "ema2"))
    assert np.array_equal(paint(painter_of(run), DOG)[0], first)
    save_file(other, tmp_path / "other.safetensors")
    assert np.array_equal(paint(painter_of(tmp_path / "other.safetensors"), DOG._replace(prompt="1"))[0], second)
    assert differ(first, second) > 0
    states = {key: {f"net.{name}": value for name, value in state.items()}
              for key, state in (("model_ema1", network.state_dict()), ("model_ema2", other))}  # fmt: skip
    torch.save(states, tmp_path / "official.pth")
    official = painter_of(tmp_path / "official.pth", weights="ema2")
    assert np.array_equal(paint(official, DOG._replace(prompt="1"))[0], second)
    with pytest.raises(UserError, match="has no weights named model"):
        check_model(given(tmp_path / "official.pth", weights="model"))
    with pytest.raises(UserError, match="holds one set of weights"):
        check_model(given(tmp_path / "other.safetensors", weights="ema2"))


def test_what_shapes_a_picture_is_part_of_its_identity(
    pets: tuple[Path, JiTFamily, torch.nn.Module], tmp_path: Path
) -> None:
    network = pets[2]
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    torch.save({"model_ema1": state, "model_ema2": state}, tmp_path / "official.pth")

    def identity(**changes: Any) -> dict[str, Any]:
        return check_model(given(tmp_path / "official.pth", **changes)).identity

    usual = identity()
    assert (
        not {"weights", "guidance_interval", "official_last_step"} & usual.keys()
    )  # as in folders of earlier versions
    assert identity(weights="ema1", guidance_interval=(0.1, 1), official_last_step=False) == usual
    assert identity(official_last_step=True) == usual | {"official_last_step": True}
    assert identity(weights="ema2", guidance_interval=(0, 1)) == usual | {
        "weights": "ema2",
        "guidance_interval": [0, 1],
    }


@pytest.mark.parametrize(("steps", "cut"), [(3, 2), (14, 7), (20, 15)])
def test_the_first_step_after_the_cut_is_not_guided(
    pets: tuple[Path, JiTFamily, torch.nn.Module], steps: int, cut: int
) -> None:
    beats: list[int] = []
    painter = painter_of(pets[0], num_inference_steps=steps, cfg_truncation_step=cut)
    painter.paint([DOG], (SIDE, SIDE), lambda: beats.append(1))
    guided = sum(step / steps > 0.1 for step in range(cut))  # times of the grid; two stages meet at each
    assert len(beats) == 2 * steps - 1 + 2 * guided


def test_half_of_one_frame_says_that_it_does_nothing(
    pets: tuple[Path, JiTFamily, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "info", said.append)
    check_model(given(pets[0], enable_half_frame=True))
    assert said == ["--enable_half_frame does nothing for one frame."]


def test_settings_that_do_not_fit(pets: tuple[Path, JiTFamily, torch.nn.Module], tmp_path: Path) -> None:
    run, _, _ = pets
    checked = check_model(given(run))
    assert checked.settled["guidance_scale"] == 2.9
    assert (checked.settled["height"], checked.settled["width"]) == (SIDE, SIDE)
    with pytest.raises(UserError, match="16 x 16 pixels, not 32 x 16"):
        check_model(given(run, height=32))
    with pytest.raises(UserError, match="16 x 16 pixels, not 32 x 32"):
        painter_of(run).paint([DOG], (32, 32), no_beat)
    with pytest.raises(UserError, match="--scheduler is for pipelines"):
        check_model(given(run, scheduler="DDIM"))
    with pytest.raises(UserError, match="JiT makes pictures, not clips"):
        check_model(given(run, num_frames=5))
    chosen = family()
    plain = checkpoint(tmp_path / "plain", chosen.describe(), network_of(chosen).state_dict())
    assert np.array_equal(*(paint(painter_of(plain), DOG._replace(prompt=text))[0] for text in ("dog", "anything")))
    with pytest.raises(UserError, match="nothing to cut: JiT"):
        check_model(given(plain, cfg_truncation_step=2))


@pytest.mark.parametrize(("lora", "noise"), [(None, 0.02), (Lora(2, ("attn1.to_v",)), 0.5)])
def test_a_trained_hunyuandit_paints_what_its_export_does(lora: Lora | None, noise: float, tmp_path: Path) -> None:
    if lora:
        pytest.importorskip("peft")
    chosen = small_family(tmp_path / "base", lora=lora)  # type: ignore[arg-type]
    network = chosen.network()
    torch.manual_seed(0)
    stored = {name: value for name, value in network.state_dict().items() if chosen.stores(name)}
    weights = {name: value + noise * torch.randn_like(value) for name, value in stored.items()}
    run = checkpoint(tmp_path / "run", chosen.describe(), weights)
    export(ExportSettings(source=str(run), destination=str(tmp_path / "export")))
    assert check_model(given(run)).settled["height"] == 32
    orders = [Order("a rainy night", "", 3), Order("a sunny day", "", 4)]
    size = (32, 32)
    mine, theirs, base = (
        painter_of(path, height=32, width=32).paint(orders, size, no_beat)
        for path in (run, tmp_path / "export", tmp_path / "base")
    )
    assert all(map(np.array_equal, mine, theirs))
    assert differ(mine[0], base[0]) > 5


def test_pictures_that_are_not_square_have_the_positions_they_were_trained_with(tmp_path: Path) -> None:
    size = (32, 64)
    build_small_hunyuan(tmp_path / "base")
    chosen = small_family(tmp_path / "base", size)
    run = checkpoint(tmp_path / "run", chosen.describe(), chosen.network().state_dict())
    order = Order("a rainy night", "", 3)
    mine = painter_of(run).paint([order], size, no_beat)[0]
    plain = painter_of(tmp_path / "base", height=32, width=64).paint([order], size, no_beat)[0]
    assert mine.shape == (32, 64, 3)
    assert differ(mine, plain) > 0
