"""The contract of `Pipeline`, kept by every kind of diffusers pipeline."""

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

from muralist.core.errors import UserError
from muralist.generate.pipeline import (
    GenerationMode,
    Pipeline,
    PipelineError,
    SampleRequest,
    environment_info,
    make_deterministic,
)
from tests.support.pipeline_calls import (
    CAR,
    CAT,
    CPU,
    DOGS,
    NIGHT,
    SIZE,
    SNOW,
    STEPS,
    generate,
    generate_with_diffusers,
    load,
    max_difference,
    no_callback,
)
from tests.support.pipelines import BUILDERS

UNEVEN = ("zimage", "qwenimage")  # embeddings as long as the prompt
Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def pipelines(tiny_pipeline: Build) -> Callable[[str], Pipeline]:
    known: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in known:
            known[name] = load(tiny_pipeline(name))
        return known[name]

    return get


@contextmanager
def encoder_runs() -> Iterator[list[str]]:
    """The names of the text encoders that run meanwhile."""
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
def test_an_image_depends_on_neither_its_neighbors_nor_its_index(
    name: str, pipelines: Callable[[str], Pipeline]
) -> None:
    pipeline = pipelines(name)
    first = generate(pipeline, CAR, NIGHT, SNOW)
    last = generate(pipeline, DOGS, CAT, CAR)
    copies = generate(pipeline, CAR, CAR, CAR)
    assert pipeline.supports_batching() is (name not in UNEVEN)
    assert all(image.shape == (*SIZE, 3) and image.dtype == np.uint8 for image in first)
    for image in (last[2], *copies):
        assert np.array_equal(first[0], image)
    assert min(max_difference(first[0], other) for other in (*first[1:], *last[:2])) > 5


@pytest.mark.parametrize("name", BUILDERS)
def test_an_image_does_not_depend_on_its_neighbors_in_bf16(name: str, tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline(name), dtype="bf16")
    first, last = generate(pipeline, CAR, NIGHT), generate(pipeline, SNOW, CAR)
    assert np.array_equal(first[0], last[1])
    assert max_difference(first[0], first[1]) > 5


@pytest.mark.parametrize("name", BUILDERS)
def test_images_are_those_of_diffusers_alone(
    name: str, tiny_pipeline: Build, pipelines: Callable[[str], Pipeline]
) -> None:
    requests = [CAR, NIGHT] if name not in UNEVEN else [NIGHT]
    given: dict[str, Any] = {"schnell": {"guidance_scale": 1.0}}.get(name, {})
    if name == "qwenimage":
        given = {"guidance_scale": None, "true_cfg_scale": 7.5}
    expected = generate_with_diffusers(tiny_pipeline(name), *requests, **given)
    for mine, theirs in zip(generate(pipelines(name), *requests), expected, strict=True):
        assert max_difference(mine, theirs) <= 1


@pytest.mark.parametrize("name", BUILDERS)
def test_prepared_prompts_are_not_encoded_again(name: str, pipelines: Callable[[str], Pipeline]) -> None:
    pipeline = pipelines(name)
    pipeline.prepare([SNOW])
    unprepared = generate(pipeline, CAR, DOGS, CAT)
    with encoder_runs() as runs:
        pipeline.prepare([CAR, DOGS, CAT])
    assert len(runs) >= 3
    with encoder_runs() as runs:
        prepared = generate(pipeline, CAR, DOGS, CAT)
        assert generate(pipeline, CAT)[0].shape == (*SIZE, 3)
        pipeline.prepare([DOGS, CAT, CAR])
    assert runs == []
    assert all(map(np.array_equal, prepared, unprepared))
    pipeline.prepare([SNOW])  # drops the others
    with encoder_runs() as runs:
        generate(pipeline, CAR)
    assert runs


@pytest.mark.parametrize("name", BUILDERS)
def test_an_image_depends_on_prompt_and_seed(name: str, pipelines: Callable[[str], Pipeline]) -> None:
    image, other_seed, other_prompt = (
        generate(pipelines(name), request)[0]
        for request in (CAR, CAR._replace(seed=6), CAR._replace(prompt=NIGHT.prompt))
    )
    assert max_difference(image, other_seed) > 10
    assert max_difference(image, other_prompt) > 3


@pytest.mark.parametrize("name", ["hunyuan", "sd", "wan21", "zimage", "qwenimage"])
def test_an_image_depends_on_the_negative_prompt(name: str, pipelines: Callable[[str], Pipeline]) -> None:
    assert (
        max_difference(
            *(generate(pipelines(name), CAR._replace(negative_prompt=text))[0] for text in ("", "rain at night"))
        )
        > 0
    )


