"""Truncated guidance and step caching: fewer denoiser passes, exact at both ends, and no dependence on neighbors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

from muralist.generate.denoising import DenoisingLoop
from muralist.generate.image_files import psnr
from muralist.generate.model_info import STEP_CACHING, describe_step_caching
from muralist.generate.optimizations import NonBlockingCopies
from muralist.generate.pipeline import GenerationMode, PipelineError, SampleRequest
from muralist.kernels.cuda_graphs import CudaGraphs
from tests.support.pipeline_calls import (
    CAR,
    CPU,
    DOGS,
    NIGHT,
    SIZE,
    SNOW,
    STEPS,
    generate,
    load,
    max_difference,
    no_callback,
)
from tests.support.pipelines import REPRESENTATIVE

Build = Callable[[str], Path]
DISTILLED = ("flux", "hunyuanvideo", "lcm", "sana_sprint")  # the scale is an input of the network
UNEVEN = ("zimage", "qwenimage", "cogview4")
GUIDED = [name for name in REPRESENTATIVE if name not in DISTILLED]
SCALE = 7.5
FAST_STEPS = 10


@contextmanager
def batch_sizes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[list[int]]:
    """The batch size of every real pass of a pipeline's denoiser, for pipelines loaded meanwhile."""
    index = json.loads((folder / "model_index.json").read_text())
    network = getattr(diffusers, (index.get("transformer") or index["unet"])[1])
    sizes: list[int] = []
    forward = network.forward

    @functools.wraps(forward)
    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(args[0] if args else kwargs["hidden_states"]))
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(network, "forward", count)
        yield sizes


def _other_request(name: str) -> SampleRequest:
    """A request that can share a call with CAR: of the same text length, where embeddings are as long as the prompt."""
    return CAR._replace(prompt="a big dog", seed=6) if name in UNEVEN else NIGHT


