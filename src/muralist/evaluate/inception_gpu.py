"""Inception as a GPU computes it fastest: bias and ReLU in the convolution's own kernel, and a whole pass recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muralist.evaluate.inception import Convolution, Inception, fold_norms
from muralist.recording import CardRecords, Record


@dataclass(frozen=True)
class Way:
    """How a GPU computes features; bench/fid_speed.py measures each way."""

    precision: Literal["float32", "TF32", "float16"] = "TF32"
    """What convolutions multiply; TF32, as for pytorch-fid, and float16 have 10 bits behind the point; sums are float32."""
    fused: bool = False
    """Whether a convolution, its bias and its ReLU are one kernel."""
    recorded: bool = False
    """Whether a pass is recorded and replayed, which changes no bit."""

    @property
    def name(self) -> str:
        """All that features depend on; nothing for plain float32."""
        rounded = [] if self.precision == "float32" else [self.precision]
        return " ".join(rounded + ["fused"] * self.fused)


DEFAULT = Way()


class FusedConvolution(nn.Module):
    """A convolution whose batch norm is folded into it, with bias and ReLU in one kernel on a GPU."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        assert not isinstance(conv.padding, str)
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The same as three steps."""
        if x_BCHW.is_cuda:
            return torch.cudnn_convolution_relu(
                x_BCHW, self.weight, self.bias, self.stride, self.padding, dilation=(1, 1), groups=1
            )
        return F.relu(F.conv2d(x_BCHW, self.weight, self.bias, self.stride, self.padding))


def fuse(network: nn.Module) -> None:
    """Put a fused convolution in the place of every one whose norm is folded."""
    for name, child in network.named_children():
        if isinstance(child, Convolution):
            setattr(network, name, FusedConvolution(child.conv))
        else:
            fuse(child)


def on_gpu(network: Inception, device: torch.device, way: Way) -> Callable[[Tensor], Tensor]:
    """What computes features [B, 2048] of inputs that lie there."""
    fold_norms(network)
    if way.fused:
        fuse(network)
    dtype = torch.float16 if way.precision == "float16" else torch.float32
    network.to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def compute(inputs: Tensor) -> Tensor:
        flags = {"enabled": True, "benchmark": False, "deterministic": True, "allow_tf32": way.precision == "TF32"}
        with torch.backends.cudnn.flags(**flags):
            return network(inputs.to(dtype).contiguous(memory_format=torch.channels_last))

    return replayed(compute, CardRecords()) if way.recorded else compute


def replayed(compute: Callable[[Tensor], Tensor], record: Record) -> Callable[[Tensor], Tensor]:
    """The same, recorded at the first batch of each shape, of which there are two at most."""
    recordings: dict[torch.Size, tuple[Tensor, Tensor, Callable[[], None]]] = {}

    def replay(inputs: Tensor) -> Tensor:
        if inputs.shape not in recordings:
            own = inputs.clone()
            recordings[inputs.shape] = own, *record(lambda: compute(own))
        own, output, again = recordings[inputs.shape]
        own.copy_(inputs)
        again()
        return output.clone()  # the next replay writes there again

    return replay
