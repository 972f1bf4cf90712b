"""Models trained here: JiT in all its forms, and HunyuanDiT with trained weights."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from muralist.core.errors import UserError
from muralist.core.images import to_uint8_array
from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit
from muralist.diffusion.samplers import SOLVERS, time_grid
from muralist.generate import jit_pipeline
from muralist.generate.model_info import inspect_model, settings_identity
from muralist.generate.pipeline import Pipeline, SampleRequest, load_pipeline
from muralist.models.jit_spec import JiTSpec
from muralist.models.lora import Lora
from muralist.models.spec import JIT
from muralist.models.weights import export
from muralist.settings import BatchScriptSettings, ExportSettings, GenerateSettings, SampleSettings
from tests.support.hunyuan import small_family
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.support.pipeline_calls import CPU, max_difference, no_callback

Pets = tuple[Path, JiTSpec, torch.nn.Module]
DOG, CAT = SampleRequest("dog", "", 3), SampleRequest("cat", "", 4)


def given(path: Path, **changes: Any) -> GenerateSettings:
    plain = {"num_inference_steps": 4, "dtype": "fp32"} | changes
    return GenerateSettings(prompts_csv="", output_dir="", model_path=str(path), **plain)


def load(path: Path, **changes: Any) -> Pipeline:
    return load_pipeline(given(path, **changes), CPU)


def generate(pipeline: Pipeline, *requests: SampleRequest) -> list[np.ndarray]:
    return pipeline.generate(requests, (SIDE, SIDE), no_callback)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Pets:
    spec = family("cat", "dog", "bird")
    network = network_of(spec)
    run = checkpoint(tmp_path_factory.mktemp("runs") / "pets", spec.describe(), network.state_dict())
    return run, spec, network


def test_non_finite_weights_and_images_are_errors(tmp_path: Path) -> None:
    spec = family("cat", "dog", "bird")
    weights = network_of(spec).state_dict()
    run = checkpoint(tmp_path / "run", spec.describe(), weights)
    pipeline: Any = load(run)
    pipeline._network.final_layer.linear.bias.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or Inf values instead of an image"):
        generate(pipeline, DOG)
    weights["final_layer.linear.bias"] = torch.full_like(weights["final_layer.linear.bias"], torch.nan)
    diverged = checkpoint(tmp_path / "diverged", spec.describe(), weights)
    with pytest.raises(UserError, match=r"ema1\.safetensors holds NaN or Inf in the tensor final_layer\.linear\.bias"):
        load(diverged)


def test_images_are_those_of_the_spec(pets: Pets) -> None:
    run, spec, network = pets
    pipeline = load(run)
    assert pipeline.supports_batching()
    pipeline.prepare([DOG])
    drawn = to_uint8_array(spec.sample(network, ["dog", "cat", "2"], [3, 4, 5], SampleSettings(steps=4, guidance=2.9)))
    generated = generate(pipeline, DOG, CAT, SampleRequest("bird", "", 5))
    assert all(map(np.array_equal, generated, drawn))
    assert np.array_equal(generate(pipeline, CAT, CAT, DOG)[2], generated[0])
    assert max_difference(generated[0], generated[1]) > 5


def test_noise_is_drawn_ahead_once(pets: Pets, monkeypatch: pytest.MonkeyPatch) -> None:
    unprepared = generate(load(pets[0]), DOG, CAT)
    pipeline, drawn, draw = load(pets[0]), [], JiTSpec.sample_noise

    def watched(spec: JiTSpec, seeds: list[int]) -> torch.Tensor:
        drawn.append(list(seeds))
        return draw(spec, seeds)

    monkeypatch.setattr(JiTSpec, "sample_noise", watched)
    pipeline.prepare([DOG, CAT])
    pipeline.prepare([CAT, DOG, DOG])  # as the window moves on
    assert all(map(np.array_equal, generate(pipeline, DOG, CAT), unprepared))
    assert drawn == [[DOG.seed, CAT.seed]]
    pipeline.prepare([CAT])  # the other is forgotten
    assert all(map(np.array_equal, generate(pipeline, DOG, CAT), unprepared))
    assert drawn[1:] == [[DOG.seed, CAT.seed]]


@pytest.mark.parametrize("threads", [1, 3])
def test_noise_drawn_in_blocks_has_the_same_bits(threads: int, pets: Pets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of requests that overlap, blocks that are not full, and seeds that come twice."""
    pipeline: Any = load_pipeline(given(pets[0]), CPU, cpus=threads)
    blocks: list[list[int]] = []
    draw = JiTSpec.sample_noise

    def watched(spec: JiTSpec, seeds: list[int]) -> torch.Tensor:
        blocks.append(list(seeds))
        return draw(spec, seeds)

    monkeypatch.setattr(JiTSpec, "sample_noise", watched)
    monkeypatch.setattr(jit_pipeline, "_NOISE_BLOCK", 4 * 3 * SIDE**2)
    seeds = [2**61, 5, 0, 2**33 + 1, 7, 5, 11, 3, 2, 1]
    for window in (seeds[:7], seeds[3:], seeds[6:]):
        requests = [SampleRequest("cat", "", seed) for seed in window]
        pipeline.prepare(requests)
        expected = torch.cat([draw(pipeline._spec, [seed]) for seed in window])
        assert torch.equal(pipeline._noise_for(window), expected)
    in_order = [[2**61, 5, 0, 2**33 + 1], [7, 11], [3, 2, 1]]
    assert blocks == in_order, "each is drawn once, the first ones first"


