"""JiT, the "just image Transformer" of Li and He 2025: a plain ViT on pixels that predicts the clean image.

Parameter names, shapes and outputs are those of the official code, whose state dicts load with strict=True. Three
things differ by intent: attention is PyTorch's or our kernel's; initial weights and dropout masks are functions of the
seed and the sample index, so they are the same on every device and rank; and there are no buffers, so a network built
on the meta device is complete once its parameters are loaded.

Shapes: B samples, L tokens, D = hidden_size, P = patch_size, C = image channels.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muralist.core import rng
from muralist.core.image_size import Size, as_size, height_width
from muralist.core.rng import Purpose, SampleKeys, dropout
from muralist.kernels.fp8 import Fp8Activation
from muralist.kernels.ops import (
    Linear,
    RopeTable,
    adaln_rmsnorm,
    attention,
    gated_residual,
    modulate,
    output_projection,
    qk_norm_rope,
    swiglu,
)
from muralist.models.configs import (
    IMAGE_CHANNELS,
    JIT_CONFIGS,
    MLP_RATIO,
    TIME_FREQUENCIES,
    check_image_size,
    mlp_width,
    parse_jit_name,
)

_PERIOD = 10000.0
_EMBEDDING_STD = 0.02  # of initial weights
_DROPOUT_SITES_PER_BLOCK = 3  # attention weights, attention output, hidden layer of the MLP


class ResidualStream(NamedTuple):
    """The residual stream with the last branch not yet added: the add is fused with the norm of the next layer."""

    tokens: Tensor  # [B, L, D]
    branch: Tensor | None = None  # [B, L, D]
    bias: Tensor | None = None  # already in the branch, see `output_projection`
    gate: Tensor | None = None  # [B, D]

    def add_branch(self) -> Tensor:
        """Return the tokens with the branch added."""
        if self.branch is None or self.gate is None:
            return self.tokens
        return gated_residual(self.tokens, self.branch, self.bias, self.gate)

    def drop_first(self, count: int) -> ResidualStream:
        """Remove the first tokens."""
        branch = None if self.branch is None else self.branch[:, count:]
        return self._replace(tokens=self.tokens[:, count:], branch=branch)

    def norm_modulate(
        self, weight: Tensor, shift: Tensor, scale: Tensor, consumer: nn.Linear
    ) -> tuple[Tensor, Tensor | Fp8Activation]:
        """Return the tokens with the branch added, and the same normalized and modulated for the next layer."""
        if self.branch is None or self.gate is None:
            return self.tokens, modulate(self.tokens, weight, shift, scale)
        return adaln_rmsnorm(self.tokens, self.branch, self.bias, self.gate, weight, shift, scale, consumer)


def build(name: str, img_size: Size, num_classes: int, **options: Any) -> JiT:
    """Build the named network, such as JiT-B/16, on the current default device; `options` are those of JiT."""
    letter, patch = parse_jit_name(name)
    return JiT(img_size, patch, num_classes=num_classes, **asdict(JIT_CONFIGS[letter]), **options)


def sincos_position_embedding(grid: Size, width: int, device: torch.device | str | None = None) -> Tensor:
    """Build the fixed 2-D position embedding, [1, rows * columns, width]: first half columns, second half rows."""
    rows, columns = height_width(grid)
    exponent = torch.arange(width // 4, dtype=torch.float64, device=device) / (width // 4)
    angle = torch.arange(max(rows, columns), dtype=torch.float64, device=device)[:, None] * _PERIOD**-exponent
    axis = torch.cat((angle.sin(), angle.cos()), dim=-1)
    column, row = axis[None, :columns].expand(rows, -1, -1), axis[:rows, None].expand(-1, columns, -1)
    return torch.cat((column, row), dim=-1).reshape(1, rows * columns, width).float()


def rope_table(grid: Size, head_dim: int, context: int, device: torch.device) -> RopeTable:
    """Build the 2-D RoPE table: half of the channel pairs encode rows, half columns; context tokens get angle 0."""
    rows, columns = height_width(grid)
    exponent = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    axis = torch.arange(max(rows, columns), dtype=torch.float32, device=device)[:, None] * (1.0 / _PERIOD**exponent)
    row, column = axis[:rows, None].expand(-1, columns, -1), axis[None, :columns].expand(rows, -1, -1)
    angle = F.pad(torch.cat((row, column), dim=-1).flatten(0, 1), (0, 0, context, 0))
    return angle.cos(), angle.sin()


class PatchConv(nn.Conv2d):
    """A convolution whose stride is its kernel size, computed as a matmul on flattened patches."""

    def forward(self, patches: Tensor) -> Tensor:
        """Transform patches [B, L, C * P * P], ordered (channel, row, column)."""
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbedder(nn.Module):
    """Patches to tokens through a bottleneck, [B, C, H, W] to [B, L, D], row by row."""

    def __init__(self, patch: int, channels: int, bottleneck: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj1 = PatchConv(channels, bottleneck, kernel_size=patch, stride=patch, bias=False)
        self.proj2 = PatchConv(bottleneck, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Embed a batch of images."""
        grid = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, rows, P, columns, P]
        return self.proj2(self.proj1(grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)))


