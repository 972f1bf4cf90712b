"""The painters' promise on a GPU: the same bytes at any place of a batch, in every precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from muralist.generate.card import Unhurried
from muralist.generate.exactness import psnr
from muralist.generate.fp8 import Fp8Linear
from muralist.generate.fused import linear_gelu
from muralist.generate.painter import Order
from muralist.generate.pipelines import open_painter, settle
from muralist.generate.recorded import Recorders
from muralist.generate.text_encoders import text_encoders
from muralist.generate.tuned import Tuning
from muralist.models.fp8_products import can_fp8, rounded
from tests.support.jit_models import SIDE, checkpoint, family, network_of
from tests.support.painting import CAR, CAT, DOGS, FULL, NIGHT, SIZE, SNOW, differ, no_beat, paint, settings
from tests.support.pipelines import BUILDERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def waiting_fails() -> Callable[[], AbstractContextManager[None]]:
    """Makes a context in which it is an error that the host waits for the card's queue."""

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
def test_a_picture_depends_on_neither_its_neighbours_nor_its_place(
    name: str, dtype: str, tiny_pipeline: Callable[[str], Path]
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    painter = open_painter(settings(tiny_pipeline(name), dtype=dtype, compile=False), device)
    first = paint(painter, CAR, NIGHT, SNOW)
    last = paint(painter, DOGS, CAT, CAR)
    assert first[0].shape == (*SIZE, 3)
    for picture in (last[2], *paint(painter, CAR, CAR, CAR)):
        assert np.array_equal(first[0], picture)
    assert differ(first[0], last[0]) > 5


def test_the_cut_of_guidance_is_exact_on_a_gpu(tiny_pipeline: Callable[[str], Path]) -> None:
    device = torch.device("cuda:0")
    settle(device)
    for name in ("sdxl", "wan21", "hunyuan"):
        whole = open_painter(settings(tiny_pipeline(name), compile=False), device)
        cut = settings(tiny_pipeline(name), cfg_truncation_step=4, compile=False)
        cut_at_the_end = open_painter(cut, device)
        assert np.array_equal(paint(whole, CAR, NIGHT)[1], paint(cut_at_the_end, CAR, NIGHT)[1])


@pytest.mark.parametrize("preset", ["exact", "fast"])
@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl"])
def test_compiled_pictures_are_the_same_at_any_place_and_near_the_others(
    name: str, preset: str, tiny_pipeline: Callable[[str], Path]
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    given = {"dtype": "bf16", "preset": preset, "num_inference_steps": 8}
    eager = paint(open_painter(settings(tiny_pipeline(name), compile=False, **given), device), CAR, NIGHT)
    painter = open_painter(settings(tiny_pipeline(name), **given), device)
    assert painter.made_with()["compiled"] == "yes"
    first, last = paint(painter, CAR, NIGHT), paint(painter, SNOW, CAR)
    assert np.array_equal(first[0], last[1])
    assert psnr(first[0], eager[0]) > 20


@pytest.mark.parametrize("preset", ["exact", "fast"])
@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl", "sana"])
def test_recorded_passes_make_the_same_bytes(
    name: str, preset: str, tiny_pipeline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    given = settings(tiny_pipeline(name), dtype="bf16", preset=preset, num_inference_steps=8)
    found = []
    for recorded in (True, False):
        monkeypatch.setattr(Tuning, "of", lambda *_, recorded=recorded: Tuning(compiled=True, recorded=recorded))
        painter = open_painter(given, device)
        batches = [(CAR, NIGHT), (SNOW, CAR), (CAT, DOGS), (FULL, CAR)]
        found.append([picture for orders in batches for picture in paint(painter, *orders)])
        encoders = len(text_encoders(painter._pipe))  # type: ignore[attr-defined]
        held = [recorder.holds_memory for recorder in painter._recorders._recorders]  # type: ignore[attr-defined]
        assert held == [True] * (1 + encoders) if recorded else held == []
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sdxl"])
def test_from_its_second_batch_on_nothing_waits_for_the_card(
    name: str, tiny_pipeline: Callable[[str], Path], waiting_fails: Callable[[], AbstractContextManager[None]]
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    painter = open_painter(settings(tiny_pipeline(name), dtype="bf16", compile=True), device)
    painter.prepare([CAR, NIGHT])
    expected = paint(painter, CAR, NIGHT)  # compiles and records
    painter.prepare([SNOW])
    with waiting_fails():
        painter.prepare([CAR, CAT])
        flying = painter.begin([CAR, CAT], SIZE, no_beat)
    assert np.array_equal(flying.wait()[0], expected[0])


def test_small_things_reach_the_card_without_waiting(
    waiting_fails: Callable[[], AbstractContextManager[None]],
) -> None:
    numbers = torch.arange(6.0).reshape(2, 3)
    there = torch.zeros(1, dtype=torch.float16, device="cuda")
    copies: list[Callable[[], torch.Tensor]] = [
        lambda: numbers.to("cuda"),
        lambda: numbers[:1].expand(4, 3).to(there),
        lambda: torch.tensor([numbers[1, 1]] * 3, device="cuda"),
        lambda: torch.tensor([0.1, 2], dtype=torch.bfloat16, device="cuda"),
    ]
    with waiting_fails(), Unhurried():
        found = [copy() for copy in copies]
    for one, copy in zip(found, copies, strict=True):
        other = copy()
        assert one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    with waiting_fails(), pytest.raises(RuntimeError):
        numbers.to("cuda")


def test_a_recording_that_fails_leaves_the_card_as_it_was() -> None:
    device = torch.device("cuda:0")
    recorders = Recorders.of(True, device)
    asks = recorders.before(lambda x: x * x.sum().item())
    says = recorders.before(lambda x: x * 2)
    stream, x = torch.cuda.current_stream(), torch.ones(1 << 20, device=device)
    with recorders.on(True):
        assert torch.equal(asks(x), x * (1 << 20))
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        assert torch.equal(says(x), x + x) and torch.equal(says(x + 1), 2 * x + 2)
    assert [recorder.holds_memory for recorder in recorders._recorders] == [False, True]


def test_a_recorded_jit_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    settle(device)
    chosen = family("cat", "dog", "bird")
    run = checkpoint(tmp_path / "run", chosen.describe(), network_of(chosen).state_dict())
    orders = [Order("dog", "", 3), Order("cat", "", 4)]
    found = []
    for recorded in (True, False):
        monkeypatch.setattr(Tuning, "of", lambda *_, recorded=recorded: Tuning(compiled=True, recorded=recorded))
        guided = {"guidance_scale": 2.9, "guidance_interval": (0.1, 1.0), "height": SIDE, "width": SIDE}
        painter = open_painter(settings(run, dtype="bf16", **guided), device)
        flying = [painter.begin(batch, (SIDE, SIDE), no_beat) for batch in (orders, orders[::-1])]
        found.append([picture for batch in flying for picture in batch.wait()])
        kept = [recorder._recordings for recorder in painter._recorders._recorders]  # type: ignore[attr-defined]
        assert any(recording is not None for each in kept for recording in each.values()) == recorded
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert differ(found[0][0], found[0][1]) > 0


def test_batches_in_flight_are_those_that_are_waited_for_and_the_clock_runs(
    tiny_pipeline: Callable[[str], Path],
) -> None:
    device = torch.device("cuda:0")
    settle(device)
    painter = open_painter(settings(tiny_pipeline("wan21"), compile=False), device)
    alone = [paint(painter, order)[0] for order in (CAR, NIGHT, SNOW)]
    flying = [painter.begin([order], SIZE, no_beat) for order in (CAR, NIGHT, SNOW)]
    assert all(np.array_equal(batch.wait()[0], picture) for batch, picture in zip(flying, alone, strict=True))
    assert not flying[0].there and all(batch.gpu_busy is not None and 0 < batch.gpu_busy <= 1 for batch in flying)


def test_products_in_8_bits_are_the_sums_of_the_rounded_numbers() -> None:
    if not can_fp8(torch.device("cuda:0")):
        pytest.skip("this GPU has none")
    torch.manual_seed(0)
    layer = Fp8Linear(torch.nn.Linear(1536, 1536).bfloat16().requires_grad_(False)).cuda()
    x = torch.randn(64, 1536, dtype=torch.bfloat16, device="cuda")
    rows, scale = rounded(x)
    weight = layer.weight.double() * layer.scale.double().t()
    expected = (rows.double() * scale) @ weight.t() + layer.bias.double()
    assert (layer(x).double() - expected).norm() / expected.norm() < 0.005  # as fine as bf16, in which it comes out


def test_product_and_gelu_in_one_kernel_are_the_two() -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((2, 64, 256), (512, 256), (512,)))
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.double(), weight.double(), bias.double()), approximate="tanh"
    )
    two = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")
    one = linear_gelu(x, weight, bias)
    assert (one.double() - exact).norm() <= 1.05 * (two.double() - exact).norm()
