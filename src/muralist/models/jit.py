"""JiT, the "just image Transformer" of Li and He 2025: pixels in, a clean picture out, no tokenizer.

Parameter names, shapes and numbers are those of the official code, whose state dicts load with strict=True. Three
things differ by intent: attention is PyTorch's or a kernel of ours; initial weights and dropout masks are keyed, so
they are the same everywhere; and there are no buffers, so a network built on the meta device is whole once its
parameters are.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from muralist import keyed_random
from muralist.keyed_random import Purpose, SampleKeys
from muralist.models.fp8_training import Both
from muralist.models.jit_ops import (
    Linear,
    Rotation,
    attention,
    gated_linear_unit,
    gated_norm,
    gated_sum,
    modulated,
    projection,
    rms_norm,
    rotated_heads,
)
from muralist.models.variants import (
    IMAGE_CHANNELS,
    MLP_RATIO,
    TIME_FREQUENCIES,
    VARIANTS,
    check_image_size,
    mlp_width,
    parse_name,
)

_PERIOD = 10000.0
_NARROW = 0.02  # standard deviation of the embeddings' initial weights
_SITES_PER_BLOCK = 3  # attention weights, attention output, hidden layer of the MLP


class Stream(NamedTuple):
    """The residual stream: tokens, and the branch of the layer before that is still to be added to them."""

    tokens: Tensor  # [B, tokens, width]
    branch: Tensor | None = None
    bias: Tensor | None = None  # already in the branch, see `projection`
    gate: Tensor | None = None  # [B, width]

    def settled(self) -> Tensor:
        """The tokens with the branch added."""
        if self.branch is None or self.gate is None:
            return self.tokens
        return gated_sum(self.tokens, self.branch, self.bias, self.gate)

    def without_first(self, count: int) -> Stream:
        """The same without its first tokens."""
        branch = None if self.branch is None else self.branch[:, count:]
        return self._replace(tokens=self.tokens[:, count:], branch=branch)

    def modulated(
        self, weight: Tensor, shift: Tensor, scale: Tensor, reader: nn.Linear
    ) -> tuple[Tensor, Tensor | Both]:
        """The tokens with the branch added, and those normalised, scaled and shifted for the layer that reads them."""
        if self.branch is None or self.gate is None:
            return self.tokens, modulated(self.tokens, weight, shift, scale)
        return gated_norm(self.tokens, self.branch, self.bias, self.gate, weight, shift, scale, reader)


def build(
    name: str,
    img_size: int,
    num_classes: int,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
    recomputed: bool = False,
) -> JiT:
    """Build the named network, such as JiT-B/16, on the current default device."""
    variant, patch = parse_name(name)
    check_image_size(patch, img_size)
    return JiT(
        img_size,
        patch,
        num_classes=num_classes,
        attn_drop=attn_drop,
        proj_drop=proj_drop,
        recomputed=recomputed,
        **asdict(VARIANTS[variant]),
    )


def position_table(grid: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """The fixed 2-D sine-cosine table, [1, grid * grid, width]: the column in the first half, the row in the second."""
    exponent = torch.arange(width // 4, dtype=torch.float64, device=device) / (width // 4)
    angle = torch.arange(grid, dtype=torch.float64, device=device)[:, None] * _PERIOD**-exponent
    axis = torch.cat((angle.sin(), angle.cos()), dim=-1)
    column, row = axis[None, :].expand(grid, -1, -1), axis[:, None].expand(-1, grid, -1)
    return torch.cat((column, row), dim=-1).reshape(1, grid * grid, width).float()


def rotation_table(grid: int, head_dim: int, context: int, device: torch.device) -> Rotation:
    """Rotary angles: half of a head's channel pairs turn by the row, half by the column; context tokens do not turn."""
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    axis = torch.arange(grid, dtype=torch.float32, device=device)[:, None] * (1.0 / _PERIOD**exponent)
    row, column = axis[:, None].expand(-1, grid, -1), axis[None, :].expand(grid, -1, -1)
    angle = F.pad(torch.cat((row, column), dim=-1).flatten(0, 1), (0, 0, context, 0))
    return angle.cos(), angle.sin()