class TimeEmbedder(nn.Module):
    """Embedding of t in [0, 1]: sinusoidal features of the unscaled t, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """Embed times, [B] to [B, D]."""
        half = TIME_FREQUENCIES // 2
        exponent = torch.arange(half, dtype=torch.float32, device=t.device) / half
        angle = t.float()[:, None] * torch.exp(-math.log(_PERIOD) * exponent)
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1))


class LabelEmbedder(nn.Module):
    """Embedding of class labels; the last row is the null label of classifier-free guidance."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        """Embed labels, [B] to [B, D]."""
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Self-attention with QK norm and RoPE."""

    def __init__(self, width: int, heads: int, attn_drop: float, proj_drop: float, site: int) -> None:
        super().__init__()
        self.heads, self.attn_drop, self.proj_drop, self.site = heads, attn_drop, proj_drop, site
        self.q_norm = nn.RMSNorm(width // heads)  # the norms only hold their weights: fused ops compute them
        self.k_norm = nn.RMSNorm(width // heads)
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(self, x: Tensor | Fp8Activation, rope: RopeTable, keys: SampleKeys | None) -> Tensor:
        """Attend among all tokens of each sample, [B, L, D]; the caller applies `proj`."""
        inputs = self.qkv, x, self.q_norm.weight, self.k_norm.weight, rope, self.heads
        if keys is None or self.attn_drop == 0:
            return attention(*inputs)
        # A fused kernel would draw its own dropout mask; ours needs the explicit attention weights.
        q, k, v = qk_norm_rope(*inputs)
        scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, heads, L, L]
        out = dropout(scores.softmax(dim=-1), self.attn_drop, keys, self.site).to(v.dtype) @ v
        return out.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """Gated MLP."""

    def __init__(self, width: int, hidden: int, drop: float, site: int) -> None:
        super().__init__()
        self.drop, self.site = drop, site
        self.w12 = Linear(width, 2 * hidden)
        self.w3 = Linear(hidden, width)

    def forward(self, x: Tensor | Fp8Activation, keys: SampleKeys | None) -> tuple[Tensor, Tensor | None]:
        """Transform each token; returns a branch and its bias (see `output_projection`)."""
        hidden = swiglu(self.w12, x)
        if keys is not None and self.drop > 0:
            original = hidden.original if isinstance(hidden, Fp8Activation) else hidden
            hidden = dropout(original[..., : self.w3.in_features], self.drop, keys, self.site)
        return output_projection(self.w3, hidden)


class Block(nn.Module):
    """Attention and MLP, each with adaLN shift, scale and gate from the condition."""

    is_zero3_leaf = True  # fused ops read weights outside the modules that own them: ZeRO-3 must gather all

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        attn_drop: float,
        proj_drop: float,
        first_site: int,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.norm1 = nn.RMSNorm(width)
        self.attn = Attention(width, heads, attn_drop, proj_drop, first_site)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, mlp_width(width, mlp_ratio), proj_drop, first_site + 2)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(
        self, stream: ResidualStream, condition: Tensor, rope: RopeTable, keys: SampleKeys | None
    ) -> ResidualStream:
        """Apply the block; the next block adds its MLP branch."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return self._forward(stream, condition, rope, keys)

        def run(condition: Tensor, *stream: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(self._forward(ResidualStream(*stream), condition, rope, keys))

        # Tensors as separate arguments, so that autograd frees them after the backward pass. Dropout has no RNG state.
        return ResidualStream(*checkpoint(run, condition, *stream, use_reentrant=False, preserve_rng_state=False))

    def _forward(
        self, stream: ResidualStream, condition: Tensor, rope: RopeTable, keys: SampleKeys | None
    ) -> ResidualStream:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition).chunk(6, dim=-1)
        x, y = stream.norm_modulate(self.norm1.weight, shift1, scale1, self.attn.qkv)
        heads, proj = self.attn(y, rope, keys), self.attn.proj
        if keys is not None and self.attn.proj_drop > 0:
            branch, bias = dropout(proj(heads), self.attn.proj_drop, keys, self.attn.site + 1), None
        else:
            branch, bias = output_projection(proj, heads)
        x, y = adaln_rmsnorm(x, branch, bias, gate1, self.norm2.weight, shift2, scale2, self.mlp.w12)
        branch, bias = self.mlp(y, keys)
        return ResidualStream(x, branch, bias, gate2)


class FinalLayer(nn.Module):
    """Tokens to the pixels of their patches."""

    is_zero3_leaf = True

    def __init__(self, width: int, patch: int, channels: int) -> None:
        super().__init__()
        self.norm_final = nn.RMSNorm(width)
        self.linear = nn.Linear(width, patch * patch * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, stream: ResidualStream, condition: Tensor) -> Tensor:
        """Return the pixels of each token, [B, L, P * P * C], ordered (row, column, channel)."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=-1)
        return self.linear(stream.norm_modulate(self.norm_final.weight, shift, scale, self.linear)[1])


