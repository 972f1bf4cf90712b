"""Inference optimizations: the same images with and without, as far as a CPU can show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers.modeling_outputs import BaseModelOutputWithPooling

from muralist.core.hardware import copy_to_device, copy_to_host
from muralist.generate import diffusers_patches, diffusers_pipeline, optimizations
from muralist.generate.denoising import denoisers
from muralist.generate.optimizations import Fp8Linear, NonBlockingCopies, Optimizations, exact_matmuls, use_fp8
from muralist.kernels.fp8 import has_fp8, quantize_rowwise
from tests.support.graph_capture import FakeCudaGraphs
from tests.support.pipeline_calls import CAR, CPU, generate, load

Build = Callable[[str], Path]
GPU = torch.device("cuda:0")
NUMBERS = torch.arange(6.0).reshape(2, 3)


def test_execution_info_names_the_fused_kernels_of_compiled_pipelines(tiny_pipeline: Build) -> None:
    """Without compilation none of our kernels is compiled either: the user may have no compiler."""
    pipe: Any = load(tiny_pipeline("wan21"))._pipe  # type: ignore[attr-defined]
    processor = diffusers_patches.FusedWanAttnProcessor
    assert Optimizations(compiled=False).apply(pipe, denoisers(pipe), GPU) == {}
    assert not any(isinstance(block.attn1.processor, processor) for block in pipe.transformer.blocks)
    assert Optimizations(compiled=True).apply(pipe, denoisers(pipe), GPU) == {"rotation": "in one kernel"}
    other: Any = load(tiny_pipeline("hunyuan"))._pipe  # type: ignore[attr-defined]
    assert Optimizations(compiled=True).apply(other, denoisers(other), GPU) == {}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("name", "kinds"), [("hunyuan", 2), ("wan21", 1)])  # half of HunyuanDiT's blocks have a skip
def test_blocks_of_one_kind_are_traced_once(name: str, kinds: int, fp8: bool, tiny_pipeline: Build) -> None:
    """The compile cache does not keep traces, so a second start waits for them."""
    torch._dynamo.reset()
    pipeline: Any = load(tiny_pipeline(name))
    pipeline.supports_batching()  # may run the denoiser, without compiling it
    network, traced = pipeline._pipe.transformer, CompileCounter()
    blocks = diffusers_patches.repeated_blocks(network)
    assert use_fp8(blocks, min_side=16) if fp8 else diffusers_patches.fuse_linear_gelu(network)
    assert diffusers_patches.fuse_qk_norm_rope(network) == (len(blocks) if name == "wan21" else 0)
    for block in blocks:
        block.compile(dynamic=False, backend=traced)
    generate(pipeline, CAR)
    assert traced.frame_count == kinds < len(blocks)


def test_weights_are_on_the_device_before_they_are_optimized(
    tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    pipeline, to, apply = (
        diffusers_pipeline.DiffusionPipeline,
        diffusers_pipeline.DiffusionPipeline.to,
        Optimizations.apply,
    )
    monkeypatch.setattr(pipeline, "to", lambda self, *args: (events.append(f"to {args[0]}"), to(self, *args))[1])
    monkeypatch.setattr(Optimizations, "apply", lambda *args: (events.append("apply"), apply(*args))[1])
    load(tiny_pipeline("sd"))
    assert events == [f"to {CPU}", "apply"]


def test_auto_compiles_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizations, "can_compile", lambda: True)
    assert not Optimizations.choose("auto", CPU).compiled
    assert Optimizations.choose("auto", GPU).compiled
    monkeypatch.setattr(optimizations, "can_compile", lambda: False)
    assert not Optimizations.choose("auto", GPU).compiled
    assert Optimizations.choose(True, CPU).compiled and not Optimizations.choose(False, GPU).compiled


@pytest.mark.parametrize(("name", "compiled"), [("wan21", True), ("zimage", False)])
def test_pipelines_with_embeddings_of_any_length_are_not_compiled(
    name: str, compiled: bool, tiny_pipeline: Build
) -> None:
    assert load(tiny_pipeline(name), compile=True).execution_info() == ({"compiled": "yes"} if compiled else {})


@pytest.mark.parametrize(("hip", "expected"), [(None, 1), ("6.4.43482", 0)])
def test_cudnn_attention_is_for_nvidia_gpus(hip: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(optimizations, "sdpa_kernel", lambda *backends, **_: nullcontext(chosen.append(backends)))
    with Optimizations().active(GPU, eager=False):
        assert len(chosen) == expected


def test_fp8_rows_have_their_own_scale_and_lose_little() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).bfloat16().requires_grad_(False)
    fp8 = Fp8Linear(layer)
    rows = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    output = fp8(rows)
    error = (output - layer(rows)).float().norm() / layer(rows).float().norm()
    assert 0.005 < error < 0.06
    louder = torch.cat([rows[:1], 1000 * rows[1:]])  # with one scale for all, the first row would vanish
    assert torch.equal(fp8(louder)[:1], output[:1])
    with exact_matmuls([fp8]):
        assert torch.equal(fp8(rows), layer(rows))
    assert torch.equal(fp8(rows), output)


def test_fp8_quantization_of_zeros_and_of_the_largest_value() -> None:
    values, scale = quantize_rowwise(torch.tensor([[0.0, 0.0], [3.0, -6.0]]))
    assert torch.equal(values.float(), torch.tensor([[0.0, 0.0], [224.0, -448.0]]))
    assert torch.allclose(values.float() * scale, torch.tensor([[0.0, 0.0], [3.0, -6.0]]), rtol=1e-6, atol=0)


def test_only_large_layers_with_sides_of_multiples_of_16_become_fp8() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(32, 64), nn.Sequential(nn.Linear(128, 64)))
    changed = use_fp8([block], min_side=64)
    assert [(layer.in_features, layer.out_features) for layer in changed] == [(64, 64), (128, 64)]
    assert isinstance(block[0], Fp8Linear) and type(block[1]) is nn.Linear and isinstance(block[3][0], Fp8Linear)
    assert use_fp8([block], min_side=64) == []  # a second time changes nothing
    assert not has_fp8(CPU)


def network(sample: Tensor, time: Tensor, text: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor]:
    return (sample * time[:, None] + scale * text["rows"],)


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    numbers = torch.randn(3, rows, 4, generator=torch.Generator().manual_seed(seed))
    return numbers[0], numbers[1, :, 0], {"rows": numbers[2]}


@pytest.fixture
def graphs() -> FakeCudaGraphs:
    """Graphs of a pipeline that is being called."""
    graphs = FakeCudaGraphs()
    graphs.active = True
    return graphs


def test_every_replay_uses_its_own_inputs_and_keeps_its_output(graphs: FakeCudaGraphs) -> None:
    run = graphs.wrap(network)
    outputs = [run(*inputs(2, seed))[0] for seed in range(4)]
    for seed, output in enumerate(outputs):  # later replays have not overwritten it
        assert torch.equal(output, network(*inputs(2, seed))[0])
    assert (graphs.captures, graphs.replays) == (1, 4)  # the first call is a replay too


def test_each_shape_dtype_and_constant_has_its_own_graph(graphs: FakeCudaGraphs) -> None:
    run = graphs.wrap(network)
    for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5), (2, 1.0)):
        sample, time, text = inputs(rows, rows)
        assert torch.equal(run(sample, time, text, scale=scale)[0], network(sample, time, text, scale)[0])
    sample, time, text = inputs(2, 0)
    assert run(sample.double(), time, text)[0].dtype == torch.float64
    assert graphs.captures == 4


def test_graphs_are_captured_only_while_enabled_and_never_after_out_of_memory() -> None:
    graphs = FakeCudaGraphs()
    run = graphs.wrap(network)
    run(*inputs(2, 0))
    with pytest.raises(torch.OutOfMemoryError), graphs.enabled(False):
        raise torch.OutOfMemoryError  # not because of graphs, which hold no memory yet
    assert graphs.captures == 0
    with graphs.enabled(True):
        run(*inputs(2, 0))
        assert graphs.captures == 1
    with pytest.raises(RuntimeError), graphs.enabled(False):  # now a graph holds memory
        raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
    with graphs.enabled(True):
        assert torch.equal(run(*inputs(2, 5))[0], network(*inputs(2, 5))[0])
    assert (graphs.captures, graphs.replays) == (1, 1)


def test_inputs_on_the_host_are_not_captured(graphs: FakeCudaGraphs) -> None:
    run = graphs.wrap(lambda sample, scale: (sample * scale.item(),))
    sample = torch.ones(2, device="meta")
    for scale in (2.0, 3.0):
        assert run(sample, torch.tensor(scale))[0].device.type == "meta"
    assert graphs.captures == 0


def test_a_failed_capture_falls_back_to_plain_calls(graphs: FakeCudaGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "_capture", refuse)
    run = graphs.wrap(network)
    for seed in range(2):
        assert torch.equal(run(*inputs(2, seed))[0], network(*inputs(2, seed))[0])


def test_outputs_that_hide_tensors_are_not_captured(graphs: FakeCudaGraphs) -> None:
    class KeyValueCache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    run = graphs.wrap(lambda tokens: {"hidden": tokens + 1, "cache": KeyValueCache(tokens * 2)})
    outputs = [run(torch.full((2,), number)) for number in range(3)]
    assert [output["cache"].keys.tolist() for output in outputs] == [[0, 0], [2, 2], [4, 4]]
    assert not graphs.hold_memory


@pytest.mark.parametrize("hidden", [None, (torch.ones(2), torch.zeros(3))])
def test_output_classes_of_text_encoders_are_kept(graphs: FakeCudaGraphs, hidden: tuple[Tensor, ...] | None) -> None:
    def encode(tokens: Tensor) -> BaseModelOutputWithPooling:
        layers = hidden and tuple(layer + tokens.sum() for layer in hidden)
        return BaseModelOutputWithPooling(last_hidden_state=tokens + 1, hidden_states=layers)

    run = graphs.wrap(encode)
    outputs = [run(torch.full((2,), number)) for number in range(3)]
    for number, output in enumerate(outputs):
        expected = encode(torch.full((2,), number))
        assert type(output) is type(expected) and output.keys() == expected.keys()
        assert torch.equal(output[0], expected.last_hidden_state) and output.pooler_output is None
        assert (output.hidden_states is None) == (hidden is None)
        assert all(map(torch.equal, output.hidden_states or (), expected.hidden_states or ()))
    assert graphs.hold_memory


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, torch.device]]:
    """The non-blocking copies to a GPU; the tensors stay on the CPU."""
    made: list[tuple[Tensor, torch.device]] = []

    def fake_copy(tensor: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
        made.append((tensor, torch.device(device)))
        return tensor.to(dtype or tensor.dtype, copy=True)

    monkeypatch.setattr(optimizations, "copy_to_device", fake_copy)
    return made


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda: NUMBERS.to("cuda"), NUMBERS),
        (lambda: NUMBERS.to(GPU, torch.float16, False, True), NUMBERS.half()),
        (lambda: NUMBERS.to(device=GPU, dtype=torch.int64, non_blocking=True, copy=True), NUMBERS.long()),
        (lambda: NUMBERS[0, 1].to("cuda:1"), NUMBERS[0, 1]),
        (lambda: NUMBERS[:1].expand(4, 3).to(GPU), NUMBERS[:1].expand(4, 3)),  # as timesteps are
        (lambda: torch.tensor([NUMBERS[0, 1]] * 3, device=GPU), torch.ones(3)),  # HunyuanDiT, at every step
        (lambda: torch.tensor([0.1, 2], dtype=torch.bfloat16, device="cuda:0"), torch.tensor([0.1, 2]).bfloat16()),
        (lambda: torch.as_tensor(np.arange(3), device=GPU), torch.arange(3)),
    ],
)
def test_copies_to_a_gpu_do_not_block(
    copy: Callable[[], Tensor], expected: Tensor, copies: list[tuple[Tensor, torch.device]]
) -> None:
    with NonBlockingCopies(GPU):
        found = copy()
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert [(tensor.device.type, device.type) for tensor, device in copies] == [("cpu", "cuda")]


def test_copies_to_the_device_of_another_tensor_do_not_block(
    copies: list[tuple[Tensor, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        optimizations, "_is_gpu", lambda device: device is not None and torch.device(device).type == "meta"
    )
    with NonBlockingCopies(GPU):
        found = NUMBERS.to(torch.zeros(1, dtype=torch.float64, device="meta"))
    assert found.dtype == torch.float64 and [str(device) for _, device in copies] == ["meta"]


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize(
    "copy",
    [
        lambda: NUMBERS.to(torch.float64),
        lambda: NUMBERS.to("cpu", copy=True),
        lambda: NUMBERS.to("meta"),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.nn.Parameter(NUMBERS).to(GPU),
        lambda: NUMBERS.clone().requires_grad_().to(GPU),
        lambda: NUMBERS.to_sparse().to(GPU),
        lambda: torch.quantize_per_tensor(NUMBERS, 0.1, 0, torch.quint8).to(GPU),
        lambda: NUMBERS.t().to(GPU),  # a copy would have another memory order
        lambda: NUMBERS.reshape(1, 1, 2, 3).to(GPU, memory_format=torch.channels_last),
        lambda: torch.tensor([1.0], device=GPU, requires_grad=True),
        lambda: torch.tensor([], device=GPU),
    ],
)
def test_all_other_copies_are_left_to_torch(
    copy: Callable[[], Tensor], copies: list[tuple[Tensor, torch.device]]
) -> None:
    with NonBlockingCopies(GPU), suppress(AssertionError, RuntimeError):  # without a GPU, torch raises
        copy()
    assert copies == []


def test_solving_without_a_check_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, right = torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator)
    expected = torch.linalg.solve(matrix, right)
    with NonBlockingCopies(GPU):
        assert torch.equal(torch.linalg.solve(matrix, right), expected)
        assert matrix.to(torch.float64).dtype == torch.float64 and matrix.to("cpu") is matrix


def modes() -> list[Any]:
    return list(_get_current_function_mode_stack())


def test_the_mode_is_suspended_in_networks_also_after_an_error() -> None:
    mode = NonBlockingCopies(GPU)
    inner = mode.suspended(modes)
    outer = mode.suspended(lambda: (modes(), inner(), modes()))
    assert outer() == ([], [], [])  # not active yet

    @mode.suspended
    def fail() -> None:
        assert modes() == []
        raise ValueError

    with mode.active():
        assert outer() == ([], [], []) and modes() == [mode]
        with pytest.raises(ValueError):
            fail()
        assert modes() == [mode]
    assert modes() == []


def test_a_foreign_mode_is_not_suspended() -> None:
    class Foreign(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mode = NonBlockingCopies(GPU)
    with mode.active(), Foreign() as foreign:
        assert mode.suspended(modes)()[-1] is foreign


def test_the_mode_is_never_active_on_a_cpu_or_once_disabled() -> None:
    disabled = NonBlockingCopies(GPU)
    disabled.disable()
    for mode in (NonBlockingCopies(CPU), disabled):
        with mode.active():
            assert modes() == [] and mode.suspended(modes)() == []


def test_transfers_copy() -> None:
    value = torch.arange(4.0)
    there, back = copy_to_device(value, CPU, torch.bfloat16), copy_to_host(value)
    value.zero_()
    assert there.tolist() == back.tolist() == [0, 1, 2, 3] and there.dtype == torch.bfloat16