def _drop(x: Tensor, probability: float, keys: SampleKeys | None, site: int) -> Tensor:
    """Dropout whose mask is a function of the sample's key and the site in the network; no keys, no dropout."""
    if keys is None or probability == 0:
        return x
    keep = keys.uniform(Purpose.DROPOUT + site, tuple(x.shape[1:])) >= probability
    return x * (keep.to(x.dtype) / (1 - probability))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, in float32 whatever the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight)


class TokenConvolution(nn.Conv2d):
    """A convolution over patches that do not overlap, so a product with a matrix: [B, tokens, in] to [B, tokens, out]."""

    def forward(self, patches: Tensor) -> Tensor:
        """Transform each flattened patch, ordered (channel, row, column)."""
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbedder(nn.Module):
    """Patches to tokens through a narrow layer, [B, C, H, W] to [B, tokens, width], row by row."""

    def __init__(self, patch: int, channels: int, bottleneck: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj1 = TokenConvolution(channels, bottleneck, kernel_size=patch, stride=patch, bias=False)
        self.proj2 = TokenConvolution(bottleneck, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Embed a batch of images."""
        grid = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, rows, patch, columns, patch]
        return self.proj2(self.proj1(grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)))


class TimeEmbedder(nn.Module):
    """Time in [0, 1] to a vector: cosines and sines of the unscaled time, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Embed times, [B] to [B, width]."""
        half = TIME_FREQUENCIES // 2
        exponent = torch.arange(half, dtype=torch.float32, device=t.device) / half
        angle = t.float()[:, None] * torch.exp(-math.log(_PERIOD) * exponent)
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1))


class LabelEmbedder(nn.Module):
    """Class labels to vectors; the last row of the table stands for "no label"."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        """Embed labels, [B] to [B, width]."""
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Self-attention with normalised queries and keys and rotary positions."""

    def __init__(self, width: int, heads: int, attn_drop: float, proj_drop: float, site: int) -> None:
        super().__init__()
        self.heads, self.attn_drop, self.proj_drop, self.site = heads, attn_drop, proj_drop, site
        self.q_norm = RMSNorm(width // heads)
        self.k_norm = RMSNorm(width // heads)
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor | Both, rotation: Rotation, keys: SampleKeys | None) -> Tensor:
        """Attend among all tokens of each sample, [B, tokens, width]; `proj` is left to be applied."""
        inputs = self.qkv, x, self.q_norm.weight, self.k_norm.weight, rotation, self.heads
        if keys is None or self.attn_drop == 0:
            return attention(*inputs)
        # A kernel would draw its own masks; keyed ones need the weights in the open.
        q, k, v = rotated_heads(*inputs)
        scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
        out = _drop(scores.softmax(dim=-1), self.attn_drop, keys, self.site).to(v.dtype) @ v
        return out.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, width: int, hidden: int, drop: float, site: int) -> None:
        super().__init__()
        self.drop, self.site = drop, site
        self.w12 = Linear(width, 2 * hidden)
        self.w3 = Linear(hidden, width)

    def forward(self, x: Tensor | Both, keys: SampleKeys | None) -> tuple[Tensor, Tensor | None]:
        """Transform each token on its own; a branch and its bias."""
        hidden = gated_linear_unit(self.w12, x)
        if keys is not None and self.drop > 0:
            exact = hidden.exact if isinstance(hidden, Both) else hidden
            hidden = _drop(exact[..., : self.w3.in_features], self.drop, keys, self.site)
        return projection(self.w3, hidden)


class Block(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by the condition."""

    gathered_as_one = True  # under ZeRO: weights are read beside the modules that hold them

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        attn_drop: float,
        proj_drop: float,
        first_site: int,
        recomputed: bool = False,
    ) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.norm1 = RMSNorm(width)
        self.attn = Attention(width, heads, attn_drop, proj_drop, first_site)
        self.norm2 = RMSNorm(width)
        self.mlp = SwiGLU(width, mlp_width(width, mlp_ratio), proj_drop, first_site + 2)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, stream: Stream, condition: Tensor, rotation: Rotation, keys: SampleKeys | None) -> Stream:
        """One layer; its feed-forward branch is left to be added by the next."""
        if not (self.recomputed and torch.is_grad_enabled()):
            return self._layer(stream, condition, rotation, keys)

        def again(condition: Tensor, *stream: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(self._layer(Stream(*stream), condition, rotation, keys))

        # Tensors one by one, so that autograd lets go of them after the backward pass. Dropout is keyed: no state to keep.
        return Stream(*recompute(again, condition, *stream, use_reentrant=False, preserve_rng_state=False))

    def _layer(self, stream: Stream, condition: Tensor, rotation: Rotation, keys: SampleKeys | None) -> Stream:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition).chunk(6, dim=-1)
        x, y = stream.modulated(self.norm1.weight, shift1, scale1, self.attn.qkv)
        heads, proj = self.attn(y, rotation, keys), self.attn.proj
        if keys is not None and self.attn.proj_drop > 0:
            branch, bias = _drop(proj(heads), self.attn.proj_drop, keys, self.attn.site + 1), None
        else:
            branch, bias = projection(proj, heads)
        x, y = gated_norm(x, branch, bias, gate1, self.norm2.weight, shift2, scale2, self.mlp.w12)
        branch, bias = self.mlp(y, keys)
        return Stream(x, branch, bias, gate2)


class FinalLayer(nn.Module):
    """Tokens back to the pixels of their patches."""

    gathered_as_one = True

    def __init__(self, width: int, patch: int, channels: int) -> None:
        super().__init__()
        self.norm_final = RMSNorm(width)
        self.linear = nn.Linear(width, patch * patch * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, stream: Stream, condition: Tensor) -> Tensor:
        """Each token's pixels, ordered (row, column, channel)."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=-1)
        return self.linear(stream.modulated(self.norm_final.weight, shift, scale, self.linear)[1])


class JiT(nn.Module):
    """The network: from a noisy image, a time (1 is data, 0 is noise) and a label to a prediction of the clean image.

    The weights mean nothing until `initialise` or `load_state_dict` has set them.
    """

    _no_split_modules = ("Block", "FinalLayer")  # as the field names it: what is sharded and compiled as one

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int = IMAGE_CHANNELS,
        hidden_size: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        mlp_ratio: float = MLP_RATIO,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        num_classes: int = 1000,
        bottleneck_dim: int = 128,
        in_context_len: int = 32,
        in_context_start: int = 8,
        recomputed: bool = False,
    ) -> None:
        super().__init__()
        check_image_size(patch_size, input_size)
        if hidden_size % (4 * num_heads):
            raise ValueError(
                f"{hidden_size} channels in {num_heads} heads: two rotated axes need head sizes divisible by 4"
            )
        if in_context_len and not 0 <= in_context_start < depth:
            raise ValueError(f"in-context tokens cannot enter before block {in_context_start} of {depth}")
        self.patch_size, self.grid, self.head_dim = patch_size, input_size // patch_size, hidden_size // num_heads
        self.in_channels, self.num_classes = in_channels, num_classes
        self.in_context_len, self.in_context_start = in_context_len, in_context_start
        self.has_dropout = attn_drop > 0 or proj_drop > 0

        self.pos_embed = nn.Parameter(position_table(self.grid, hidden_size), requires_grad=False)
        if in_context_len:
            self.in_context_posemb = nn.Parameter(torch.zeros(1, in_context_len, hidden_size))
        self.t_embedder = TimeEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size)
        self.x_embedder = PatchEmbedder(patch_size, in_channels, bottleneck_dim, hidden_size)
        dropped = range(depth // 4, depth // 4 * 3)  # dropout in the middle half only, like the official code
        self.blocks = nn.ModuleList(
            Block(
                hidden_size,
                num_heads,
                mlp_ratio,
                attn_drop if i in dropped else 0.0,
                proj_drop if i in dropped else 0.0,
                first_site=_SITES_PER_BLOCK * i,
                recomputed=recomputed,
            )
            for i in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, in_channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, keys: SampleKeys | None = None) -> Tensor:
        """Predict for images [B, C, H, W], times [B] and labels [B]; in training, dropout masks come from the keys."""
        if not self.training:
            keys = None
        elif self.has_dropout and keys is None:
            raise ValueError("dropout in training needs sample keys")
        label = self.y_embedder(y)
        condition = self.t_embedder(t) + label
        tokens = self.x_embedder(x)
        # Under autocast the residual stream keeps the patch embedding's type, in every block.
        tokens = tokens + self.pos_embed.to(tokens.dtype)
        cos, sin = rotation_table(self.grid, self.head_dim, self.in_context_len, tokens.device)
        rotation = cos[self.in_context_len :], sin[self.in_context_len :]
        stream = Stream(tokens)
        for i, block in enumerate(self.blocks):
            if self.in_context_len and i == self.in_context_start:
                context = label.unsqueeze(1) + self.in_context_posemb
                stream = Stream(torch.cat((context.to(tokens.dtype), stream.settled()), dim=1))
                rotation = cos, sin
            stream = block(stream, condition, rotation, keys)
        return self._to_image(self.final_layer(stream.without_first(self.in_context_len), condition))

    def _to_image(self, tokens: Tensor) -> Tensor:
        """Lay the patches out as an image, [B, tokens, patch * patch * C] to [B, C, H, W]."""
        patches = tokens.unflatten(-1, (self.patch_size, self.patch_size, self.in_channels))
        return patches.unflatten(1, (self.grid, self.grid)).permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def train_in_8_bits(self) -> None:
        """Compute the products of the blocks' large layers in 8 bits wherever gradients are asked for."""
        for layer in self.blocks.modules():
            if isinstance(layer, Linear):
                layer.eight_bits = True

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the initial weights from the official distributions: the same seed, the same weights on any device."""
        for index, (name, parameter) in enumerate(self.named_parameters()):
            if parameter.is_meta:
                raise ValueError("initialise needs memory for the weights: call to_empty first")
            parameter.copy_(self._initial(name, parameter, index, seed))

    def _initial(self, name: str, parameter: Tensor, index: int, seed: int) -> Tensor:
        """The initial value of the parameter with this name and index."""
        shape = tuple(parameter.shape)
        if name == "pos_embed":
            return position_table(self.grid, shape[-1], device="cpu")
        if "norm" in name:
            return torch.ones(shape)
        # Zero gates and a zero last layer: every block starts as the identity and the first prediction is zero.
        if "adaLN_modulation" in name or name.startswith("final_layer.linear") or name.endswith("bias"):
            return torch.zeros(shape)
        if name.startswith(("t_embedder", "y_embedder", "in_context")):
            # On the CPU, because logarithm and cosine differ in the last bit between devices; these tensors are small.
            return _NARROW * keyed_random.normal(seed, Purpose.INIT, torch.tensor([index], device="cpu"), shape)[0]
        # Xavier uniform over the flattened matrix: exact arithmetic, so it may be done where the parameter lives.
        bound = math.sqrt(6.0 / (shape[0] + math.prod(shape[1:])))
        number = torch.tensor([index], device=parameter.device)
        return (2.0 * keyed_random.uniform(seed, Purpose.INIT, number, shape)[0] - 1.0) * bound