def test_noise_leaves_the_threads_of_a_cpu_worker_alone(pets: Pets) -> None:
    """Threads that start later take over what torch was told last: the bits of their matmuls would change."""
    pipeline: Any = load_pipeline(given(pets[0]), CPU, cpus=8)
    before = torch.get_num_threads()
    pipeline.prepare([SampleRequest("cat", "", seed) for seed in range(3)])
    pipeline._noise_for([0, 1, 2])
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before] == [torch.get_num_threads()]


def test_noise_is_drawn_again_after_an_error(pets: Pets, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, draw, failed = load(pets[0]), JiTSpec.sample_noise, []

    def short_of_memory(spec: JiTSpec, seeds: list[int]) -> torch.Tensor:
        if not failed:
            failed.append(seeds)
            raise MemoryError
        return draw(spec, seeds)

    monkeypatch.setattr(JiTSpec, "sample_noise", short_of_memory)
    pipeline.prepare([DOG])
    with pytest.raises(MemoryError):
        generate(pipeline, DOG)
    assert generate(pipeline, DOG)[0].shape == (SIDE, SIDE, 3)


def test_every_format_of_the_weights_gives_the_same_images(pets: Pets, tmp_path: Path) -> None:
    run, _, network = pets
    export(ExportSettings(source=str(run), destination=str(tmp_path / "export")))
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    torch.save({"model": {}, "model_ema1": state, "model_ema2": {}}, tmp_path / "official.pth")
    (tmp_path / "folder").mkdir()
    torch.save({"model": {}, "model_ema1": state, "model_ema2": {}}, tmp_path / "folder" / "checkpoint-last.pth")
    expected = generate(load(run), DOG)[0]
    assert np.array_equal(generate(load(run / "checkpoints" / "step_0000001"), DOG)[0], expected)
    assert np.array_equal(generate(load(tmp_path / "export"), DOG)[0], expected)
    for name in ("weights.safetensors", "official.pth", "folder"):  # they know classes by number alone
        assert np.array_equal(generate(load(tmp_path / name), DOG._replace(prompt="1"))[0], expected)
    with pytest.raises(UserError, match="'dog' does not name a class.*labels from 0 to 2"):
        generate(load(tmp_path / "official.pth"), DOG)


def test_diffusers_loads_an_export(pets: Pets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DiffusionPipeline
    from diffusers.utils import dynamic_modules_utils

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "export"
    export(ExportSettings(source=str(pets[0]), destination=str(folder)))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(folder)
    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    seeds = [torch.Generator().manual_seed(request.seed) for request in (DOG, CAT)]
    images = pipeline(["dog", "cat"], num_inference_steps=4, generator=seeds).images
    assert all(map(np.array_equal, images, generate(load(pets[0]), DOG, CAT)))
    again = pipeline("dog", num_inference_steps=4, generator=seeds[0], output_type="pt").images
    assert again.shape == (1, 3, SIDE, SIDE) and np.array_equal(to_uint8_array(again * 2 - 1)[0], images[0])
    with pytest.raises(ValueError, match="2 generators for 1 prompts"):
        pipeline("dog", generator=seeds)
    (folder / "pipeline.py").write_text("raise SystemExit('muralist ran the code of a model folder')")
    assert all(map(np.array_equal, generate(load(folder), DOG, CAT), images))


def test_truncated_guidance(pets: Pets) -> None:
    run, _, _ = pets

    def generated(**changes: Any) -> tuple[np.ndarray, int]:
        calls: list[int] = []
        image = load(run, num_inference_steps=10, **changes).generate([DOG], (SIDE, SIDE), lambda: calls.append(1))
        return image[0], len(calls)

    guided, passes = generated()
    none, fewest = generated(guidance_scale=1.0)
    assert fewest == 19  # two stages a step, and one for the last
    for truncation, expected in ((10, guided), (12, guided), (0, none), (1, none)):  # guidance starts at time 0.1
        assert np.array_equal(generated(cfg_truncation_step=truncation)[0], expected), truncation
    truncated, fewer = generated(cfg_truncation_step=5)
    assert fewest < fewer < passes
    assert max_difference(truncated, guided) > 0
    assert max_difference(truncated, none) > 0


def test_the_guidance_interval(pets: Pets) -> None:
    run, spec, network = pets

    def generated(**changes: Any) -> np.ndarray:
        return generate(load(run, num_inference_steps=10, **changes), DOG)[0]

    usual = generated()
    assert np.array_equal(generated(guidance_interval=(0.1, 1)), usual)
    sampling = SampleSettings(steps=10, guidance=2.9, interval=(0.3, 0.6))
    drawn = to_uint8_array(spec.sample(network, ["dog"], [3], sampling))[0]
    assert np.array_equal(generated(guidance_interval=(0.3, 0.6)), drawn)
    assert max_difference(drawn, usual) > 0
    # Truncation shortens the interval and never extends it.
    assert np.array_equal(generated(guidance_interval=(0.3, 0.6), cfg_truncation_step=8), drawn)
    none = generated(guidance_scale=1.0)
    assert np.array_equal(generated(guidance_interval=(0.3, 0.6), cfg_truncation_step=2), none)
    with pytest.raises(UserError, match="interval 0.5 to 0.2 is empty"):
        inspect_model(given(run, guidance_interval=(0.5, 0.2)))


def test_the_solver(pets: Pets) -> None:
    run, spec, network = pets

    def generated(**changes: Any) -> tuple[np.ndarray, int]:
        calls: list[int] = []
        image = load(run, num_inference_steps=10, **changes).generate([DOG], (SIDE, SIDE), lambda: calls.append(1))
        return image[0], len(calls)

    usual, most = generated()
    image, passes = generated(scheduler="abm2")
    sampling = SampleSettings(steps=10, guidance=2.9, solver="abm2")
    assert np.array_equal(image, to_uint8_array(spec.sample(network, ["dog"], [3], sampling))[0])
    assert max_difference(image, usual) > 0
    guided = sum(0.1 < t < 1 for t in time_grid(10, "abm2"))
    assert (passes, guided) == (10 + guided, 8) and most == 19 + 16
    assert np.array_equal(generated(scheduler="heun")[0], usual)
    # Guidance is truncated at a step of the solver's own times.
    truncated, fewer = generated(scheduler="abm2", cfg_truncation_step=5)
    assert fewer == passes - 5 and max_difference(truncated, image) > 0
    pipeline = load(run, num_inference_steps=10, scheduler="abm2")  # in other company: the same image
    assert np.array_equal(generate(pipeline, CAT, DOG)[1], generate(pipeline, DOG, DOG)[1])


def test_the_solver_is_part_of_the_folder(pets: Pets) -> None:
    def identity(**changes: Any) -> dict[str, Any]:
        settings = given(pets[0], **changes)
        return settings_identity(settings, inspect_model(settings))

    usual = identity()
    assert JIT.solvers == SOLVERS
    assert usual["scheduler"] is None and identity(scheduler="heun") == usual  # as in ledgers of earlier versions
    assert identity(scheduler="ABM2") == usual | {"scheduler": "abm2"}
    assert identity(scheduler="euler") == usual | {"scheduler": "euler"}


def test_the_official_last_step(pets: Pets) -> None:
    run, spec, network = pets

    def generated(**changes: Any) -> np.ndarray:
        return generate(load(run, num_inference_steps=50, **changes), DOG)[0]

    sampling = SampleSettings(steps=50, guidance=2.9, official_last_step=True)
    official = generated(official_last_step=True)
    assert np.array_equal(official, to_uint8_array(spec.sample(network, ["dog"], [3], sampling))[0])
    # The noise that it leaves: 1 - t is 0.02 in the last step, the clamp at 0.05.
    assert max_difference(official, generated()) > 0


def test_bf16_gives_the_images_of_autocast(pets: Pets) -> None:
    run, spec, network = pets
    with torch.autocast("cpu", torch.bfloat16):
        expected = to_uint8_array(spec.sample(network, ["dog"], [3], SampleSettings(steps=4, guidance=2.9)))[0]
    assert np.array_equal(generate(load(run, dtype="bf16"), DOG)[0], expected)
    assert max_difference(expected, generate(load(run), DOG)[0]) > 0


def test_weight_sets(pets: Pets, tmp_path: Path) -> None:
    _, spec, network = pets
    run = checkpoint(tmp_path / "run", spec.describe(), network.state_dict())
    step = run / "checkpoints" / "step_0000001"
    with pytest.raises(UserError, match="no weights at .*ema2.safetensors"):
        inspect_model(given(run, weights="ema2"))
    other = {name: value * 1.5 for name, value in network.state_dict().items()}
    save_file(other, step / "ema2.safetensors")
    first, second = (generate(load(run, weights=which), DOG)[0] for which in ("ema1", "ema2"))
    assert np.array_equal(generate(load(run), DOG)[0], first)
    save_file(other, tmp_path / "other.safetensors")
    assert np.array_equal(generate(load(tmp_path / "other.safetensors"), DOG._replace(prompt="1"))[0], second)
    assert max_difference(first, second) > 0
    states = {key: {f"net.{name}": value for name, value in state.items()}
              for key, state in (("model_ema1", network.state_dict()), ("model_ema2", other))}  # fmt: skip
    torch.save(states, tmp_path / "official.pth")
    official = load(tmp_path / "official.pth", weights="ema2")
    assert np.array_equal(generate(official, DOG._replace(prompt="1"))[0], second)
    with pytest.raises(UserError, match="has no weights named model"):
        inspect_model(given(tmp_path / "official.pth", weights="model"))
    with pytest.raises(UserError, match="holds one set of weights"):
        inspect_model(given(tmp_path / "other.safetensors", weights="ema2"))


def test_flags_that_change_images_are_part_of_the_identity(pets: Pets, tmp_path: Path) -> None:
    network = pets[2]
    state = {f"net.{name}": value for name, value in network.state_dict().items()}
    torch.save({"model_ema1": state, "model_ema2": state}, tmp_path / "official.pth")

    def identity(**changes: Any) -> dict[str, Any]:
        return inspect_model(given(tmp_path / "official.pth", **changes)).identity

    usual = identity()
    # As in folders of earlier versions.
    assert not {"weights", "guidance_interval", "official_last_step"} & usual.keys()
    assert identity(weights="ema1", guidance_interval=(0.1, 1), official_last_step=False) == usual
    assert identity(official_last_step=True) == usual | {"official_last_step": True}
    changed = {"weights": "ema2", "guidance_interval": [0, 1]}
    assert identity(**changed) == usual | changed


@pytest.mark.parametrize(("steps", "truncation"), [(3, 2), (14, 7), (20, 15)])
def test_the_first_step_after_the_truncation_is_not_guided(pets: Pets, steps: int, truncation: int) -> None:
    calls: list[int] = []
    pipeline = load(pets[0], num_inference_steps=steps, cfg_truncation_step=truncation)
    pipeline.generate([DOG], (SIDE, SIDE), lambda: calls.append(1))
    guided = sum(step / steps > 0.1 for step in range(truncation))  # times of the grid; two stages meet at each
    assert len(calls) == 2 * steps - 1 + 2 * guided


def test_half_of_one_frame_has_no_effect(pets: Pets, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logging.getLogger("muralist"), "info", messages.append)
    inspect_model(given(pets[0], enable_half_frame=True))
    assert messages == ["--enable_half_frame has no effect on one frame."]


def test_impossible_settings_are_refused(pets: Pets, tmp_path: Path) -> None:
    run, _, _ = pets
    checked = inspect_model(given(run))
    assert checked.resolved["guidance_scale"] == 2.9
    assert (checked.resolved["height"], checked.resolved["width"]) == (SIDE, SIDE)
    with pytest.raises(UserError, match="16 x 16 pixels, not 16 x 32"):
        inspect_model(given(run, height=32))
    with pytest.raises(UserError, match="16 x 16 pixels, not 32 x 32"):
        load(run).generate([DOG], (32, 32), no_callback)
    with pytest.raises(UserError, match=r"scheduler ddim does not fit a JiT model.*These do: heun, euler, abm2\."):
        inspect_model(given(run, scheduler="DDIM"))
    with pytest.raises(UserError, match="abm2 has no official last step"):
        inspect_model(given(run, scheduler="abm2", official_last_step=True))
    for changes, flag in (({"timesteps": [9, 5]}, "timesteps"), ({"preset": "fast"}, "preset fast")):
        with pytest.raises(UserError, match=f"--{flag} is for diffusers pipelines, and this is a JiT model"):
            inspect_model(given(run, **changes))
    with pytest.raises(UserError, match="JiT generates images, not clips"):
        inspect_model(given(run, num_frames=5))
    spec = family()
    plain = checkpoint(tmp_path / "plain", spec.describe(), network_of(spec).state_dict())
    assert np.array_equal(*(generate(load(plain), DOG._replace(prompt=text))[0] for text in ("dog", "anything")))
    with pytest.raises(UserError, match="no effect: JiT runs without"):
        inspect_model(given(plain, cfg_truncation_step=2))
    with pytest.raises(UserError, match="--guidance_scale 3 has no effect: this JiT model is unconditional"):
        inspect_model(given(plain, guidance_scale=3.0))
    with pytest.raises(UserError, match="--guidance_interval has no effect: this JiT model is unconditional"):
        inspect_model(given(plain, guidance_interval=(0.2, 1)))
    for checked in (inspect_model(given(plain)), inspect_model(given(plain, guidance_scale=1.0))):
        assert checked.resolved["guidance_scale"] == 1.0 and "guidance" not in checked.origins


@pytest.mark.parametrize(("lora", "noise"), [(None, 0.02), (Lora(2, ("attn1.to_v",)), 0.5)])
def test_a_trained_hunyuandit_generates_the_images_of_its_export(
    lora: Lora | None, noise: float, tmp_path: Path
) -> None:
    if lora:
        pytest.importorskip("peft")
    spec = small_family(tmp_path / "base", lora=lora)  # type: ignore[arg-type]
    network = spec.network()
    torch.manual_seed(0)
    stored = {name: value for name, value in network.state_dict().items() if spec.is_saved(name)}
    weights = {name: value + noise * torch.randn_like(value) for name, value in stored.items()}
    run = checkpoint(tmp_path / "run", spec.describe(), weights)
    export(ExportSettings(source=str(run), destination=str(tmp_path / "export")))
    assert inspect_model(given(run)).resolved["height"] == 32
    requests = [SampleRequest("a rainy night", "", 3), SampleRequest("a sunny day", "", 4)]
    size = (32, 32)
    mine, theirs, base = (
        load(path, height=32, width=32).generate(requests, size, no_callback)
        for path in (run, tmp_path / "export", tmp_path / "base")
    )
    assert all(map(np.array_equal, mine, theirs))
    assert max_difference(mine[0], base[0]) > 5
    for settings in (given(run), BatchScriptSettings(prompts_csv="", output_dir="", model_path=str(run))):
        assert inspect_model(settings).resolved["guidance_scale"] == 5.0  # as in the samples of its training
    (checkpoint_folder,) = run.glob("checkpoints/step_*")
    save_file(stored, checkpoint_folder / "model.safetensors")
    as_trained = load(run, height=32, width=32, weights="model").generate(requests, size, no_callback)
    assert all(map(np.array_equal, as_trained, base))
    assert inspect_model(given(run, weights="model")).identity != inspect_model(given(run)).identity


def test_non_square_images_have_the_rotary_positions_of_training(tmp_path: Path) -> None:
    size = (32, 64)
    build_small_hunyuan_dit(tmp_path / "base")
    spec = small_family(tmp_path / "base", size)
    run = checkpoint(tmp_path / "run", spec.describe(), spec.network().state_dict())
    request = SampleRequest("a rainy night", "", 3)
    mine = load(run).generate([request], size, no_callback)[0]
    plain = load(tmp_path / "base", height=32, width=64).generate([request], size, no_callback)[0]
    assert mine.shape == (32, 64, 3)
    assert max_difference(mine, plain) > 0
