"""Frozen weights of LoRA: the same numbers in bf16 and in host memory, close ones in FP8 and 4 bits, in less memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.data.loader import Batch
from muralist.models import frozen_weights
from muralist.models.frozen_weights import FrozenLinear
from muralist.models.hunyuan_dit import HunyuanDiTSpec
from muralist.models.lora import Lora
from muralist.models.spec import build_spec, frozen_bytes
from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
from muralist.settings.load import identity_digest, load
from muralist.train.preflight import check_model_settings, check_strategy
from tests.support.hunyuan import scenes
from tests.support.pipelines import build_pipeline
from tests.support.runs import assert_same_state, last_checkpoint

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def frozen_network(precision: Any, swapped: int = 0, width: int = 64) -> tuple[Network, Network]:
    """A network with all weights, and the same with frozen layers."""
    torch.manual_seed(0)
    full = Network(width).requires_grad_(False)
    with torch.device("meta"):
        network = Network(width)
    frozen_weights.prepare(network, ["Block"], precision)
    frozen_weights.load(network, full.state_dict().items())
    frozen_weights.swap_blocks(network, ["Block"], swapped)
    return full, network


def output_and_gradient(network: nn.Module, dtype: torch.dtype | None, device: torch.device = CPU) -> list[Tensor]:
    torch.manual_seed(1)
    width = network.get_submodule("first").in_features
    x = torch.randn(2, 8, width).to(device).requires_grad_()  # as of LoRA, gradients flow through frozen layers
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        y = network(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_bf16_gives_what_autocast_gives() -> None:
    full, network = frozen_network("bf16")
    assert equal(output_and_gradient(full, torch.bfloat16), output_and_gradient(network, torch.bfloat16))
    assert network.blocks[0].up.weight.dtype is torch.bfloat16
    assert network.first.weight.dtype is network.blocks[0].norm.weight.dtype is torch.float32  # outside, or no matrix


@pytest.mark.parametrize(("precision", "error"), [("fp8", 2**-4), ("nf4", 0.16)])
def test_quantized_weights_are_close(precision: Any, error: float) -> None:
    full, network = frozen_network(precision)
    for (name, weight), layer in zip(
        ((n, w) for n, w in full.blocks.named_parameters() if w.ndim == 2),
        (m for m in network.modules() if isinstance(m, FrozenLinear)),
        strict=True,
    ):
        found = layer.dequantize(layer.weight, layer.scale, torch.float32)
        assert (found - weight).abs().max() <= error * weight.abs().max(), name
        exact = layer.dequantize(layer.weight, layer.scale, torch.bfloat16).float()
        assert precision == "nf4" or torch.equal(exact, found)
    for one, other in zip(output_and_gradient(full, None), output_and_gradient(network, None), strict=True):
        assert 0 < (one - other).norm() / one.norm() < error


def test_backward_keeps_the_stored_weight_only() -> None:
    _, network = frozen_network("fp8", width=256)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(torch.randn(1, 1, 256, requires_grad=True))
    matrices = sum(b.up.weight.numel() + b.down.weight.numel() for b in network.blocks)
    assert matrices <= sum(kept.values()) < 1.5 * matrices + 4 * 256 * 256  # bytes; `first` is in float32


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "nf4"])
@pytest.mark.parametrize("swapped", [1, 2, 3, 5])
def test_swapped_blocks_give_the_same_bits(precision: Any, swapped: int) -> None:
    dtype = None if precision == "fp32" else torch.bfloat16
    expected = output_and_gradient(frozen_network(precision)[1], dtype)
    network = frozen_network(precision, swapped)[1]
    for _ in range(2):
        assert equal(output_and_gradient(network, dtype), expected)
        with torch.no_grad():  # as between steps, for the held-out loss
            network(torch.randn(2, 8, 64))
    held = sum(parameter.nbytes for parameter in network.blocks.parameters())
    assert held < sum(parameter.nbytes for parameter in frozen_network(precision)[1].blocks.parameters())


def test_swapped_blocks_are_counted_before_they_are_swapped() -> None:
    """In fp32 the bytes on the device are four for each counted parameter: what is left in the network, and the buffers."""
    blocks, count = frozen_weights.count_swapped(Network(), ["Block"])
    network = frozen_network("fp32", swapped=blocks)[1]
    output_and_gradient(network, None)  # allocates the buffers
    buffers = network.blocks[0].up.swap._buffers
    assert blocks == 5 and len(buffers) == 2
    left = sum(parameter.nbytes for parameter in network.parameters()) + sum(buffer.nbytes for buffer in buffers)
    assert left == 4 * count


def test_each_block_is_copied_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    network = frozen_network("bf16", 5)[1]
    swap = network.blocks[0].up.swap
    copies: list[int] = []
    copy = swap._copy

    def counted(block: int, keep: int) -> None:
        copies.extend([] if block in swap._held else [block])
        copy(block, keep)

    monkeypatch.setattr(swap, "_copy", counted)
    output_and_gradient(network, torch.bfloat16)
    assert copies == [0, 1, 2, 3, 4, 2, 1, 0]  # ahead of its use each; the last two are still there at the turn
    copies.clear()
    output_and_gradient(network, torch.bfloat16)
    assert copies == [2, 3, 4, 2, 1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_swapped_blocks_on_a_gpu(precision: Any) -> None:
    device = torch.device("cuda")
    plain = frozen_network(precision, width=1024)[1].to(device)
    swapped = frozen_network(precision, 4, width=1024)[1].to(device)
    expected = output_and_gradient(plain, torch.bfloat16, device)
    for _ in range(5):
        assert equal(output_and_gradient(swapped, torch.bfloat16, device), expected)


def test_loading_holds_one_tensor_at_a_time() -> None:
    full = Network().state_dict()
    with torch.device("meta"):
        network = Network()
    frozen_weights.prepare(network, ["Block"], "fp8")
    alive: list[weakref.ref[Tensor]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in full.items():
            gc.collect()
            assert sum(one() is not None for one in alive) <= 1
            copy = value.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy

    frozen_weights.load(network, tensors())
    del full["blocks.3.up.bias"]
    with torch.device("meta"):
        incomplete = Network()
    with pytest.raises(UserError, match=r"incomplete: blocks\.3\.up\.bias"):
        frozen_weights.load(incomplete, full.items())


def test_weights_of_another_shape_are_refused() -> None:
    """A frozen layer computes with a weight of any shape."""
    with torch.device("meta"):
        network: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 6)))
    frozen_weights.prepare(network, ["Sequential"], "fp8")
    with pytest.raises(UserError, match=r"0\.0\.weight is \[6, 8\] instead of \[6, 4\]"):
        frozen_weights.load(network, [("0.0.weight", torch.zeros(6, 8))])


def test_count() -> None:
    full, network = frozen_network("nf4", 2)
    count, size = frozen_weights.count_frozen(network, lambda name: False)
    assert count == sum(parameter.numel() for parameter in full.parameters())
    layer = network.blocks[0].up  # of 64 x 128 weights
    matrices = 3 * 2 * layer.in_features * layer.out_features  # of the blocks that are not swapped
    others = sum(p.numel() for name, p in full.named_parameters() if "blocks" not in name or p.ndim == 1)
    settings = TrainSettings(model={"name": "diffusers", "training_parts": "lora", "base_precision": "nf4"})  # type: ignore[arg-type]
    assert size == matrices * frozen_bytes(settings) + 4 * others


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


# Chroma: gradient checkpointing by diffusers 0.42 itself would drop the attention mask of half of its blocks.
@pytest.mark.parametrize("name", ["chroma", "sd"])
def test_pipelines_train_with_frozen_weights(name: str, pipelines: Path) -> None:
    path = build_pipeline(name, pipelines)
    model = {"path": str(path), "img_size": 64, "training_parts": "lora", "lora_rank": 4}
    spec: Any = build_spec(TrainSettings(model=model), [])  # type: ignore[arg-type]
    spec.to_device(CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=generator)
    batch = Batch(images, torch.zeros(2, dtype=torch.int64), ["a car", "two cars in the rain"], torch.arange(2))
    keys = SampleKeys(0, batch.sample_indices)
    inputs = spec.encode(batch, keys)

    def train(precision: str, swapped: int = 0, checkpointing: bool = False) -> list[Tensor]:
        spec.base_precision, spec.swapped_blocks, spec.gradient_checkpointing = precision, swapped, checkpointing
        network = spec.network()
        adapter = {n: p for n, p in network.named_parameters() if p.requires_grad}
        assert adapter and all(".lora_" in n and p.dtype is torch.float32 for n, p in adapter.items())
        assert {n: p.shape for n, p in spec.meta_model().named_parameters()} == {
            n: p.shape for n, p in network.named_parameters() if swapped == 0
        } or swapped
        for index, parameter in enumerate(adapter.values()):
            torch.manual_seed(index)
            nn.init.normal_(parameter, std=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = spec.loss(network, inputs, keys)
        loss.sum().backward()
        return [loss.detach(), *(p.grad for p in adapter.values() if p.grad is not None)]

    expected = train("fp32")
    assert equal(train("fp32", checkpointing=True), expected)
    assert equal(train("bf16", swapped=2, checkpointing=True), expected)
    quantized = train("fp8")
    assert not equal(quantized, expected) and (quantized[0] / expected[0] - 1).abs().max() < 0.03
    with pytest.raises(UserError, match="--swap_blocks 99 is too many"):
        train("fp8", swapped=99)


def test_hunyuandit(pipelines: Path) -> None:
    folder = build_pipeline("hunyuan", pipelines)
    specs = [
        HunyuanDiTSpec.load(folder, (64, 64), lora=Lora(4, ("to_q",)), base_precision=precision)
        for precision in ("fp32", "bf16", "fp8")
    ]
    batch = scenes(64, 2, 0)
    keys = SampleKeys(0, batch.sample_indices)
    inputs = specs[0].encode(batch, keys)
    with torch.autocast("cpu", torch.bfloat16):
        full, half, quarter = (spec.loss(spec.network(), inputs, keys) for spec in specs)
    assert torch.equal(full, half) and not torch.equal(full, quarter)
    assert (quarter / full - 1).abs().max() < 0.03


def test_a_run_resumes_with_other_blocks_swapped(pipelines: Path, photo_folder: Path, tmp_path: Path) -> None:
    words = [
        *("train", "--model.path", build_pipeline("wan21", pipelines), "--img_size", 64, "--training_parts", "lora"),
        *("--data_path", photo_folder, "--val_fraction", 0, "--batch_size", 2, "--use_amp", "--lora_rank", 4),
        *("--base_precision", "fp8", "--warmup_steps", 0, "--ckpt_every", 1, "--samples_per_gpu", 0),
        *("--no_use_tensorboard", "--results_dir", tmp_path),
    ]
    runs = (("through", 2, ()), ("swapped", 1, ("--blocks_to_swap", 2, "--gradient_checkpointing")), ("swapped", 2, ()))
    for name, steps, more in runs:
        assert main([str(word) for word in (*words, "--run_name", name, "--max_steps", steps, *more)]) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("through", "swapped"))
    assert_same_state(one, other)


def settings(*words: str) -> TrainSettings:
    return load(TrainSettings, ["--model", "diffusers", "--model.path", "none", *words], TRAIN_FLAT_NAMES)


LORA = ("--training_parts", "lora")


def test_precision_of_a_run() -> None:
    assert frozen_bytes(settings(*LORA)) == 4
    assert frozen_bytes(settings(*LORA, "--use_amp")) == frozen_bytes(settings(*LORA, "--precision", "bf16")) == 2
    assert frozen_bytes(settings(*LORA, "--precision", "fp16")) == 4
    assert frozen_bytes(settings(*LORA, "--use_amp", "--base_precision", "nf4")) == 0.5625
    hunyuan = load(TrainSettings, ["--model", "HunyuanDiT", *LORA, "--use_amp"], TRAIN_FLAT_NAMES)
    assert frozen_bytes(hunyuan) == 4  # its runs keep their bits
    plain = settings(*LORA)
    assert identity_digest(settings(*LORA, "--swap_blocks", "3")) == identity_digest(plain)
    assert identity_digest(settings(*LORA, "--base_precision", "fp8")) != identity_digest(plain)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--swap_blocks", "3"), "--swap_blocks 3 is for LoRA: only frozen weights can be smaller, or in host memory."),
        (("--base_precision", "fp8"), "--base_precision fp8 is for LoRA"),
        ((*LORA, "--swap_blocks", "3", "--model", "HunyuanDiT"), "HunyuanDiT does not support --swap_blocks."),
        (
            (*LORA, "--swap_blocks", "3", "--strategy", "fsdp2"),
            "--swap_blocks 3 is not supported with --strategy fsdp2",
        ),
        ((*LORA, "--base_precision", "nf4", "--strategy", "zero2"), "--base_precision nf4 is not supported with"),
    ],
)
def test_refusals(words: tuple[str, ...], told: str) -> None:
    given = settings(*words)
    with pytest.raises(UserError, match=told):
        check_strategy(given, given.distributed.strategy)
        check_model_settings(given.model)
