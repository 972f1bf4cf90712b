"""A video's autoencoder on one frame: the frames before it, which its convolutions look at, are all zero.

A convolution over three frames of which two are zero is one over a plane with the last third of its weights: the same
sums without the zeros, in a third of the work and with the fast kernels that planes have.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, WanCausalConv3d
from torch import Tensor
from torch.nn import functional


def decode_frames_as_planes(vae: Any) -> None:
    """Let Wan's autoencoder decode single frames the short way; others, and clips, are left as they are."""
    if not isinstance(vae, AutoencoderKLWan):
        return
    for part in (vae.decoder, vae.post_quant_conv):
        for module in part.modules():
            if isinstance(module, WanCausalConv3d):
                module.forward = functools.partial(_convolved, module)  # type: ignore[method-assign]
    vae._decode = functools.partial(_decoded, vae, vae._decode)


def _convolved(layer: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    first, last, top, bottom, before, _ = layer._padding
    alone = x.shape[2] == 1 and cache_x is None and layer.kernel_size[0] == before + 1
    if not alone or (first, top) != (last, bottom) or layer.stride != (1, 1, 1):
        return type(layer).forward(layer, x, cache_x)
    plane = functional.conv2d(x[:, :, 0], layer.weight[:, :, -1], layer.bias, padding=(top, first))
    return plane.unsqueeze(2)


def _decoded(vae: Any, decode: Any, latents: Tensor, return_dict: bool = True) -> Any:
    if latents.shape[2] != 1 or vae.use_tiling or vae.config.patch_size is not None:
        return decode(latents, return_dict=return_dict)
    # Without a memory for the frames to come, which would be copies of everything.
    from diffusers.models.autoencoders.vae import DecoderOutput

    pixels = torch.clamp(vae.decoder(vae.post_quant_conv(latents), first_chunk=True), -1.0, 1.0)
    return DecoderOutput(sample=pixels) if return_dict else (pixels,)
