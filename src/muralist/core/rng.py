"""Counter-based random numbers: each is a function of (seed, purpose, sample index), independent of all others.

The generator is Philox4x32-10 (Salmon et al. 2011) written in int64 tensor arithmetic: no state to save, the same
integers on every device, and torch.compile fuses it into the kernel that uses the numbers. The 128-bit counter is
(block of four numbers, purpose, low and high half of the sample index); the 64-bit key is the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_FITS_CACHE = 1 << 16  # numbers per chunk and thread on a CPU, so that intermediates fit the cache of a core


class Purpose(IntEnum):
    """The use of a random number; the values are part of the format: never renumber, only add."""

    TIME = 1
    NOISE = 2
    LABEL_DROP = 3
    FLIP = 4
    CROP = 5
    ORDER = 6
    HELD_OUT = 7
    SAMPLE_NOISE = 8
    SCENE = 9
    LATENT = 10
    CAPTION_DROP = 11
    INIT = 12
    BUCKET = 13
    REPLACEMENT = 14
    COMPARED_NOISE = 15
    COMPARED_TIME = 16
    CRITIC_NOISE = 17
    CRITIC_TIME = 18
    DROPOUT = 1 << 16  # plus a site number: one stream per dropout layer


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; the factor is split so that int64 never overflows."""
    low_product = a * (constant & 0xFFFF)
    high_product = a * (constant >> 16)
    high = (high_product + (low_product >> 16)) >> 16
    low = (low_product + ((high_product & 0xFFFF) << 16)) & _MASK
    return high, low


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten Philox rounds on four broadcastable int64 tensors that hold 32-bit words; returns four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def words(seed: int, purpose: int | Tensor, sample_indices: Tensor, count: int) -> Tensor:
    """Random 32-bit words, [B, count] int64, for B sample indices (int64); a purpose in a tensor is a scalar."""
    # The `& _MASK` keeps 64 bits: Inductor (torch 2.11) compiles arange to 32-bit indices and multiplies them as such,
    # which overflows from 39,886 blocks (231 px) on. The result of a bitwise operation has 64 bits.
    blocks = torch.arange(-(-count // 4), device=sample_indices.device, dtype=torch.int64)[None, :] & _MASK
    low, high = (sample_indices & _MASK)[:, None], ((sample_indices >> 32) & _MASK)[:, None]
    stream = purpose[None, None] if isinstance(purpose, Tensor) else torch.full_like(blocks, int(purpose))
    counter = torch.broadcast_tensors(blocks, stream, low, high)
    out = torch.stack(philox4x32((counter[0], counter[1], counter[2], counter[3]), seed), dim=-1)
    return out.flatten(1)[:, :count]


def _unit(word: Tensor) -> Tensor:
    """Map 32-bit words to float32 in the open interval (0, 1): 23 bits plus half a step, so log() is always finite.

    All these values are exact in float32; with 24 bits the largest would round to 1.
    """
    return (word >> 9).to(torch.float32) * 2.0**-23 + 2.0**-24


def uniform(seed: int, purpose: int | Tensor, sample_indices: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """Uniform float32 in (0, 1), [B, *shape]."""
    return _unit(words(seed, purpose, sample_indices, math.prod(shape))).view(len(sample_indices), *shape)


def normal(seed: int, purpose: int, sample_indices: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    """Standard normal float32, [B, *shape], by Box-Muller on pairs of words."""
    count = math.prod(shape)
    pairs = words(seed, purpose, sample_indices, 2 * (-(-count // 2))).view(len(sample_indices), -1, 2)
    radius = torch.sqrt(-2.0 * torch.log(_unit(pairs[..., 0])))
    angle = (2.0 * math.pi) * _unit(pairs[..., 1])
    both = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return both.flatten(1)[:, :count].view(len(sample_indices), *shape)


def normal_chunked(seed: int, purpose: int, sample_indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same values, computed in chunks of samples: seven times as fast on a CPU, because intermediates fit its cache."""
    numbers = _FITS_CACHE * torch.get_num_threads()
    parts = sample_indices.split(max(1, numbers // max(1, math.prod(shape))))
    return torch.cat([normal(seed, purpose, part, shape) for part in parts])


@dataclass(frozen=True)
class SampleKeys:
    """The key of all randomness of a batch: the seed of the run and the index of each sample in the global stream."""

    seed: int
    sample_indices: Tensor  # [B] int64

    def uniform(self, purpose: int | Tensor, shape: tuple[int, ...] = ()) -> Tensor:
        """Uniform float32 in (0, 1), one block of numbers per sample."""
        return uniform(self.seed, purpose, self.sample_indices, shape)

    def normal(self, purpose: int, shape: tuple[int, ...] = ()) -> Tensor:
        """Standard normal float32, one block of numbers per sample."""
        return normal(self.seed, purpose, self.sample_indices, shape)


def dropout(x: Tensor, probability: float, keys: SampleKeys | None, site: int | Tensor) -> Tensor:
    """Dropout whose mask is a function of the sample's key and the site in the network; without keys, the identity."""
    if keys is None or probability == 0:
        return x
    keep = keys.uniform(Purpose.DROPOUT + site, tuple(x.shape[1:])) >= probability
    return x * (keep.to(x.dtype) / (1 - probability))
