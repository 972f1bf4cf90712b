"""How each pipeline class is trained, written by hand from the papers and diffusers' training scripts, one image at a time.

Nothing here watches a pipeline: packing, normalization, arguments, signs and timesteps are spelled out per class. The
empty caption, which dropped captions become, is what the class guides its samples away from.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE = 64

# What published models of a class have and the tiny ones lack: constants that a wrong normalization would ignore.
_FLUX_VAE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
            "max_image_seq_len": 4096}  # fmt: skip
_ZERO_SNR = {"beta_start": 0.00085, "beta_end": 0.012, "prediction_type": "v_prediction", "snr_shift_scale": 3.0,
             "rescale_betas_zero_snr": True}  # fmt: skip
_MEAN, _STD = [-0.7, 0.3, 0.1, 1.2], [2.8, 1.5, 0.6, 3.1]
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "sdxl": {"vae": {"scaling_factor": 0.13025}},
    "sd3": {"vae": {"scaling_factor": 1.5305, "shift_factor": 0.0609}, "scheduler": {"shift": 3.0}},
    "flux": {"vae": _FLUX_VAE, "scheduler": _DYNAMIC},
    "schnell": {"vae": _FLUX_VAE},
    "chroma": {"vae": _FLUX_VAE},
    "zimage": {"vae": _FLUX_VAE, "scheduler": {"shift": 6.0}},
    "lumina2": {"vae": _FLUX_VAE, "scheduler": {"shift": 6.0}},
    "sana": {"vae": {"scaling_factor": 0.41407}, "scheduler": {"flow_shift": 3.0}},
    "qwenimage": {"vae": {"latents_mean": _MEAN, "latents_std": _STD}, "scheduler": _DYNAMIC | {"max_shift": 0.9}},
    "auraflow": {"vae": {"scaling_factor": 0.13025}, "scheduler": {"shift": 1.73}},
    "cogview3": {"scheduler": _ZERO_SNR},
    "cogview4": {"scheduler": {"base_shift": 0.25, "max_shift": 0.75}},
    "klein": {"scheduler": _DYNAMIC},
    "ltx": {"scheduler": _DYNAMIC | {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024}},
    "cogvideox": {"vae": {"scaling_factor": 1.15258426}, "scheduler": _ZERO_SNR},
    "hunyuanvideo": {"scheduler": {"shift": 7.0}},
    "flux2": {"scheduler": _DYNAMIC},
    "krea2": {"vae": {"latents_mean": _MEAN, "latents_std": _STD}},
}
_BATCH_NORM = ("bn.running_mean", "bn.running_var")
_LTX = ("latents_mean", "latents_std")
_STATISTICS = {"ltx": _LTX, "ltx_condition": _LTX, "klein": _BATCH_NORM, "flux2": _BATCH_NORM, "ernie": _BATCH_NORM}


def publish(name: str, folder: Path) -> Path:
    """Give a tiny pipeline the constants of published models."""
    for part, changes in PUBLISHED.get(name, {}).items():
        file = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if name in _STATISTICS:
        file = folder / "vae" / "diffusion_pytorch_model.safetensors"
        weights, (mean, spread) = load_file(file), _STATISTICS[name]
        weights[mean] = torch.linspace(-1.0, 1.0, len(weights[mean]))
        weights[spread] = torch.linspace(0.5, 2.0, len(weights[spread]))
        save_file(weights, file, {"format": "pt"})
    return folder


# Latents of the VAE [1, C, (1,) H, W] to those that are trained on


def _scaled(vae: Any, z: Tensor) -> Tensor:
    return (z - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor


def _standardized(vae: Any, z: Tensor) -> Tensor:
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (z - mean) / std


def _patches(x: Tensor) -> Tensor:
    """Pack 2 x 2 patches as Flux does: [1, C, H, W] -> [1, H/2 * W/2, C * 4]."""
    _, c, h, w = x.shape
    return torch.einsum("bchiwj->bhwcij", x.reshape(1, c, h // 2, 2, w // 2, 2)).reshape(1, h * w // 4, c * 4)


def _flux_latents(vae: Any, z: Tensor) -> Tensor:
    return _patches(_scaled(vae, z))


def _qwen_latents(vae: Any, z: Tensor) -> Tensor:
    return _patches(_standardized(vae, z)[:, :, 0])


def _ltx_latents(vae: Any, z: Tensor) -> Tensor:
    mean, std = (value.view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std))
    return ((z - mean) * vae.config.scaling_factor / std).flatten(2).mT


def _klein_latents(vae: Any, z: Tensor) -> Tensor:
    return (_patches(z) - vae.bn.running_mean) / torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)


def _frames_first(vae: Any, z: Tensor) -> Tensor:
    return (z * vae.config.scaling_factor).transpose(1, 2)


# Predictions for noisy latents at a timestep between 0 and 1000


def _sd(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    return pipe.unet(x, t, pipe.encode_prompt(caption, "cpu", 1, False)[0])[0]


def _lcm(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    half = pipe.unet.config.time_cond_proj_dim // 2
    guidance = torch.cat([torch.zeros(1, half), torch.ones(1, half)], dim=1)  # sine and cosine of 0: no guidance
    return pipe.unet(x, t, pipe.encode_prompt(caption, "cpu", 1, False)[0], timestep_cond=guidance)[0]


def _sdxl(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _, pooled, _ = pipe.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)
    if not caption:
        text, pooled = torch.zeros_like(text), torch.zeros_like(pooled)
    sizes = torch.tensor([[SIZE, SIZE, 0, 0, SIZE, SIZE]], dtype=torch.float32)  # original, crop, target
    return pipe.unet(x, t, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes})[0]


def _sd3(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _, pooled, _ = pipe.encode_prompt(caption, None, None, device="cpu", do_classifier_free_guidance=False)
    return pipe.transformer(x, text, pooled, t)[0]


def _positions(side: int) -> Tensor:
    """Rows and columns of the tokens of a square image: [side * side, 3]."""
    ids = torch.zeros(side, side, 3)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None, :]
    return ids.view(-1, 3)


def _flux(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, pooled, text_ids = pipe.encode_prompt(caption, caption, device="cpu", max_sequence_length=512)
    guidance = torch.ones(1) if pipe.transformer.config.guidance_embeds else None
    return pipe.transformer(
        x, text, pooled, t / 1000, _positions(math.isqrt(x.shape[1])), text_ids, guidance=guidance
    )[0]  # fmt: skip


def _chroma(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, text_ids, mask, *_ = pipe.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)
    mask = torch.cat([mask, torch.ones(1, x.shape[1], dtype=torch.bool)], dim=1)
    ids = _positions(math.isqrt(x.shape[1]))
    return pipe.transformer(x, text, t / 1000, img_ids=ids, txt_ids=text_ids, attention_mask=mask)[0]


def _klein(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, text_ids = pipe.encode_prompt(caption, device="cpu")
    ids = torch.nn.functional.pad(_positions(math.isqrt(x.shape[1])), (0, 1))[None]  # frame, row, column, layer
    return pipe.transformer(
        hidden_states=x, encoder_hidden_states=text, timestep=t / 1000, img_ids=ids.long(), txt_ids=text_ids
    )[0]


def _pixart(pipe: Any, x: Tensor, t: Tensor, caption: str, length: int = 300) -> Tensor:
    text, mask, *_ = pipe.encode_prompt(caption, False, device="cpu", max_sequence_length=length)
    sizes = {"resolution": None, "aspect_ratio": None}
    output = pipe.transformer(x, text, t, encoder_attention_mask=mask, added_cond_kwargs=sizes)[0]
    return output.chunk(2, dim=1)[0]  # the other half is the variance


def _pixart_alpha(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    return _pixart(pipe, x, t, caption, 120)


def _hunyuan(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    def encode(index: int, length: int) -> tuple[Tensor, Tensor]:
        embeds, _, mask, _ = pipe.encode_prompt(
            caption, "cpu", torch.float32, 1, False, max_sequence_length=length, text_encoder_index=index
        )
        return embeds, mask

    (clip, clip_mask), (t5, t5_mask) = encode(0, 77), encode(1, 256)
    grid, base = SIZE // 16, 32  # tokens per side; the positions of a square image span those of 512 pixels
    rope = get_2d_rotary_pos_embed(16, ((0, 0), (base, base)), (grid, grid), output_type="pt")
    sizes = torch.tensor([[1024, 1024, SIZE, SIZE, 0, 0]], dtype=torch.float32)
    output = pipe.transformer(
        x, t, clip, clip_mask, t5, t5_mask, image_meta_size=sizes, style=torch.tensor([0]), image_rotary_emb=rope
    )[0]
    return output.chunk(2, dim=1)[0]


def _sana_text(pipe: Any, caption: str) -> tuple[Tensor, Tensor]:
    words = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
    text, mask, *_ = pipe.encode_prompt(
        caption, False, device="cpu", complex_human_instruction=words if caption else None
    )
    return text, mask


def _sana(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask = _sana_text(pipe, caption)
    return pipe.transformer(x, text, t * pipe.transformer.config.timestep_scale, encoder_attention_mask=mask)[0]


def _wan(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _ = pipe.encode_prompt(caption, None, False, max_sequence_length=512, device="cpu")
    return pipe.transformer(x, t, text)[0]


def _zimage(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _ = pipe.encode_prompt([caption], device="cpu", do_classifier_free_guidance=False)
    return -pipe.transformer([x[0].unsqueeze(1)], 1 - t / 1000, text)[0][0].squeeze(1)[None]  # 1 is data, towards it


def _qwenimage(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask = pipe.encode_prompt(caption or " ", device="cpu", max_sequence_length=512)
    side = math.isqrt(x.shape[1])
    return pipe.transformer(x, text, mask, t / 1000, [[(1, side, side)]])[0]


def _auraflow(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text = pipe.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu")[0]
    return pipe.transformer(x, text, t / 1000)[0]


def _lumina2(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    words = f"{pipe.system_prompt} <Prompt Start> "
    text, mask = pipe._get_gemma_prompt_embeds(words + caption if caption else "", "cpu", 256)
    return -pipe.transformer(x, 1 - t / 1000, text, mask)[0]


def _cogview(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _ = pipe.encode_prompt(caption, None, False, device="cpu")
    if not caption and type(pipe).__name__ == "CogView3PlusPipeline":
        text = torch.zeros_like(text)
    size, corner = torch.tensor([[SIZE, SIZE]], dtype=torch.float32), torch.zeros(1, 2)
    return pipe.transformer(x, text, t, size, size, corner)[0]


def _ltx(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu")
    side, vae = math.isqrt(x.shape[1]), pipe.vae
    scale = (vae.temporal_compression_ratio / 25, vae.spatial_compression_ratio, vae.spatial_compression_ratio)
    return pipe.transformer(x, text, t, mask, 1, side, side, rope_interpolation_scale=scale)[0]


def _ltx_condition(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu")
    places = pipe.vae.spatial_compression_ratio * _positions(math.isqrt(x.shape[1])).mT[None]  # seconds, pixels, pixels
    return pipe.transformer(x, text, t[:, None], mask, video_coords=places)[0]


def _cogvideox(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _ = pipe.encode_prompt(caption, None, False, device="cpu")
    rope = pipe._prepare_rotary_positional_embeddings(SIZE, SIZE, 1, torch.device("cpu"))
    return pipe.transformer(x, text, t, image_rotary_emb=rope)[0]


def _hunyuanvideo(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    text, pooled, mask = pipe.encode_prompt(caption, caption, DEFAULT_PROMPT_TEMPLATE, device="cpu")
    return pipe.transformer(x, t, text, mask, pooled, torch.tensor([1000.0]))[0]


def _mochi(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, device="cpu")
    return -pipe.transformer(x, text, 1000 - t, mask)[0]  # 1000 is data, towards it


def _hunyuanimage(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask, glyphs, glyphs_mask = pipe.encode_prompt(caption, "cpu")
    return pipe.transformer(x, t, text, mask, encoder_hidden_states_2=glyphs, encoder_attention_mask_2=glyphs_mask)[0]


def _hunyuanvideo15(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask, glyphs, glyphs_mask = pipe.encode_prompt(caption, "cpu", torch.float32)
    no_image, tokens = torch.zeros(1, 5, *x.shape[2:]), torch.zeros(1, 729, pipe.transformer.config.image_embed_dim)
    return pipe.transformer(
        torch.cat([x, no_image], dim=1), t, text, mask, encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyphs_mask, image_embeds=tokens,
    )[0]  # fmt: skip


def _sana_video(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask = _sana_text(pipe, caption)
    return pipe.transformer(x, text, t, encoder_attention_mask=mask)[0]


def _ovis(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _, text_ids, _ = pipe.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)
    ids = _positions(math.isqrt(x.shape[1]))
    return pipe.transformer(x, encoder_hidden_states=text, timestep=t / 1000, img_ids=ids, txt_ids=text_ids)[0]


def _latte(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, _ = pipe.encode_prompt(caption, False, device="cpu")
    return pipe.transformer(x, t, encoder_hidden_states=text)[0][:, :4]  # the others are the variance


def _latte_latents(vae: Any, z: Tensor) -> Tensor:
    return _scaled(vae, z).unsqueeze(2)


def _lumina(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    text, mask, *_ = pipe.encode_prompt(caption, False, device="cpu")
    scale = math.sqrt(SIZE * SIZE / pipe.default_image_size**2)
    rope = get_2d_rotary_pos_embed_lumina(pipe.transformer.head_dim, 384, 384, linear_factor=scale, ntk_factor=1.0)
    extent = {"base_sequence_length": (pipe.default_image_size // 16) ** 2}
    return -pipe.transformer(x, 1 - t / 1000, text, mask, rope, extent)[0][:, :4]


def _flux2(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, text_ids = pipe.encode_prompt(caption, device="cpu")
    ids = torch.nn.functional.pad(_positions(math.isqrt(x.shape[1])), (0, 1))[None]
    return pipe.transformer(
        hidden_states=x, encoder_hidden_states=text, timestep=t / 1000, img_ids=ids.long(), txt_ids=text_ids,
        guidance=torch.ones(1),
    )[0]  # fmt: skip


def _ernie(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    (text,) = pipe.encode_prompt(caption, "cpu")
    return pipe.transformer(x, t, text[None], torch.tensor([len(text)]))[0]


def _ernie_latents(vae: Any, z: Tensor) -> Tensor:
    """As Flux 2, with 1e-5 where the VAE's config has another number."""
    mean, deviation = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + 1e-5)
    x, side = (_patches(z) - mean) / deviation, z.shape[-1] // 2
    return x.mT.reshape(1, -1, side, side)


