"""JiT's named configurations with parameter counts, FLOPs and memory; facts about HunyuanDiT. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muralist.core.errors import UserError, closest_match
from muralist.core.image_size import Size, height_width

IMAGE_CHANNELS = 3
TIME_FREQUENCIES = 256
MLP_RATIO = 4.0
JIT_GUIDANCE = 2.9
"""The paper's scale of classifier-free guidance."""

HUNYUAN_BETA_START = 0.00085
HUNYUAN_BETA_END = {"1.1": 0.03, "1.2": 0.018}
"""The noise schedule of HunyuanDiT by version: betas are the squares of a linear ramp."""
HUNYUAN_LAYERS = {
    "Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "q_proj": ("attn2.to_q",),
    "kv_proj": ("attn2.to_k", "attn2.to_v"),
    "out_proj": ("to_out.0",),
}
"""Attention layers of the official HunyuanDiT, and the layers of diffusers' network that each is split into."""


@dataclass(frozen=True)
class JiTConfig:
    """The sizes that a letter such as B stands for, named like the network's arguments."""

    hidden_size: int
    depth: int
    num_heads: int
    bottleneck_dim: int
    in_context_len: int
    in_context_start: int

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads


# B, L, H and G are the paper's; T and S are ours, for tests and the demo.
JIT_CONFIGS = {
    "T": JiTConfig(128, 6, 4, 32, 4, 2),
    "S": JiTConfig(384, 12, 6, 64, 16, 4),
    "B": JiTConfig(768, 12, 12, 128, 32, 4),
    "L": JiTConfig(1024, 24, 16, 128, 32, 8),
    "H": JiTConfig(1280, 32, 16, 256, 32, 10),
    "G": JiTConfig(1664, 40, 16, 256, 32, 10),
}


def is_jit_name(name: str) -> bool:
    """Return whether a name is JiT-<config>/<patch size>."""
    match = re.fullmatch(r"JiT-([A-Z])/[1-9]\d*", name)
    return match is not None and match[1] in JIT_CONFIGS


def parse_jit_name(name: str) -> tuple[str, int]:
    """Split a name such as JiT-B/4 into the configuration's letter and the patch size."""
    if not is_jit_name(name):
        raise unknown_model(name, [f"JiT-<config>/<patch size> with one of {', '.join(JIT_CONFIGS)}"])
    letter, patch = name.removeprefix("JiT-").split("/")
    return letter, int(patch)


def unknown_model(name: str, patterns: Sequence[str]) -> UserError:
    """Return the error for a model name of no family, with the nearest JiT name as a suggestion."""
    known = [f"JiT-{letter}/{patch}" for letter in JIT_CONFIGS for patch in (2, 4, 8, 16, 32, 64)]
    # Upper case first: for "jit-b/4" every letter would otherwise be equally near.
    guess = closest_match(name.upper().replace("JIT", "JiT"), known)
    pipeline = f"A pipeline is named by its folder or its id on the Hugging Face Hub: --model.path {name}"
    return UserError(
        f"There is no model named {name}.",
        f"A model name is {', or '.join(patterns)}.",
        guess or (pipeline if "/" in name else "An example is JiT-B/16."),
    )


def check_image_size(patch: int, img_size: Size) -> None:
    """Refuse an image size that the patches do not divide."""
    if all(side >= patch and side % patch == 0 for side in height_width(img_size)):
        return
    shown = " x ".join(map(str, dict.fromkeys(height_width(img_size))))
    raise UserError(
        f"Images of {shown} pixels cannot be divided into patches of {patch}.",
        fix=f"Use an image size that is a multiple of {patch}, or a patch size that divides {shown}.",
    )


def mlp_width(hidden_size: int, mlp_ratio: float = MLP_RATIO) -> int:
    """Hidden width of the SwiGLU layer: two thirds of the usual, because it has three matrices instead of two."""
    return int(int(hidden_size * mlp_ratio) * 2 / 3)


def tokens_per_image(patch: int, img_size: Size) -> int:
    """Image tokens per image, without the in-context tokens."""
    height, width = height_width(img_size)
    return (height // patch) * (width // patch)


def parameter_count(letter: str, patch: int, num_classes: int) -> int:
    """Trainable parameters, so without the fixed position embedding."""
    config = JIT_CONFIGS[letter]
    d, mlp, patch_dim = config.hidden_size, mlp_width(config.hidden_size), IMAGE_CHANNELS * patch**2
    embedders = (
        (TIME_FREQUENCIES * d + d)
        + (d * d + d)
        + (num_classes + 1) * d
        + patch_dim * config.bottleneck_dim
        + (config.bottleneck_dim * d + d)
        + config.in_context_len * d
    )
    attention = (3 * d * d + 3 * d) + (d * d + d) + 2 * config.head_dim
    feed_forward = (2 * d * mlp + 2 * mlp) + (mlp * d + d)
    block = 2 * d + attention + feed_forward + (6 * d * d + 6 * d)
    final = d + (d * patch_dim + patch_dim) + (2 * d * d + 2 * d)
    return embedders + config.depth * block + final


def forward_flops(letter: str, patch: int, img_size: Size) -> int:
    """FLOPs of one forward pass on one image, a multiply-add being two; training takes three times as many."""
    config = JIT_CONFIGS[letter]
    d, patch_dim, tokens = config.hidden_size, IMAGE_CHANNELS * patch**2, tokens_per_image(patch, img_size)
    with_context = tokens + config.in_context_len
    short_blocks, long_blocks = config.in_context_start, config.depth - config.in_context_start
    positions = short_blocks * tokens + long_blocks * with_context
    multiply_adds = (
        tokens * (patch_dim * config.bottleneck_dim + config.bottleneck_dim * d)
        + (TIME_FREQUENCIES * d + d * d)
        + (6 * config.depth + 2) * d * d
        + positions * (4 * d * d + 3 * d * mlp_width(d))
        + (short_blocks * tokens**2 + long_blocks * with_context**2) * 2 * d
        + tokens * d * patch_dim
    )
    return 2 * multiply_adds


# Bytes saved for the backward pass per channel, token and block. Not compiled: counted as autograd saves them
# (tests/train/test_memory.py). Compiled: bf16 from a measured peak (bench/results/cifar10_jit_s2_h200.json), fp32 in
# the same proportion.
_SAVED = {("eager", "fp32"): 120.0, ("eager", "bf16"): 81.0, ("compiled", "bf16"): 45.0, ("compiled", "fp32"): 67.0}
# With gradient checkpointing: each block's inputs (tokens and a branch), and what is saved before and after the blocks.
_BLOCK_INPUTS, _OUTSIDE = {"fp32": 8.0, "bf16": 4.0}, {"fp32": 19.0, "bf16": 14.0}


def activation_bytes(
    name: str, img_size: Size, bf16: bool, compiled: bool, gradient_checkpointing: bool = False
) -> float:
    """Bytes that one image keeps for the backward pass of a JiT."""
    letter, patch = parse_jit_name(name)
    config, tokens = JIT_CONFIGS[letter], tokens_per_image(patch, img_size)
    positions = config.depth * tokens + (config.depth - config.in_context_start) * config.in_context_len
    precision = "bf16" if bf16 else "fp32"
    saved = _SAVED["compiled" if compiled else "eager", precision]
    if gradient_checkpointing:
        outside = _OUTSIDE[precision] * tokens
        one_block = saved * (tokens + config.in_context_len)
        return (_BLOCK_INPUTS[precision] * positions + outside + one_block) * config.hidden_size
    return saved * positions * config.hidden_size
