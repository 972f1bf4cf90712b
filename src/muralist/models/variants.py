"""The JiT variants: names, sizes, parameter counts and FLOPs, without torch, which settings must not wait for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muralist.errors import UserError, nearest

IMAGE_CHANNELS = 3
TIME_FREQUENCIES = 256
MLP_RATIO = 4.0
COMMON_PATCHES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Variant:
    """The sizes that a variant's letter stands for, named like the network's arguments."""

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
VARIANTS = {
    "T": Variant(128, 6, 4, 32, 4, 2),
    "S": Variant(384, 12, 6, 64, 16, 4),
    "B": Variant(768, 12, 12, 128, 32, 4),
    "L": Variant(1024, 24, 16, 128, 32, 8),
    "H": Variant(1280, 32, 16, 256, 32, 10),
    "G": Variant(1664, 40, 16, 256, 32, 10),
}


def parse_name(name: str) -> tuple[str, int]:
    """Split a name such as JiT-B/4 into the variant's letter and the patch size."""
    match = re.fullmatch(r"JiT-([A-Z])/([1-9]\d*)", name)
    if match is None or match[1] not in VARIANTS:
        # Upper case first: for "jit-b/4" every letter of the family would otherwise be equally near.
        guess = nearest(name.upper().replace("JIT", "JiT"), [f"JiT-{v}/{p}" for v in VARIANTS for p in COMMON_PATCHES])
        raise UserError(
            f"There is no model named {name}.",
            f"A name is JiT-<variant>/<patch size>, with a variant out of {', '.join(VARIANTS)}; or HunyuanDiT.",
            guess or "An example is JiT-B/16.",
        )
    return match[1], int(match[2])


def check_image_size(patch: int, img_size: int) -> None:
    """Refuse an image size that whole patches do not cover."""
    if img_size >= patch and img_size % patch == 0:
        return
    patches = [str(p) for p in COMMON_PATCHES if p <= img_size and img_size % p == 0]
    below = img_size // patch * patch
    sizes = f"{below} or {below + patch}" if below else str(patch)
    smaller = f" or a patch size of {', '.join(patches)}" if patches else ""
    raise UserError(
        f"Images of {img_size} pixels cannot be cut into patches of {patch}.",
        fix=f"Use an image size of {sizes} with this patch size{smaller}.",
    )


def mlp_width(hidden_size: int, mlp_ratio: float = MLP_RATIO) -> int:
    """Hidden width of the SwiGLU layer: two thirds of the usual, because it has three matrices instead of two."""
    return int(int(hidden_size * mlp_ratio) * 2 / 3)


def tokens_per_image(patch: int, img_size: int) -> int:
    """Image tokens of one picture, without the in-context tokens."""
    return (img_size // patch) ** 2


def parameter_count(variant: str, patch: int, num_classes: int) -> int:
    """Trainable parameters; the fixed position table is not among them."""
    v = VARIANTS[variant]
    d, mlp, patch_dim = v.hidden_size, mlp_width(v.hidden_size), IMAGE_CHANNELS * patch**2
    embedders = (
        (TIME_FREQUENCIES * d + d)
        + (d * d + d)
        + (num_classes + 1) * d
        + patch_dim * v.bottleneck_dim
        + (v.bottleneck_dim * d + d)
        + v.in_context_len * d
    )
    attention = (3 * d * d + 3 * d) + (d * d + d) + 2 * v.head_dim
    feed_forward = (2 * d * mlp + 2 * mlp) + (mlp * d + d)
    block = 2 * d + attention + feed_forward + (6 * d * d + 6 * d)
    final = d + (d * patch_dim + patch_dim) + (2 * d * d + 2 * d)
    return embedders + v.depth * block + final


def forward_flops(variant: str, patch: int, img_size: int) -> int:
    """Operations of one forward pass on one image, a multiply-add being two; training takes three times as many."""
    v = VARIANTS[variant]
    d, patch_dim, tokens = v.hidden_size, IMAGE_CHANNELS * patch**2, tokens_per_image(patch, img_size)
    longer = tokens + v.in_context_len
    short_blocks, long_blocks = v.in_context_start, v.depth - v.in_context_start
    positions = short_blocks * tokens + long_blocks * longer
    multiply_adds = (
        tokens * (patch_dim * v.bottleneck_dim + v.bottleneck_dim * d)
        + (TIME_FREQUENCIES * d + d * d)
        + (6 * v.depth + 2) * d * d
        + positions * (4 * d * d + 3 * d * mlp_width(d))
        + (short_blocks * tokens**2 + long_blocks * longer**2) * 2 * d
        + tokens * d * patch_dim
    )
    return 2 * multiply_adds


def is_hunyuan(name: str) -> bool:
    """Whether a model name is of the other family."""
    return name.casefold() == "hunyuandit"


def square(img_size: int | tuple[int, int]) -> int:
    """The side of a square picture; JiT knows no other."""
    if isinstance(img_size, tuple):
        raise UserError(
            f"JiT makes square pictures, not {img_size[0]} x {img_size[1]}.", fix="Give one number as --img_size."
        )
    return img_size


HUNYUAN_PIXELS_PER_TOKEN = 16  # the VAE's factor of 8, and patches of 2


def check_hunyuan_size(size: tuple[int, int]) -> None:
    """Refuse a picture that whole tokens do not cover."""
    height, width = size
    if height % HUNYUAN_PIXELS_PER_TOKEN or width % HUNYUAN_PIXELS_PER_TOKEN:
        raise UserError(
            f"HunyuanDiT cannot make pictures of {height} x {width} pixels.",
            f"Both sides must be multiples of {HUNYUAN_PIXELS_PER_TOKEN}.",
        )
