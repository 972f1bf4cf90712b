"""The first half of a feed-forward layer in one kernel: product, bias and GELU.

A compiler leaves the product to cuBLAS and writes its result, the widest of the network, to memory only to read it for the
GELU and write it again. cuBLAS can apply bias and GELU before the first write; the result is then rounded once, not twice.
"""

from __future__ import annotations

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("muralist::linear_gelu", mutates_args=(), device_types="cuda")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x W^T + b), by the hyperbolic tangent; an operation that compilers do not take apart."""
    rows = x.reshape(-1, x.shape[-1])
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True).view(*x.shape[:-1], len(weight))


@linear_gelu.register_kernel("cpu")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


class LinearGelu(nn.Module):
    """Such a layer. Of a class of its own: what is only a function put on one layer has torch trace every block anew."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """GELU(x W^T + b)."""
        return linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


def fuse_gelus(network: nn.Module) -> int:
    """Use it wherever a network has such a layer; returns in how many places."""
    places = 0
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not GELU or layer.approximate != "tanh" or type(layer.proj) is not nn.Linear:
                continue
            if layer.proj.bias is not None:
                setattr(parent, name, LinearGelu(layer.proj))
                places += 1
    return places