class JiT(nn.Module):
    """Predicts the clean image from a noisy image z, a time t (1 is data, 0 is noise) and a class label.

    Call `init_weights` or `load_state_dict` before use.
    """

    _no_split_modules = ("Block", "FinalLayer")  # units of sharding and compilation, as in transformers

    def __init__(
        self,
        input_size: Size,
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
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_image_size(patch_size, input_size)
        if hidden_size % (4 * num_heads):
            raise ValueError(
                f"hidden_size {hidden_size} with {num_heads} heads: 2-D RoPE needs a head dimension divisible by 4"
            )
        if in_context_len and not 0 <= in_context_start < depth:
            raise ValueError(f"in-context tokens cannot be inserted before block {in_context_start} of {depth}")
        self.patch_size, self.head_dim = patch_size, hidden_size // num_heads
        self.grid = as_size([side // patch_size for side in height_width(input_size)])
        self.in_channels, self.num_classes = in_channels, num_classes
        self.in_context_len, self.in_context_start = in_context_len, in_context_start
        self.has_dropout = attn_drop > 0 or proj_drop > 0

        self.pos_embed = nn.Parameter(sincos_position_embedding(self.grid, hidden_size), requires_grad=False)
        if in_context_len:
            self.in_context_posemb = nn.Parameter(torch.zeros(1, in_context_len, hidden_size))
        self.t_embedder = TimeEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size)
        self.x_embedder = PatchEmbedder(patch_size, in_channels, bottleneck_dim, hidden_size)
        with_dropout = range(depth // 4, depth // 4 * 3)  # the middle half, as in the official code
        self.blocks = nn.ModuleList(
            Block(
                hidden_size,
                num_heads,
                mlp_ratio,
                attn_drop if i in with_dropout else 0.0,
                proj_drop if i in with_dropout else 0.0,
                first_site=_DROPOUT_SITES_PER_BLOCK * i,
                gradient_checkpointing=gradient_checkpointing,
            )
            for i in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, in_channels)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, keys: SampleKeys | None = None) -> Tensor:
        """Predict images from x [B, C, H, W], t [B] and y [B]; in training, dropout masks come from the keys."""
        if not self.training:
            keys = None
        elif self.has_dropout and keys is None:
            raise ValueError("dropout in training requires sample keys")
        label = self.y_embedder(y)  # [B, D]
        condition = self.t_embedder(t) + label
        tokens = self.x_embedder(x)  # [B, L, D]
        # Under autocast the residual stream keeps the dtype of the patch embedding.
        tokens = tokens + self.pos_embed.to(tokens.dtype)
        cos, sin = rope_table(self.grid, self.head_dim, self.in_context_len, tokens.device)
        rope = cos[self.in_context_len :], sin[self.in_context_len :]
        stream = ResidualStream(tokens)
        for i, block in enumerate(self.blocks):
            if self.in_context_len and i == self.in_context_start:
                context = label.unsqueeze(1) + self.in_context_posemb
                stream = ResidualStream(torch.cat((context.to(tokens.dtype), stream.add_branch()), dim=1))
                rope = cos, sin
            stream = block(stream, condition, rope, keys)
        return self._unpatchify(self.final_layer(stream.drop_first(self.in_context_len), condition))

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        """Unpatchify, [B, L, P * P * C] to [B, C, H, W]."""
        patches = tokens.unflatten(-1, (self.patch_size, self.patch_size, self.in_channels))
        return patches.unflatten(1, height_width(self.grid)).permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def use_fp8(self) -> None:
        """Use FP8 matmuls in the large layers of the blocks during training."""
        for layer in self.blocks.modules():
            if isinstance(layer, Linear):
                layer.fp8 = True

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw the initial weights from the official distributions; they depend on the seed alone."""
        for index, (name, parameter) in enumerate(self.named_parameters()):
            if parameter.is_meta:
                raise ValueError("init_weights on the meta device: call to_empty first")
            parameter.copy_(self._initial_value(name, parameter, index, seed))

    def _initial_value(self, name: str, parameter: Tensor, index: int, seed: int) -> Tensor:
        """Return the initial value of a parameter."""
        shape = tuple(parameter.shape)
        if name == "pos_embed":
            return sincos_position_embedding(self.grid, shape[-1], device="cpu")
        if "norm" in name:
            return torch.ones(shape)
        # adaLN-zero: every block starts as the identity and the first prediction is zero.
        if "adaLN_modulation" in name or name.startswith("final_layer.linear") or name.endswith("bias"):
            return torch.zeros(shape)
        if name.startswith(("t_embedder", "y_embedder", "in_context")):
            # On the CPU: log and cos differ in the last bit between devices. These tensors are small.
            return _EMBEDDING_STD * rng.normal(seed, Purpose.INIT, torch.tensor([index], device="cpu"), shape)[0]
        # Xavier uniform over the flattened matrix: exact arithmetic, so any device gives the same values.
        bound = math.sqrt(6.0 / (shape[0] + math.prod(shape[1:])))
        position = torch.tensor([index], device=parameter.device)
        return (2.0 * rng.uniform(seed, Purpose.INIT, position, shape)[0] - 1.0) * bound
