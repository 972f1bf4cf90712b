"""Every place that replaces or reads a part of diffusers or transformers that is not public API.

Written for diffusers 0.42.1, transformers 5.22 and torch 2.11 to 2.13. `tests/generate/test_diffusers_patches.py`
fails, patch by patch, when another version changes the patched code; pyproject.toml has upper bounds.

Public methods that are wrapped on one pipeline's instances are elsewhere: the scheduler's `set_timesteps` and `step`
and the denoiser's `forward` in denoising.py, `encode_prompt`, the tokenizers' `__call__`, the text encoders' `forward`
and `vae.decode` in diffusers_pipeline.py, and `HunyuanDiT2DModel.forward`, for the official RoPE, in
models/hunyuan_dit.py.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, WanCausalConv3d
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from diffusers.utils import torch_utils
from torch import Tensor, nn
from torch.nn import functional

from muralist.core.hardware import copy_to_device

_RANDN = "randn_tensor"
_ENCODER_METHOD = re.compile(r"_get_\w+_prompt_embeds")
_CACHED_TEXTS = 2  # the prompt and the negative prompt
_MASK_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_IS_TRACING = "is_tracing"
# In addition to the blocks that the network itself lists.
_MORE_REPEATED_BLOCKS = {"UNet2DConditionModel": ("ResnetBlock2D",)}


@contextmanager
def per_sample_noise(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw each image's noise from its own CPU generator in float32, wherever diffusers draws noise.

    Replaces `randn_tensor` in every diffusers module that imported it. Public API: `generator=` draws in the model's
    precision, where the same seed gives other noise; `latents=` needs each pipeline's own layout and does not reach
    schedulers, some of which never receive the generators.
    """
    original = getattr(torch_utils, _RANDN)

    def randn_tensor(
        shape: Sequence[int],
        generator: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
    ) -> Tensor:
        given = generator if isinstance(generator, list) else list(generators) if generator is None else [generator]
        if len(given) != shape[0]:
            return original(shape, generator=generator, device=device, dtype=dtype, layout=layout)
        rows = [torch.randn((1, *shape[1:]), generator=each, dtype=torch.float32) for each in given]
        return copy_to_device(torch.cat(rows), device, dtype)

    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "diffusers"]
    # Looked up in their dictionaries: getattr on a lazy module would import the submodule.
    modules = [module for module in modules if vars(module).get(_RANDN) is original]
    for module in modules:
        setattr(module, _RANDN, randn_tensor)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _RANDN, original)


def cache_text_embeddings(pipe: Any) -> Callable[[], None]:
    """Cache the last two results of each text encoder, because most tables repeat one negative prompt; return a reset.

    Wraps `_get_*_prompt_embeds`. Public API: `encode_prompt` encodes prompt and negative prompt in one call, and the
    place of the negative half in its result differs from pipeline to pipeline. Without the cache, half of all passes of
    the text encoders are repeats.
    """
    caches: list[dict[str, Any]] = []
    for name in filter(_ENCODER_METHOD.fullmatch, dir(type(pipe))):
        caches.append({})
        setattr(pipe, name, _with_cache(getattr(pipe, name), caches[-1]))

    def reset() -> None:
        for cache in caches:
            cache.clear()

    return reset


def _with_cache(encode: Callable[..., Any], cache: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(encode)
    def cached(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))  # texts, numbers, devices and dtypes
        result = cache.pop(key) if key in cache else encode(*args, **kwargs)
        cache[key] = result
        if len(cache) > _CACHED_TEXTS:
            del cache[next(iter(cache))]
        return result

    return cached


@contextmanager
def forced_attention_mask(forced: bool) -> Iterator[None]:
    """Build a text encoder's attention mask even where it masks nothing, as during CUDA graph capture.

    Replaces `is_tracing` in transformers' mask modules. Public API: none. transformers skips the mask when a prompt
    fills all its tokens, which reads the mask back from the GPU and selects other attention kernels. A capture can do
    neither, so an embedding's last bits would depend on whether a CUDA graph exists.
    """
    loaded = (sys.modules.get(name) for name in _MASK_MODULES)
    modules = [module for module in loaded if forced and hasattr(module, _IS_TRACING)]
    originals = [getattr(module, _IS_TRACING) for module in modules]
    for module in modules:
        setattr(module, _IS_TRACING, lambda tensor=None: True)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, _IS_TRACING, original)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """List the blocks that a denoiser is made of.

    Reads `_repeated_blocks`. Public API: `compile_repeated_blocks` compiles the same blocks, but does not return them
    for FP8, raises for networks without the attribute (SD3, PixArt, Sana, HunyuanDiT), and omits the ResNet blocks of a
    U-Net.
    """
    own: Sequence[str] = getattr(network, "_repeated_blocks", None) or ()
    names = {*own, *_MORE_REPEATED_BLOCKS.get(type(network).__name__, ())}
    if not names:
        lists = [child for child in network.children() if isinstance(child, nn.ModuleList)]
        names = {type(block).__name__ for block in max(lists, key=len, default=())}
    return [module for module in network.modules() if type(module).__name__ in names]