def test_every_dtype_has_the_same_noise(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd3")
    exact = generate(load(folder), CAR)[0].astype(int)
    rounded = generate(load(folder, dtype="bf16"), CAR)[0].astype(int)
    # Other noise would give another image, at a distance of 20 levels and more.
    assert np.abs(exact - rounded).mean() < 5


def test_stochastic_schedulers_draw_noise_per_sample(tiny_pipeline: Build) -> None:
    folder = tiny_pipeline("sd")
    pipeline = load(folder, scheduler="eulerancestraldiscrete")
    first, last = generate(pipeline, CAR, NIGHT, SNOW), generate(pipeline, DOGS, CAT, CAR)
    assert np.array_equal(first[0], last[2])
    assert (
        max_difference(first[0], generate_with_diffusers(folder, CAR, scheduler=EulerAncestralDiscreteScheduler)[0])
        <= 1
    )


def test_an_incompatible_scheduler_is_refused_with_a_list_of_compatible_ones(tiny_pipeline: Build) -> None:
    with pytest.raises(UserError, match="DPMSolverMultistep, .*Did you mean EulerDiscrete?"):
        load(tiny_pipeline("sd"), scheduler="EulerDiscret")


def test_every_step_calls_back_and_a_memory_probe_has_two(pipelines: Callable[[str], Pipeline]) -> None:
    calls: list[int] = []
    pipelines("wan22").generate([CAR], SIZE, lambda: calls.append(1))
    assert len(calls) == STEPS
    pipelines("wan22").generate([CAR], SIZE, lambda: calls.append(1), GenerationMode.MEMORY_PROBE)
    assert len(calls) == STEPS + 2


@pytest.mark.parametrize(
    ("name", "wrong", "multiple"),
    [("hunyuan", (70, 64), 16), ("flux", (64, 72), 16), ("wan21", (64, 72), 16), ("sd", (60, 64), 8)],
)
def test_an_impossible_size_is_refused_with_a_possible_one(
    name: str, wrong: tuple[int, int], multiple: int, pipelines: Callable[[str], Pipeline]
) -> None:
    with pytest.raises(UserError, match=f"{wrong[0]} x {wrong[1]}.*multiples of {multiple}: try 64 x (64|80)"):
        pipelines(name).generate([CAR], wrong, no_callback)


def test_an_impossible_size_is_fatal_only_if_it_is_the_commands(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("sd"), height=60)
    with pytest.raises(PipelineError, match="60 x 64"):
        pipeline.generate([CAR], (60, 64), no_callback)
    with pytest.raises(UserError, match="52 x 64") as caught:
        pipeline.generate([CAR], (52, 64), no_callback)
    assert not isinstance(caught.value, PipelineError)


def test_clips(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("wan21"), num_frames=5)
    clips = [pipeline.generate(requests, (32, 32), no_callback) for requests in ((CAR, NIGHT), (SNOW, CAR))]
    assert clips[0][0].shape == (5, 32, 32, 3)
    assert np.array_equal(clips[0][0], clips[1][1])
    assert max_difference(clips[0][0][0], clips[0][0][4]) > 0
    halved = load(tiny_pipeline("wan21"), num_frames=9, enable_half_frame=True)
    assert np.array_equal(halved.generate([CAR, NIGHT], (32, 32), no_callback)[0], clips[0][0])
    with pytest.raises(UserError, match="StableDiffusionPipeline generates images, not clips of 5 frames"):
        load(tiny_pipeline("sd"), num_frames=5)


def test_non_finite_images_are_errors(tiny_pipeline: Build) -> None:
    pipeline: Any = load(tiny_pipeline("sd"))
    pipeline._pipe.vae.decoder.conv_out.weight.fill_(torch.inf)
    with pytest.raises(UserError, match="NaN or Inf.*overflowed in fp32"):
        generate(pipeline, CAR)


def test_images_that_the_safety_checker_blackened_are_errors(
    tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline: Any = load(tiny_pipeline("sd"))
    monkeypatch.setattr(pipeline._pipe, "run_safety_checker", lambda image, *_: (image * 0, [False, True]))
    with pytest.raises(UserError, match="safety checker flagged"):
        generate(pipeline, CAR, NIGHT)


def test_pipelines_that_are_not_text_to_image_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "another"
    shutil.copytree(tiny_pipeline("sd"), copy)
    index = json.loads((copy / "model_index.json").read_text())

    def names(**changes: Any) -> None:
        (copy / "model_index.json").write_text(json.dumps(index | changes))

    names(_class_name="NoSuchPipeline")
    with pytest.raises(UserError, match="cannot be loaded.*NoSuchPipeline"):
        load(copy)
    names(_class_name="DDPMPipeline", **{part: [None, None] for part in ("vae", "tokenizer", "text_encoder")})
    with pytest.raises(UserError, match="DDPMPipeline does not generate images from text alone. It takes no prompt"):
        load(copy)


def test_truncated_weights_are_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pipeline("sd"), copy)
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged or truncated: .* Copy the model again"):
        load(copy)


def test_requests_are_not_changed(pipelines: Callable[[str], Pipeline]) -> None:
    requests = [SampleRequest("a cat", "a dog", 3)]
    images = [pipelines("zimage").generate(requests, SIZE, no_callback)[0] for _ in range(2)]
    assert np.array_equal(*images)
    assert requests == [SampleRequest("a cat", "a dog", 3)]


def test_one_thread_and_deterministic_kernels() -> None:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    try:
        make_deterministic(CPU)
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.deterministic
        assert environment_info(CPU)["torch"] == torch.__version__
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
