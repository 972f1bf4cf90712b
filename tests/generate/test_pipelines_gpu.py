"""The contract of `Pipeline` on a GPU: the same bytes at any index of a batch, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muralist.generate.diffusers_patches import linear_gelu
from muralist.generate.image_files import psnr
from muralist.generate.optimizations import Fp8Linear, NonBlockingCopies, Optimizations
from muralist.generate.pipeline import Pipeline, SampleRequest, load_pipeline, make_deterministic
from muralist.generate.text_embeddings import text_encoders
from muralist.kernels.cuda_graphs import CudaGraphs
from muralist.kernels.fp8 import has_fp8, quantize_rowwise
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.support.pipeline_calls import (
    CAR,
    CAT,
    DOGS,
    LONG,
    NIGHT,
    SIZE,
    SNOW,
    generate,
    max_difference,
    no_callback,
    settings,
)
from tests.support.pipelines import BUILDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = torch.device("cuda:0")
Build = Callable[[str], Path]
Waiting = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def deterministic() -> None:
    make_deterministic(DEVICE)


def load(folder: Path, **changes: Any) -> Pipeline:
    return load_pipeline(settings(folder, **changes), DEVICE)


@pytest.fixture
def waiting_fails() -> Waiting:
    """Make a context in which it is an error that the host waits for the GPU."""

    @contextmanager
    def context() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", BUILDERS)
def test_an_image_depends_on_neither_its_neighbors_nor_its_index(name: str, dtype: str, tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline(name), dtype=dtype, compile=False)
    first = generate(pipeline, CAR, NIGHT, SNOW)
    last = generate(pipeline, DOGS, CAT, CAR)
    assert first[0].shape == (*SIZE, 3)
    for image in (last[2], *generate(pipeline, CAR, CAR, CAR)):
        assert np.array_equal(first[0], image)
    assert max_difference(first[0], last[0]) > 5


def test_truncated_guidance_is_exact(tiny_pipeline: Build) -> None:
    for name in ("sdxl", "wan21", "hunyuan"):
        guided = load(tiny_pipeline(name), compile=False)
        truncated = load(tiny_pipeline(name), cfg_truncation_step=4, compile=False)
        assert np.array_equal(generate(guided, CAR, NIGHT)[1], generate(truncated, CAR, NIGHT)[1])


@pytest.mark.parametrize("preset", ["exact", "fast"])
@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl"])
def test_compiled_images_are_the_same_at_any_index_and_close_to_eager_ones(
    name: str, preset: str, tiny_pipeline: Build
) -> None:
    given = {"dtype": "bf16", "preset": preset, "num_inference_steps": 8}
    eager = generate(load(tiny_pipeline(name), compile=False, **given), CAR, NIGHT)
    pipeline = load(tiny_pipeline(name), **given)
    assert pipeline.execution_info()["compiled"] == "yes"
    first, last = generate(pipeline, CAR, NIGHT), generate(pipeline, SNOW, CAR)
    assert np.array_equal(first[0], last[1])
    assert psnr(first[0], eager[0]) > 20


@pytest.mark.parametrize("preset", ["exact", "fast"])
@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl", "sana"])
def test_cuda_graphs_give_the_same_bytes(
    name: str, preset: str, tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for graphs in (True, False):
        monkeypatch.setattr(
            Optimizations, "choose", lambda *_, graphs=graphs: Optimizations(compiled=True, cuda_graphs=graphs)
        )
        pipeline = load(tiny_pipeline(name), dtype="bf16", preset=preset, num_inference_steps=8)
        batches = [(CAR, NIGHT), (SNOW, CAR), (CAT, DOGS), (LONG, CAR)]
        found.append([image for requests in batches for image in generate(pipeline, *requests)])
        encoders = len(text_encoders(pipeline._pipe))  # type: ignore[attr-defined]
        held = [any(each.values()) for each in pipeline._graphs._graphs]  # type: ignore[attr-defined]
        assert held == [True] * (1 + encoders) if graphs else held == []
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl"])
def test_from_the_second_batch_on_the_host_never_waits(name: str, tiny_pipeline: Build, waiting_fails: Waiting) -> None:
    pipeline = load(tiny_pipeline(name), dtype="bf16", compile=True)
    pipeline.prepare([CAR, NIGHT])
    expected = generate(pipeline, CAR, NIGHT)  # compiles and captures
    pipeline.prepare([SNOW])
    with waiting_fails():
        pipeline.prepare([CAR, CAT])
        pending = pipeline.generate_async([CAR, CAT], SIZE, no_callback)
    assert np.array_equal(pending.wait()[0], expected[0])


def test_small_copies_do_not_wait(waiting_fails: Waiting) -> None:
    numbers = torch.arange(6.0).reshape(2, 3)
    there = torch.zeros(1, dtype=torch.float16, device="cuda")
    copies: list[Callable[[], torch.Tensor]] = [
        lambda: numbers.to("cuda"),
        lambda: numbers[:1].expand(4, 3).to(there),
        lambda: torch.tensor([numbers[1, 1]] * 3, device="cuda"),
        lambda: torch.tensor([0.1, 2], dtype=torch.bfloat16, device="cuda"),
    ]
    with waiting_fails(), NonBlockingCopies(torch.device("cuda")):
        found = [copy() for copy in copies]
    for one, copy in zip(found, copies, strict=True):
        other = copy()
        assert one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    with waiting_fails(), pytest.raises(RuntimeError):
        numbers.to("cuda")


def test_a_failed_capture_leaves_the_stream_as_it_was() -> None:
    graphs = CudaGraphs(True)
    reads_back = graphs.wrap(lambda x: x * x.sum().item())
    doubles = graphs.wrap(lambda x: x * 2)
    stream, x = torch.cuda.current_stream(), torch.ones(1 << 20, device=DEVICE)
    with graphs.enabled(True):
        assert torch.equal(reads_back(x), x * (1 << 20))
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        assert torch.equal(doubles(x), x + x) and torch.equal(doubles(x + 1), 2 * x + 2)
    assert [any(each.values()) for each in graphs._graphs] == [False, True]


def test_cuda_graphs_of_a_jit_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = family("cat", "dog", "bird")
    run = checkpoint(tmp_path / "run", spec.describe(), network_of(spec).state_dict())
    requests = [SampleRequest("dog", "", 3), SampleRequest("cat", "", 4)]
    found = []
    for graphs in (True, False):
        monkeypatch.setattr(
            Optimizations, "choose", lambda *_, graphs=graphs: Optimizations(compiled=True, cuda_graphs=graphs)
        )
        guided = {"guidance_scale": 2.9, "guidance_interval": (0.1, 1.0), "height": SIDE, "width": SIDE}
        pipeline = load(run, dtype="bf16", **guided)
        pending = [pipeline.generate_async(batch, (SIDE, SIDE), no_callback) for batch in (requests, requests[::-1])]
        found.append([image for batch in pending for image in batch.wait()])
        assert pipeline._graphs.hold_memory == graphs  # type: ignore[attr-defined]
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert max_difference(found[0][0], found[0][1]) > 0


def test_pending_batches_are_those_that_are_waited_for_and_the_clock_runs(tiny_pipeline: Build) -> None:
    pipeline = load(tiny_pipeline("wan21"), compile=False)
    alone = [generate(pipeline, request)[0] for request in (CAR, NIGHT, SNOW)]
    pending = [pipeline.generate_async([request], SIZE, no_callback) for request in (CAR, NIGHT, SNOW)]
    assert all(np.array_equal(batch.wait()[0], image) for batch, image in zip(pending, alone, strict=True))
    assert not pending[0].ready and all(batch.gpu_busy is not None and 0 < batch.gpu_busy <= 1 for batch in pending)


def test_fp8_matmuls_are_the_sums_of_the_quantized_values() -> None:
    if not has_fp8(DEVICE):
        pytest.skip("this GPU has no FP8")
    torch.manual_seed(0)
    layer = Fp8Linear(torch.nn.Linear(1536, 1536).bfloat16().requires_grad_(False)).cuda()
    x = torch.randn(64, 1536, dtype=torch.bfloat16, device="cuda")
    rows, scale = quantize_rowwise(x)
    weight = layer.weight.double() * layer.scale.double().t()
    expected = (rows.double() * scale) @ weight.t() + layer.bias.double()
    assert (layer(x).double() - expected).norm() / expected.norm() < 0.005  # the precision of its bf16 output


def test_fused_linear_gelu_is_as_accurate_as_two_kernels() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((2, 64, 256), (512, 256), (512,)))
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.double(), weight.double(), bias.double()), approximate="tanh"
    )
    two = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")
    one = linear_gelu(x, weight, bias)
    assert (one.double() - exact).norm() <= 1.05 * (two.double() - exact).norm()