def decode_single_frames_in_2d(vae: Any) -> None:
    """Let Wan's VAE decode single frames with 2D convolutions; clips and other VAEs stay as they are.

    Replaces `AutoencoderKLWan._decode` and `WanCausalConv3d.forward` on this instance. Public API: none; `vae.decode`
    pads one frame with two zero frames and keeps a cache for frames that never come. A causal convolution over two zero
    frames and an image is a 2D convolution with the last slice of the weights: the same sums in a third of the work.
    """
    if not isinstance(vae, AutoencoderKLWan):
        return
    for part in (vae.decoder, vae.post_quant_conv):
        for module in part.modules():
            if isinstance(module, WanCausalConv3d):
                module.forward = functools.partial(_convolve, module)  # type: ignore[method-assign]
    vae._decode = functools.partial(_decode, vae, vae._decode)


def _convolve(layer: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    left, right, top, bottom, before, _ = layer._padding
    single = x.shape[2] == 1 and cache_x is None and layer.kernel_size[0] == before + 1
    if not single or (left, top) != (right, bottom) or layer.stride != (1, 1, 1):
        return type(layer).forward(layer, x, cache_x)
    plane = functional.conv2d(x[:, :, 0], layer.weight[:, :, -1], layer.bias, padding=(top, left))
    return plane.unsqueeze(2)


def _decode(vae: Any, decode: Any, latents: Tensor, return_dict: bool = True) -> Any:
    if latents.shape[2] != 1 or vae.use_tiling or vae.config.patch_size is not None:
        return decode(latents, return_dict=return_dict)
    # No cache for the following frames, which would be a copy of every activation.
    pixels = torch.clamp(vae.decoder(vae.post_quant_conv(latents), first_chunk=True), -1.0, 1.0)
    return DecoderOutput(sample=pixels) if return_dict else (pixels,)


@torch.library.custom_op("muralist::wan_qk_norm_rope", mutates_args=())
def wan_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """RMS norm over all heads of queries and keys [B, tokens, width], then RoPE: [B, tokens, heads, head_dim].

    Cosines and sines are diffusers': [..., tokens, 1, head_dim], every value twice.
    """
    if q.is_cuda:
        from muralist.kernels import qk_norm_rope

        return qk_norm_rope.qk_norm_rope_wan(q, k, q_weight, k_weight, epsilon, cos, sin, heads)
    rotated = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = functional.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), epsilon)
        even, odd = normed.unflatten(-1, (heads, -1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        rotated.append(torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype))
    return rotated[0], rotated[1]


@wan_qk_norm_rope.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, epsilon: float, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], heads, q.shape[-1] // heads)
    return q.new_empty(shape), k.new_empty(shape)


class FusedWanAttnProcessor(WanAttnProcessor):
    """Wan's self-attention with QK norm and RoPE in one kernel.

    Installed by the public `set_processor`. Reads `_attention_backend` and `_parallel_config`, which
    `set_attention_backend` and context parallelism write, and repeats the projections of `WanAttnProcessor.__call__`.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend; everything but unmasked self-attention is left to diffusers."""
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        q, k = wan_qk_norm_rope(
            attn.to_q(hidden_states), attn.to_k(hidden_states), attn.norm_q.weight, attn.norm_k.weight,
            attn.norm_q.eps, *rotary_emb, attn.heads,
        )  # fmt: skip
        v = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))
        out = dispatch_attention_fn(q, k, v, backend=self._attention_backend, parallel_config=self._parallel_config)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def fuse_qk_norm_rope(network: nn.Module) -> int:
    """Use `FusedWanAttnProcessor` in every self-attention layer of Wan; return the number of layers."""
    layers: list[Any] = [layer for layer in network.modules() if type(layer) is WanAttention and _is_fusible(layer)]
    for layer in layers:
        layer.set_processor(FusedWanAttnProcessor())
    return len(layers)


def _is_fusible(layer: Any) -> bool:
    plain = not layer.is_cross_attention and layer.add_k_proj is None and not getattr(layer, "fused_projections", False)
    return plain and type(layer.processor) is WanAttnProcessor and layer.norm_q.eps == layer.norm_k.eps


@torch.library.custom_op("muralist::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x W^T + b) by the tanh approximation, as one GEMM with a fused epilogue; opaque to torch.compile."""
    if not x.is_cuda:
        return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
    rows = x.reshape(-1, x.shape[-1])
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True).view(*x.shape[:-1], len(weight))


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


class LinearGelu(nn.Module):
    """diffusers' GELU layer by `linear_gelu`; a class, because a forward replaced per instance is traced per block."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """GELU(x W^T + b)."""
        return linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


def fuse_linear_gelu(network: nn.Module) -> int:
    """Replace diffusers' tanh GELU layers by `LinearGelu`; return the number of layers.

    Reads `GELU.proj` and `GELU.approximate`. Public API: none for a feed-forward layer's activation.
    """
    fused = 0
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not GELU or layer.approximate != "tanh" or type(layer.proj) is not nn.Linear:
                continue
            if layer.proj.bias is not None:
                setattr(parent, name, LinearGelu(layer.proj))
                fused += 1
    return fused
