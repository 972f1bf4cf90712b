"""What makes a GPU fast: the same pictures with and without, as far as a CPU can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline
from diffusers.models.activations import GELU
from torch._dynamo.testing import CompileCounter

from muralist.copies import to_device, to_host
from muralist.generate import diffusers_painter, tuned, turned
from muralist.generate.card import CardClock, Unhurried
from muralist.generate.fp8 import use_fp8
from muralist.generate.fused import LinearGelu, fuse_gelus, linear_gelu
from muralist.generate.one_frame import decode_frames_as_planes
from muralist.generate.tuned import Tuning, repeated_blocks
from tests.support.painting import CAR, CPU, paint, painter_of

Build = Callable[[str], Path]


def vae_of(folder: Path) -> Any:
    return AutoencoderKLWan.from_pretrained(folder, subfolder="vae").eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["wan21", "wan22"])
@pytest.mark.parametrize("frames", [1, 2])
def test_frames_decoded_as_planes_are_the_same_frames(name: str, frames: int, tiny_pipeline: Build) -> None:
    usual, short = vae_of(tiny_pipeline(name)), vae_of(tiny_pipeline(name))
    decode_frames_as_planes(short)
    kinds: list[str] = []
    with _Convolutions(kinds):
        latents = torch.randn(2, usual.config.z_dim, frames, 4, 6, generator=torch.Generator().manual_seed(0))
        mine = short.decode(latents).sample
    theirs = usual.decode(latents).sample
    assert mine.shape == theirs.shape and theirs.std() > 0.01
    assert (mine - theirs).abs().max() < 1e-4
    assert ("conv3d" in kinds) == (frames > 1) and "conv2d" in kinds


class _Convolutions(torch.overrides.TorchFunctionMode):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            self.kinds.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("wan21", {"WanTransformerBlock"}),
        ("hunyuan", {"HunyuanDiTBlock"}),
        ("sdxl", {"BasicTransformerBlock", "ResnetBlock2D"}),
        ("sd3", {"JointTransformerBlock"}),
        ("flux", {"FluxTransformerBlock", "FluxSingleTransformerBlock"}),
        ("pixart", {"BasicTransformerBlock"}),
        ("sana", {"SanaTransformerBlock"}),
    ],
)
def test_the_blocks_that_a_network_repeats(name: str, kinds: set[str], tiny_pipeline: Build) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    network = pipe.unet if name == "sdxl" else pipe.transformer
    blocks = repeated_blocks(network)
    assert {type(block).__name__ for block in blocks} == kinds and blocks


@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sd3"])
def test_product_and_gelu_in_one_are_the_same(name: str, tiny_pipeline: Build) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    layers = [module for module in pipe.transformer.modules() if type(module) is GELU]
    inputs = [torch.randn(2, 3, layer.proj.in_features) for layer in layers]
    expected = [layer(rows) for layer, rows in zip(layers, inputs, strict=True)]
    names = set(pipe.transformer.state_dict())
    assert fuse_gelus(pipe.transformer) == len(layers) > 0
    fused = [module for module in pipe.transformer.modules() if isinstance(module, LinearGelu)]
    for layer, rows, wanted in zip(fused, inputs, expected, strict=True):
        assert torch.equal(layer(rows), wanted)
    assert set(pipe.transformer.state_dict()) == names
    torch.library.opcheck(linear_gelu, (inputs[0], layers[0].proj.weight.detach(), layers[0].proj.bias.detach()))


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_queries_and_keys_turned_in_one_kernel_are_the_same(name: str, tiny_pipeline: Build) -> None:
    pipe: Any = painter_of(tiny_pipeline(name))._pipe
    network, random = pipe.transformer, torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # or the norms' weights, all ones, could be left out
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    channels, text = network.config.in_channels, network.config.text_dim
    inputs = {
        "hidden_states": torch.randn(2, channels, 1, 6, 10, generator=random),
        "timestep": torch.tensor([3.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 7, text, generator=random),
    }
    expected = network(**inputs).sample
    assert turned.turn_in_one_kernel(network) == len(network.blocks) > 0
    assert turned.turn_in_one_kernel(network) == 0  # it has them
    mine = network(**inputs).sample
    assert expected.std() > 0.01 and (mine - expected).abs().max() < 1e-5
    layer = network.blocks[0].attn1
    cos, sin = network.rope(inputs["hidden_states"])
    tokens = torch.randn(2, cos.shape[1], layer.inner_dim, generator=random)
    weights = layer.norm_q.weight.detach(), layer.norm_k.weight.detach()
    torch.library.opcheck(turned.norm_and_turn, (tokens, tokens.flip(0), *weights, 1e-6, cos, sin, layer.heads))


def test_what_shows_in_pictures_is_told(tiny_pipeline: Build) -> None:
    """Where nothing is compiled, no kernel of ours is either: it may be why somebody asked for that."""
    gpu = torch.device("cuda:0")
    pipe: Any = painter_of(tiny_pipeline("wan21"))._pipe
    assert tuned.tune(pipe, Tuning(compiled=False), gpu) == {}
    assert not any(isinstance(block.attn1.processor, turned.TurningProcessor) for block in pipe.transformer.blocks)
    assert tuned.tune(pipe, Tuning(compiled=True), gpu) == {"rotation": "in one kernel"}
    assert tuned.tune(painter_of(tiny_pipeline("hunyuan"))._pipe, Tuning(compiled=True), gpu) == {}


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize(("name", "kinds"), [("hunyuan", 2), ("wan21", 1)])  # of the former, half have a skip
def test_blocks_of_one_kind_are_traced_once_for_all(
    name: str, kinds: int, in_8_bits: bool, tiny_pipeline: Build
) -> None:
    """Tracing is what a second start waits for: it is not kept on disk."""
    torch._dynamo.reset()
    painter: Any = painter_of(tiny_pipeline(name))
    network, traced = painter._pipe.transformer, CompileCounter()
    blocks = repeated_blocks(network)
    assert use_fp8(blocks, least_side=16) if in_8_bits else fuse_gelus(network)
    assert turned.turn_in_one_kernel(network) == (len(blocks) if name == "wan21" else 0)
    for block in blocks:
        block.compile(dynamic=False, backend=traced)
    paint(painter, CAR)
    assert traced.frame_count == kinds < len(blocks)


def test_weights_are_on_the_device_before_they_are_tuned(tiny_pipeline: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    pipeline, tune = diffusers_painter.DiffusionPipeline, diffusers_painter.tune
    to = pipeline.to
    monkeypatch.setattr(
        pipeline, "to", lambda self, *inputs: (happened.append(f"to {inputs[0]}"), to(self, *inputs))[1]
    )
    monkeypatch.setattr(diffusers_painter, "tune", lambda *inputs: (happened.append("tune"), tune(*inputs))[1])
    painter_of(tiny_pipeline("sd"))
    assert happened == [f"to {CPU}", "tune"]


def test_auto_compiles_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "can_compile", lambda: True)
    assert not Tuning.of("auto", CPU).compiled
    assert Tuning.of("auto", torch.device("cuda")).compiled
    monkeypatch.setattr(tuned, "can_compile", lambda: False)
    assert not Tuning.of("auto", torch.device("cuda")).compiled
    assert Tuning.of(True, CPU).compiled and not Tuning.of(False, torch.device("cuda")).compiled


def test_solving_without_a_look_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, right = torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator)
    expected = torch.linalg.solve(matrix, right)
    with Unhurried():
        assert torch.equal(torch.linalg.solve(matrix, right), expected)
        assert matrix.to(torch.float64).dtype == torch.float64 and matrix.to("cpu") is matrix


def test_what_is_brought_to_a_device_and_back_is_a_copy() -> None:
    value = torch.arange(4.0)
    there, back = to_device(value, CPU, torch.bfloat16), to_host(value)
    value.zero_()
    assert there.tolist() == back.tolist() == [0, 1, 2, 3] and there.dtype == torch.bfloat16


def test_no_clock_pretends_to_know_how_busy_a_cpu_is() -> None:
    clock = CardClock(CPU)
    clock.enter()
    clock.leave()
    assert clock.batch() is None


def test_the_part_of_the_time_in_which_there_was_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a GPU, played: every mark is passed at the next of these milliseconds."""
    passed = iter([0.0, 0.5, 80.0, 90.0, 100.0, 130.0, 200.0])

    class Mark:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(passed)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Mark) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    clock = CardClock(torch.device("cuda"))
    clock.enter()
    clock.leave()  # at 0: the end of the first batch, which compiled
    assert clock.batch() is None
    clock.enter()  # 0.5: no pause
    clock.leave()  # 80
    clock.enter()  # 90: the host came late
    clock.leave()  # 100
    time = clock.batch()
    assert time is not None and time.busy() == pytest.approx(1 - 10.5 / 100)
    clock.enter()  # 130
    clock.leave()  # 200
    time = clock.batch()
    assert time is not None and time.busy() == pytest.approx(0.7)
    clock.forget()
    assert clock.batch() is None


@pytest.mark.parametrize(("name", "compiled"), [("wan21", True), ("zimage", False)])
def test_what_would_need_a_graph_for_every_length_of_text_is_not_compiled(
    name: str, compiled: bool, tiny_pipeline: Build
) -> None:
    assert painter_of(tiny_pipeline(name), compile=True).made_with() == ({"compiled": "yes"} if compiled else {})