def _longcat(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, text_ids = pipe.encode_prompt(caption)
    ids = _positions(math.isqrt(x.shape[1])) + torch.tensor([0, pipe.tokenizer_max_length, pipe.tokenizer_max_length])
    ids[:, 0] = 1
    return pipe.transformer(x, text, t / 1000, ids, text_ids)[0]


def _kandinsky5(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, pooled, _ = pipe.encode_prompt(caption, device="cpu")
    side = x.shape[2] // 2
    places = [torch.arange(1), torch.arange(side), torch.arange(side)]
    no_image = torch.zeros(*x.shape[:-1], 5)  # and its mask
    return pipe.transformer(
        torch.cat([x, no_image], dim=-1), text, t, pooled, places, torch.arange(text.shape[1]), (1, 3.16, 3.16)
    )[0]  # fmt: skip


def _kandinsky5_latents(vae: Any, z: Tensor) -> Tensor:
    return (z * vae.config.scaling_factor).permute(0, 2, 3, 4, 1)


def _krea2(pipe: Any, x: Tensor, t: Tensor, caption: str) -> Tensor:
    text, mask = pipe.encode_prompt(caption, "cpu")
    ids = torch.cat([torch.zeros(text.shape[1], 3), _positions(math.isqrt(x.shape[1]))])
    return pipe.transformer(x, text, t / 1000, ids, mask)[0]


@dataclass(frozen=True)
class Reference:
    """How one class is trained."""

    objective: str  # flow, epsilon or v
    predict: Callable[[Any, Tensor, Tensor, str], Tensor]
    latents: Callable[[Any, Tensor], Tensor] = _scaled
    shift: float = 1.0  # of flow matching, for images of 64 x 64 pixels
    lowest: float = 0.0  # noise level that the network is for
    unused: tuple[str, ...] = ()  # weights without gradients: text of the last block, which nothing reads


def _flux_shift(tokens: int, base: float, most: float, first: int = 256, last: int = 4096) -> float:
    """Shift the noise levels by exp(mu), mu linear in the number of tokens (Flux)."""
    return math.exp(base + (most - base) * (tokens - first) / (last - first))


def _klein_shift(tokens: int, steps: int) -> float:
    """Flux 2: mu is linear in the tokens at 10 and at 200 steps, and linear in the steps between."""
    few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    return math.exp(many + (few - many) * (200 - steps) / 190)


REFERENCES = {
    "sd": Reference("epsilon", _sd),
    "sdxl": Reference("epsilon", _sdxl),
    "lcm": Reference("epsilon", _lcm),
    "pixart": Reference("epsilon", _pixart),
    "pixart_alpha": Reference("epsilon", _pixart_alpha),
    "hunyuan": Reference("v", _hunyuan),
    "hunyuan11": Reference("v", _hunyuan),
    "cogview3": Reference("v", _cogview),
    "cogvideox": Reference("v", _cogvideox, _frames_first),
    "sd3": Reference("flow", _sd3, shift=3.0, unused=(r"transformer_blocks\.1\.attn\.add_q_proj\.",)),
    "flux": Reference("flow", _flux, _flux_latents, _flux_shift(16, 0.5, 1.15)),
    "schnell": Reference("flow", _flux, _flux_latents),
    "chroma": Reference("flow", _chroma, _flux_latents),
    "klein": Reference("flow", _klein, _klein_latents, _klein_shift(16, 50)),
    "sana": Reference("flow", _sana, shift=3.0),
    "wan21": Reference("flow", _wan, _standardized, 3.0),
    "wan22": Reference("flow", _wan, _standardized, 3.0, lowest=0.875),
    "zimage": Reference("flow", _zimage, shift=6.0),
    "qwenimage": Reference(
        "flow", _qwenimage, _qwen_latents, _flux_shift(16, 0.5, 0.9),
        unused=(r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out|norm_added_q)|txt_mlp)\.",),
    ),
    "auraflow": Reference("flow", _auraflow, shift=1.73),
    "lumina2": Reference("flow", _lumina2, shift=6.0),
    "cogview4": Reference("flow", _cogview, shift=0.75 * math.sqrt(16 / 256) + 0.25),
    "ltx": Reference("flow", _ltx, _ltx_latents, _flux_shift(256, 0.95, 2.05, 1024)),
    "hunyuanvideo": Reference("flow", _hunyuanvideo, shift=7.0),
    "mochi": Reference(
        "flow", _mochi, _standardized, unused=(r"transformer_blocks\.1\.attn1\.(norm_added_q|add_q_proj)\.",)
    ),
    "hunyuanimage": Reference("flow", _hunyuanimage, shift=5.0, unused=(r"context_embedder_2\.",)),
    "hunyuanvideo15": Reference(
        "flow", _hunyuanvideo15, shift=7.0,
        unused=(
            r"(image_embedder|context_embedder_2)\.",
            r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out|norm_added_q)|norm2_context|ff_context)",
        ),
    ),
    "sana_video": Reference("flow", _sana_video, _standardized),
    "ovis": Reference("flow", _ovis, _flux_latents, _flux_shift(16, 0.5, 1.15)),
    "latte": Reference("epsilon", _latte, _latte_latents),
    "lumina": Reference("flow", _lumina, unused=("pad_token",)),
    "flux2": Reference("flow", _flux2, _klein_latents, _klein_shift(16, 50)),
    "ernie": Reference("flow", _ernie, _ernie_latents, shift=4.0),
    "longcat": Reference("flow", _longcat, _flux_latents, _flux_shift(16, 0.5, 1.15)),
    "kandinsky5": Reference("flow", _kandinsky5, _kandinsky5_latents, shift=5.0),
    "krea2": Reference("flow", _krea2, _qwen_latents, _flux_shift(16, 0.5, 1.15)),
    "sd_pag": Reference("epsilon", _sd),
    "ltx_condition": Reference("flow", _ltx_condition, _ltx_latents),
}  # fmt: skip
