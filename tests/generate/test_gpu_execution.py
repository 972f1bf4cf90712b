"""CUDA graphs, non-blocking copies and the GPU clock, as far as a CPU can test them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers.modeling_outputs import BaseModelOutputWithPooling

from muralist.core.hardware import copy_to_device, copy_to_host
from muralist.generate import gpu_execution
from muralist.generate.gpu_execution import CudaGraphs, GpuClock, GraphedCallable, NonBlockingCopies, Work
from tests.support.graph_capture import FakeCapture

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NUMBERS = torch.arange(6.0).reshape(2, 3)


def network(sample: Tensor, time: Tensor, text: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor]:
    return (sample * time[:, None] + scale * text["rows"],)


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    numbers = torch.randn(3, rows, 4, generator=torch.Generator().manual_seed(seed))
    return numbers[0], numbers[1, :, 0], {"rows": numbers[2]}


def graphed(forward: Callable[..., Any], capture: Any = None) -> GraphedCallable:
    callable_ = GraphedCallable(forward, capture or FakeCapture())
    callable_.enabled = True
    return callable_


def test_every_replay_uses_its_own_inputs_and_keeps_its_output() -> None:
    capture = FakeCapture()
    run = graphed(network, capture)
    outputs = [run(*inputs(2, seed))[0] for seed in range(4)]
    for seed, output in enumerate(outputs):  # later replays have not overwritten it
        assert torch.equal(output, network(*inputs(2, seed))[0])
    assert (capture.captures, capture.replays) == (1, 4)  # the first call is a replay too


def test_each_shape_dtype_and_constant_has_its_own_graph() -> None:
    capture = FakeCapture()
    run = graphed(network, capture)
    for rows, scale in ((2, 1.0), (3, 1.0), (2, 0.5), (2, 1.0)):
        sample, time, text = inputs(rows, rows)
        assert torch.equal(run(sample, time, text, scale=scale)[0], network(sample, time, text, scale)[0])
    sample, time, text = inputs(2, 0)
    assert run(sample.double(), time, text)[0].dtype == torch.float64
    assert capture.captures == 4


def test_graphs_are_captured_only_while_enabled_and_never_after_out_of_memory() -> None:
    capture = FakeCapture()
    graphs = CudaGraphs(capture)
    run = graphs.wrap(network)
    run(*inputs(2, 0))
    assert capture.captures == 0
    with graphs.enabled(True):
        run(*inputs(2, 0))
        assert capture.captures == 1
    with pytest.raises(torch.OutOfMemoryError), graphs.enabled(True):
        raise torch.OutOfMemoryError
    with graphs.enabled(True):
        assert torch.equal(run(*inputs(2, 5))[0], network(*inputs(2, 5))[0])
    assert (capture.captures, capture.replays) == (1, 1)


def test_out_of_memory_disables_graphs_only_if_they_hold_memory() -> None:
    capture = FakeCapture()
    graphs = CudaGraphs(capture)
    run = graphs.wrap(network)
    with pytest.raises(torch.OutOfMemoryError), graphs.enabled(False):
        raise torch.OutOfMemoryError
    with graphs.enabled(True):
        run(*inputs(2, 0))
    assert capture.captures == 1
    with pytest.raises(RuntimeError), graphs.enabled(False):  # now a graph holds memory
        raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
    with graphs.enabled(True):
        run(*inputs(2, 0))
    assert capture.replays == 1


def test_inputs_on_the_host_are_not_captured() -> None:
    run = graphed(lambda sample, scale: (sample * scale.item(),))
    sample = torch.ones(2, device="meta")
    for scale in (2.0, 3.0):
        assert run(sample, torch.tensor(scale))[0].device.type == "meta"
    assert not run.holds_memory


def test_a_failed_capture_falls_back_to_plain_calls() -> None:
    def refuse(work: Work) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    run = graphed(network, refuse)
    for seed in range(2):
        assert torch.equal(run(*inputs(2, seed))[0], network(*inputs(2, seed))[0])


def test_outputs_that_hide_tensors_are_not_captured() -> None:
    class KeyValueCache:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    run = graphed(lambda tokens: {"hidden": tokens + 1, "cache": KeyValueCache(tokens * 2)})
    outputs = [run(torch.full((2,), number)) for number in range(3)]
    assert [output["cache"].keys.tolist() for output in outputs] == [[0, 0], [2, 2], [4, 4]]
    assert not run.holds_memory


@pytest.mark.parametrize("hidden", [None, (torch.ones(2), torch.zeros(3))])
def test_output_classes_of_text_encoders_are_kept(hidden: tuple[Tensor, ...] | None) -> None:
    def encode(tokens: Tensor) -> BaseModelOutputWithPooling:
        layers = hidden and tuple(layer + tokens.sum() for layer in hidden)
        return BaseModelOutputWithPooling(last_hidden_state=tokens + 1, hidden_states=layers)

    run = graphed(encode)
    outputs = [run(torch.full((2,), number)) for number in range(3)]
    for number, output in enumerate(outputs):
        expected = encode(torch.full((2,), number))
        assert type(output) is type(expected) and output.keys() == expected.keys()
        assert torch.equal(output[0], expected.last_hidden_state) and output.pooler_output is None
        assert (output.hidden_states is None) == (hidden is None)
        assert all(map(torch.equal, output.hidden_states or (), expected.hidden_states or ()))
    assert run.holds_memory


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, torch.device]]:
    """The non-blocking copies to a GPU; the tensors stay on the CPU."""
    made: list[tuple[Tensor, torch.device]] = []

    def fake_copy(tensor: Tensor, device: Any, dtype: torch.dtype | None = None) -> Tensor:
        made.append((tensor, torch.device(device)))
        return tensor.to(dtype or tensor.dtype, copy=True)

    monkeypatch.setattr(gpu_execution, "copy_to_device", fake_copy)
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
        gpu_execution, "_is_gpu", lambda device: device is not None and torch.device(device).type == "meta"
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


def test_the_clock_measures_nothing_on_a_cpu() -> None:
    clock = GpuClock(CPU)
    clock.enter()
    clock.leave()
    assert clock.batch() is None


def test_the_clock_measures_the_fraction_of_time_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA events that are reached at these milliseconds, one after the other."""
    reached = iter([0.0, 0.5, 80.0, 90.0, 100.0, 130.0, 200.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(reached)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = GpuClock(GPU)
    clock.enter()
    clock.leave()  # at 0: the end of the first batch, which compiled
    assert clock.batch() is None
    clock.enter()  # 0.5
    clock.leave()  # 80
    clock.enter()  # 90: the host was late
    clock.leave()  # 100
    timing = clock.batch()
    assert timing is not None and timing.busy() == pytest.approx(1 - 10.5 / 100)
    clock.enter()  # 130
    clock.leave()  # 200
    timing = clock.batch()
    assert timing is not None and timing.busy() == pytest.approx(0.7)
    clock.reset()
    assert clock.batch() is None