@pytest.mark.parametrize("name", GUIDED)
def test_truncated_guidance(name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_pipeline(name)
    requests = [CAR, _other_request(name)]
    guided = generate(load(folder, guidance_scale=SCALE), *requests)
    unguided = generate(load(folder, guidance_scale=0.0 if name == "zimage" else 1.0), *requests)
    with batch_sizes(monkeypatch, folder) as sizes:
        for step, expected in ((STEPS, guided), (0, unguided), (2, None)):
            pipeline = load(folder, guidance_scale=SCALE, cfg_truncation_step=step)
            pipeline.supports_batching()  # may run the denoiser
            sizes.clear()
            images = generate(pipeline, *requests)
            assert sum(sizes) == len(requests) * (STEPS + min(step, STEPS)), f"truncated at {step}: passes of {sizes}"
            if expected is not None:
                assert all(map(np.array_equal, images, expected)), f"truncated at {step}"
            else:
                assert max_difference(images[0], guided[0]) > 0
                assert max_difference(images[0], unguided[0]) > 0
                assert np.array_equal(images[0], generate(pipeline, SNOW, CAR)[1])


def test_truncation_without_guidance_is_refused(tiny_pipeline: Build) -> None:
    with pytest.raises(PipelineError, match="no effect: FluxPipeline runs without"):
        load(tiny_pipeline("flux"), cfg_truncation_step=2)
    with pytest.raises(PipelineError, match="no effect: StableDiffusionPipeline runs without"):
        load(tiny_pipeline("sd"), cfg_truncation_step=2, guidance_scale=1.0)
    for name in DISTILLED[1:]:
        with pytest.raises(PipelineError, match="no effect: .*Pipeline runs without"):
            generate(load(tiny_pipeline(name), cfg_truncation_step=2), CAR)


def test_guidance_with_three_passes_is_refused(tiny_pipeline: Build, tmp_path: Path) -> None:
    parts = diffusers.StableDiffusionPipeline.from_pretrained(tiny_pipeline("sd"), local_files_only=True).components
    diffusers.StableDiffusionPAGPipeline(**parts, requires_safety_checker=False).save_pretrained(tmp_path)
    for changes in ({"cfg_truncation_step": 2}, {"preset": "fast"}):
        with pytest.raises(PipelineError, match="StableDiffusionPAGPipeline. It runs the denoiser 3 times per step"):
            generate(load(tmp_path, **changes), CAR)
    pipeline = load(tmp_path)
    assert np.array_equal(generate(pipeline, CAR, NIGHT)[0], generate(pipeline, SNOW, CAR)[1])
    assert pipeline.ignores_negative_prompts() == ""


def test_missing_guidance_is_detected_at_the_first_step(tiny_pipeline: Build) -> None:
    """For pipelines whose config files do not reveal it."""
    pipeline: Any = load(tiny_pipeline("flux"))
    loop = DenoisingLoop(pipeline._pipe, STEPS, 2, False, CPU, CudaGraphs(False), NonBlockingCopies(CPU))
    calls: list[int] = []
    with pytest.raises(PipelineError, match="no effect"), loop.running(1, no_callback, lambda: None):
        pipeline.generate([CAR], SIZE, lambda: calls.append(1))
    assert calls == []


@pytest.mark.parametrize(("scheduler", "stages", "in_first"), [("HeunDiscrete", 2 * STEPS - 1, 2), ("PNDM", 13, 4)])
def test_schedulers_with_several_stages_per_step(
    scheduler: str, stages: int, in_first: int, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pipeline("sd")
    with batch_sizes(monkeypatch, folder) as sizes:
        for step, guided in ((0, 0), (1, in_first), (STEPS, stages)):
            sizes.clear()
            generate(load(folder, scheduler=scheduler, cfg_truncation_step=step), CAR)
            assert sizes == [2] * guided + [1] * (stages - guided)


def test_a_pipeline_that_runs_the_negative_prompt_first_is_refused(tiny_pipeline: Build) -> None:
    """Wan with its two calls in the other order."""
    pipeline: Any = load(tiny_pipeline("wan21"), cfg_truncation_step=1)
    encode = pipeline._pipe.encode_prompt

    def swapped(*args: Any, **kwargs: Any) -> Any:
        positive, negative = encode(*args, **kwargs)
        return negative, positive

    pipeline._pipe.encode_prompt = swapped
    with pytest.raises(PipelineError, match="WanPipeline.*negative prompt first"):
        pipeline.generate([CAR], SIZE, no_callback)


def test_cached_steps_depend_on_their_number_alone() -> None:
    fast, faster = STEP_CACHING["fast"], STEP_CACHING["faster"]
    assert fast and faster
    assert sorted(fast.computed_stages(20)) == [0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert sorted(faster.computed_stages(20)) == [0, 1, 2, 4, 7, 10, 13, 16, 19]
    assert (fast.guided_steps(20), faster.guided_steps(20)) == (10, 5)
    described = describe_step_caching("fast", "WanPipeline", 20)
    assert described == "fast: guidance in 10 and the network in 12 of 20 steps, fp8"
    truncated = describe_step_caching("faster", "FluxPipeline", 20, 3)
    assert truncated == "faster: guidance in 3 and the network in 9 of 20 steps"
    for steps, caching in product(range(1, 60), (fast, faster)):
        computed = caching.computed_stages(steps)
        assert steps - 1 in computed and set(range(min(2, steps))) <= computed


@pytest.mark.parametrize(
    ("name", "preset", "passes"), [*((name, "fast", 9) for name in GUIDED), ("wan21", "faster", 7), ("sd", "faster", 7)]
)
def test_step_caching_saves_passes_and_no_image_depends_on_another(
    name: str, preset: str, passes: int, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_pipeline(name)
    with batch_sizes(monkeypatch, folder) as sizes:
        pipeline = load(folder, preset=preset, num_inference_steps=FAST_STEPS, guidance_scale=SCALE)
        pipeline.supports_batching()  # may run the denoiser
        sizes.clear()
        other = _other_request(name)
        first = generate(pipeline, CAR, other)
    assert sum(sizes) == 2 * passes  # of 2 * 20
    assert np.array_equal(first[0], generate(pipeline, SNOW, CAR)[1])
    exact = generate(load(folder, num_inference_steps=FAST_STEPS, guidance_scale=SCALE), CAR, other)
    assert max_difference(first[0], exact[0]) > 0
    assert all(map(np.array_equal, exact, generate(pipeline, CAR, other, mode=GenerationMode.EXACT)))
    assert np.array_equal(first[1], generate(pipeline, DOGS, other)[1])  # and back again


@pytest.mark.parametrize("name", [*DISTILLED, "schnell"])
def test_step_caching_without_guidance(name: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_pipeline(name)
    with batch_sizes(monkeypatch, folder) as sizes:
        pipeline = load(folder, preset="fast", num_inference_steps=FAST_STEPS)
        pipeline.supports_batching()  # may run the denoiser
        sizes.clear()
        generate(pipeline, CAR)
    fast = STEP_CACHING["fast"]
    assert fast and len(sizes) == len(fast.computed_stages(FAST_STEPS)) == 6


@pytest.mark.parametrize(("name", "least"), [("wan21", 20.0), ("sdxl", 20.0), ("sd3", 15.0)])
def test_extrapolated_steps_are_close_to_exact_ones(name: str, least: float, tiny_pipeline: Build) -> None:
    """Without guidance the two differ by the extrapolated steps alone."""
    changes = {"num_inference_steps": 20, "guidance_scale": 1.0}
    exact = generate(load(tiny_pipeline(name), **changes), CAR)[0]
    fast = generate(load(tiny_pipeline(name), preset="fast", **changes), CAR)[0]
    assert psnr(fast, exact) > least


def test_psnr() -> None:
    black = np.zeros((4, 4, 3), dtype=np.uint8)
    assert psnr(black, black) == 99.0
    assert psnr(black, black + 255) == 0.0
    assert psnr(black, black + 51) == pytest.approx(13.98, abs=0.01)
