"""How a pipeline is made to run near the limit of a GPU, with pictures that stay the same to the bit from run to run.

Blocks that a network repeats are compiled once for all; so is the autoencoder's decoder. Inductor chooses its kernels by
rules and not by a stopwatch, one graph for each size of pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from muralist.generate.guidance import DENOISERS
from muralist.machine import can_compile

_SIZES = 64  # of pictures in one table, each with a graph of its own
_HOPPER = (9, 0)
# Beside the blocks that the network itself names.
_ALSO_REPEATED = {"UNet2DConditionModel": ("ResnetBlock2D",)}


@dataclass(frozen=True)
class Tuning:
    """What is done to a pipeline; everything but `compiled` changes nothing on a CPU."""

    compiled: bool = False
    """Compile the network's blocks and the decoder."""
    planes: bool = True
    """Decode single frames of a video's autoencoder as planes, and planes with channels last."""
    cudnn_attention: bool = True
    """Let cuDNN compute attention before others, on Hopper and later."""
    fused_gelu: bool = True
    """Product, bias and GELU of feed-forward layers in one kernel."""
    turned: bool = True
    """Norm and rotation of queries and keys in one kernel, in Wan's self-attention, where it is compiled."""
    recorded: bool = True
    """Record the compiled network's passes and replay them."""

    @classmethod
    def of(cls, compiled: bool | str, device: torch.device) -> Tuning:
        """As the settings say; auto: compiled on GPUs, where there is what it takes."""
        return cls(compiled=device.type == "cuda" and can_compile() if compiled == "auto" else bool(compiled))


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of which a network is made."""
    names = {*(getattr(network, "_repeated_blocks", None) or ()), *_ALSO_REPEATED.get(type(network).__name__, ())}
    if not names:
        lists = [part for part in network.children() if isinstance(part, nn.ModuleList)]
        names = {type(block).__name__ for block in max(lists, key=len, default=())}
    return [part for part in network.modules() if type(part).__name__ in names]


def tune(pipe: Any, tuning: Tuning, device: torch.device) -> dict[str, str]:
    """Prepare a pipeline; compiling itself happens with the first batch. Tells what of it shows in pictures' last bits."""
    networks = [network for name in DENOISERS if (network := getattr(pipe, name, None)) is not None]
    vae = getattr(pipe, "vae", None)
    if tuning.planes and vae is not None:
        from muralist.generate.one_frame import decode_frames_as_planes

        decode_frames_as_planes(vae)
        if device.type == "cuda":
            for part in (vae, *networks):
                _channels_last(part)
    if tuning.fused_gelu and device.type == "cuda":
        from muralist.generate.fused import fuse_gelus

        for network in networks:
            fuse_gelus(network)
    if not tuning.compiled:
        return {}
    told: dict[str, str] = {}
    if tuning.turned and device.type == "cuda":
        from muralist.generate.turned import turn_in_one_kernel

        if sum(turn_in_one_kernel(network) for network in networks):
            told["rotation"] = "in one kernel"
    choose_by_rules()
    for network in networks:
        for block in repeated_blocks(network):
            block.compile(dynamic=False)
    decoder = getattr(vae, "decoder", None)
    if isinstance(decoder, nn.Module):
        decoder.compile(dynamic=False)
    return told


def _channels_last(part: nn.Module) -> None:
    """The order that convolutions of planes are fast in; weights of other kinds are left as they are."""
    for module in part.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def choose_by_rules() -> None:
    """Have Inductor choose kernels by rules and not by a stopwatch, one graph for each size of pictures."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    inductor.deterministic = True  # or kernels, and with them the order of sums, are chosen by how fast they were
    dynamo.automatic_dynamic_shapes = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, 8 * _SIZES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 64 * _SIZES)


@contextmanager
def tuned(tuning: Tuning, device: torch.device, eager: bool) -> Iterator[None]:
    """For one call of a pipeline; an `eager` one compiles nothing and uses nothing that is compiled."""
    with ExitStack() as stack:
        if tuning.compiled and eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if tuning.cudnn_attention and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
            order += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
            stack.enter_context(sdpa_kernel(order, set_priority=True))
        yield
