"""Pipelines with CUDA graphs: the same bytes, of text encoders too; capture is imitated on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import masking_utils

from muralist.generate import diffusers_pipeline
from muralist.generate.gpu_execution import Capture, CudaGraphs, NonBlockingCopies, Work
from muralist.generate.optimizations import Optimizations
from muralist.generate.pipeline import GenerationMode, SampleRequest
from muralist.generate.prompt_encoding import text_encoders
from tests.support.graph_capture import FakeCapture, FakeCudaGraphs
from tests.support.pipeline_calls import CAR, LONG, NIGHT, SNOW, generate, load, max_difference
from tests.support.pipelines import BUILDERS

Build = Callable[[str], Path]
Load = Callable[[str, Capture | None], Any]
UNEVEN = ("zimage", "qwenimage")  # embeddings as long as the prompt


@pytest.fixture
def load_with_graphs(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads pipelines that behave as if compiled on a GPU and capture with the given function."""

    def load_pipeline(name: str, capture: Capture | None) -> Any:
        monkeypatch.setattr(Optimizations, "choose", lambda *_: Optimizations(compiled=True))
        monkeypatch.setattr(CudaGraphs, "on_device", lambda *_: FakeCudaGraphs(capture))
        monkeypatch.setattr(diffusers_pipeline, "NonBlockingCopies", lambda _: NonBlockingCopies(torch.device("cuda")))
        return load(tiny_pipeline(name))

    return load_pipeline


@pytest.mark.parametrize("name", BUILDERS)
def test_graphs_of_denoisers_and_text_encoders_give_the_same_bytes(name: str, load_with_graphs: Load) -> None:
    capture = FakeCapture()
    graphed, plain = load_with_graphs(name, capture), load_with_graphs(name, None)
    found = []
    with torch.compiler.set_stance("force_eager"):
        assert graphed.supports_batching() is (name not in UNEVEN) and capture.captures == 0
        for pipeline in (graphed, plain):
            pipeline.prepare([CAR, NIGHT])
            of_text = capture.captures
            images = generate(pipeline, CAR, NIGHT) + generate(pipeline, LONG, CAR)
            if pipeline is graphed and pipeline.supports_batching():
                encoders = text_encoders(pipeline._pipe)
                assert of_text >= len(encoders) and capture.captures > of_text
                assert all(encoder.forward.__wrapped__.holds_memory for encoder in encoders)
            pipeline._graphs.disable()  # as when memory runs out: no image shows it
            pipeline._reset_text_cache()
            found.append(images + generate(pipeline, LONG, SNOW))
    assert (capture.replays > 2 * capture.captures > 0) == graphed.supports_batching()
    assert all(map(np.array_equal, *found)) and max_difference(found[0][0], found[0][1]) > 5
    assert np.array_equal(found[0][2], found[0][4])


@pytest.mark.parametrize("name", ["wan21", "sdxl"])
def test_copies_are_non_blocking_everywhere_but_in_networks(name: str, load_with_graphs: Load) -> None:
    seen: dict[str, list[bool]] = {}

    def noting(where: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            modes = _get_current_function_mode_stack()
            seen.setdefault(where, []).append(any(isinstance(mode, NonBlockingCopies) for mode in modes))
            return work(*args, **kwargs)

        return run

    def capture(work: Work) -> tuple[Any, Callable[[], None]]:
        return FakeCapture()(noting("graph", work))

    pipeline = load_with_graphs(name, capture)
    pipe = pipeline._pipe
    pipe.vae.decoder.forward = noting("decoder", pipe.vae.decoder.forward)
    pipe.scheduler.step = noting("step", pipe.scheduler.step)
    pipe.check_inputs = noting("checks", pipe.check_inputs)
    with torch.compiler.set_stance("force_eager"):
        pipeline.prepare([CAR])
        assert not _get_current_function_mode_stack()
        generate(pipeline, CAR)
    assert not _get_current_function_mode_stack()
    assert {where: set(modes) for where, modes in seen.items()} == {
        "graph": {False},
        "decoder": {False},
        "step": {True},
        "checks": {True},
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_every_mode_encodes_prompts_with_the_same_mask(
    compiled: bool, tiny_pipeline: Build, load_with_graphs: Load
) -> None:
    pipeline: Any = load_with_graphs("wan21", None) if compiled else load(tiny_pipeline("wan21"))
    forced: list[bool] = []
    for encoder in text_encoders(pipeline._pipe):
        encoder.register_forward_pre_hook(lambda *_: forced.append(masking_utils.is_tracing()))
    with torch.compiler.set_stance("force_eager"):
        pipeline.supports_batching()  # encodes this short prompt before it is known whether masks are forced
        assert forced
        forced.clear()
        pipeline.prepare([SampleRequest("a", "a", 0)])
        assert forced
        for request, mode in zip((CAR, NIGHT, SNOW), GenerationMode, strict=True):
            generate(pipeline, request, mode=mode)
    assert set(forced) == {compiled}
