"""Tiny pipelines of every kind in diffusers layout, with random weights, built offline.

Widths are multiples of 32, as in all real models. A CPU computes the last few numbers of a tensor, those that fill no
vector, by another function than the rest, which may round differently: if an image were not a multiple of the vector
length, its last bits would depend on its index in the batch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.guiders import AdaptiveProjectedMixGuidance, ClassifierFreeGuidance
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video as hunyuan_video
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from tests.support import tiny_text
from tests.support.tiny_text import WIDTH

diffusers_logging.disable_progress_bar()
transformers_logging.disable_progress_bar()

_LATENT = {"latent_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}


def _vae(levels: int = 4, **more: Any) -> Any:
    """A decoder whose images are neither flat nor black and white."""
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    vae = diffusers.AutoencoderKL(block_out_channels=(8,) * levels, sample_size=64, **kinds, **(_LATENT | more))
    return _contrasted(vae, torch.randn(1, vae.config.latent_channels, 8, 8), vae.decoder.conv_out)


def _contrasted(vae: Any, latents: torch.Tensor, last: Any) -> Any:
    with torch.no_grad():
        spread = vae.eval().decode(latents).sample.std()
        last.weight.mul_(0.4 / spread)
    return vae


def hunyuan(version: str = "1.2") -> Any:
    bert_tokenizer, bert = tiny_text.bert()
    t5_tokenizer, t5 = tiny_text.t5()
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=8, in_channels=4, patch_size=2, num_layers=4, num_attention_heads=2, attention_head_dim=16,
        hidden_size=32, mlp_ratio=2.0, activation_fn="gelu-approximate", learn_sigma=True, cross_attention_dim=WIDTH,
        cross_attention_dim_t5=WIDTH, pooled_projection_dim=WIDTH, text_len=77, text_len_t5=256,
        use_style_cond_and_image_meta_size=version == "1.1",
    )  # fmt: skip
    scheduler = diffusers.DDPMScheduler(
        beta_start=0.00085, beta_end=0.018, beta_schedule="scaled_linear", prediction_type="v_prediction",
        clip_sample=False, steps_offset=1,
    )  # fmt: skip
    return diffusers.HunyuanDiTPipeline(
        vae=_vae(), text_encoder=bert, tokenizer=bert_tokenizer, transformer=transformer, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False, text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
    )  # fmt: skip


def hunyuan11() -> Any:
    return hunyuan("1.1")


_UNET = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
         "block_out_channels": (64, 64), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip


def sd() -> Any:
    tokenizer, text_encoder = tiny_text.clip()
    return diffusers.StableDiffusionPipeline(
        vae=_vae(), text_encoder=text_encoder, tokenizer=tokenizer,
        unet=diffusers.UNet2DConditionModel(cross_attention_dim=WIDTH, **_UNET),
        scheduler=diffusers.DDIMScheduler(
            beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sdxl() -> Any:
    tokenizer, text_encoder = tiny_text.clip()
    tokenizer_2, text_encoder_2 = tiny_text.clip(projected=True)
    unet = diffusers.UNet2DConditionModel(
        cross_attention_dim=2 * WIDTH, addition_embed_type="text_time", addition_time_embed_dim=64,
        projection_class_embeddings_input_dim=6 * 64 + WIDTH, use_linear_projection=True,
        transformer_layers_per_block=(1, 1), **_UNET,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(), text_encoder=text_encoder, text_encoder_2=text_encoder_2, tokenizer=tokenizer,
        tokenizer_2=tokenizer_2, unet=unet, scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        add_watermarker=False,
    )  # fmt: skip


def sd3() -> Any:
    tokenizer, text_encoder = tiny_text.clip(projected=True)
    tokenizer_2, text_encoder_2 = tiny_text.clip(projected=True)
    tokenizer_3, text_encoder_3 = tiny_text.t5(2 * WIDTH)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=2 * WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=16,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(shift_factor=0.0),
        text_encoder=text_encoder, tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3, tokenizer_3=tokenizer_3,
    )  # fmt: skip


def flux(guidance_embeds: bool = True) -> Any:
    tokenizer, text_encoder = tiny_text.clip()
    tokenizer_2, text_encoder_2 = tiny_text.t5()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(shift_factor=0.0), text_encoder=text_encoder,
        tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2, transformer=transformer,
    )  # fmt: skip


def schnell() -> Any:
    return flux(guidance_embeds=False)


def pixart() -> Any:
    tokenizer, text_encoder = tiny_text.t5()
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=16, num_attention_heads=2, caption_channels=WIDTH,
        in_channels=4, out_channels=8, cross_attention_dim=32, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=_vae(), transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_schedule="linear"),
    )  # fmt: skip


def sana(sprint: bool = False) -> Any:
    tokenizer, text_encoder = tiny_text.gemma()
    vae = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
    )  # fmt: skip
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=16,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=WIDTH,
        sample_size=32, guidance_embeds=sprint, qk_norm="rms_norm_across_heads" if sprint else None,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    return (diffusers.SanaSprintPipeline if sprint else diffusers.SanaPipeline)(
        tokenizer=tokenizer, text_encoder=text_encoder,
        vae=_contrasted(vae, torch.randn(1, 4, 32, 32), vae.decoder.conv_out), transformer=transformer,
        scheduler=diffusers.SCMScheduler(prediction_type="trigflow", sigma_data=0.5) if sprint else scheduler,
    )  # fmt: skip


def sana_sprint() -> Any:
    return sana(sprint=True)


def _wan_transformer() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16,
        text_dim=WIDTH, freq_dim=64, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=128,
    )  # fmt: skip


def wan21(experts: int = 1) -> Any:
    tokenizer, text_encoder = tiny_text.umt5()
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder,
        vae=_contrasted(vae, torch.randn(1, 16, 1, 8, 8), vae.decoder.conv_out),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_wan_transformer(), transformer_2=_wan_transformer() if experts == 2 else None,
        boundary_ratio=0.875 if experts == 2 else None,
    )  # fmt: skip


def wan22() -> Any:
    return wan21(experts=2)


def zimage() -> Any:
    tokenizer, text_encoder = tiny_text.qwen3()
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=WIDTH, axes_dims=[4, 4, 8], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    with torch.no_grad():  # diffusers leaves these as the memory was
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(shift_factor=0.0), text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


# The beginning of QwenImagePipeline's prompt template, of which it drops the first 34 tokens.
_QWEN_TEMPLATE = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:\nuser\nassistant"
)


def qwenimage() -> Any:
    tokenizer, text_encoder = tiny_text.qwen25_vl(_QWEN_TEMPLATE)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, guidance_embeds=False, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_contrasted(vae, torch.randn(1, 4, 1, 8, 8), vae.decoder.conv_out), text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def pixart_alpha() -> Any:
    sigma = pixart()
    return diffusers.PixArtAlphaPipeline(**sigma.components)


def lcm() -> Any:
    tokenizer, text_encoder = tiny_text.clip()
    return diffusers.LatentConsistencyModelPipeline(
        vae=_vae(), text_encoder=text_encoder, tokenizer=tokenizer,
        unet=diffusers.UNet2DConditionModel(cross_attention_dim=WIDTH, time_cond_proj_dim=32, **_UNET),
        scheduler=diffusers.LCMScheduler(beta_schedule="scaled_linear", original_inference_steps=50),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def auraflow() -> Any:
    tokenizer, text_encoder = tiny_text.umt5()
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=32,
        pos_embed_max_size=64,
    )  # fmt: skip
    with torch.no_grad():  # or a short text would be lost among its padding
        transformer.joint_transformer_blocks[0].attn.add_v_proj.weight.mul_(30)
        transformer.joint_transformer_blocks[0].attn.to_out[0].weight.mul_(30)
    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=_vae(), transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def lumina2() -> Any:
    tokenizer, text_encoder = tiny_text.gemma()
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=32, num_layers=2, num_refiner_layers=1,
        num_attention_heads=2, num_kv_heads=1, multiple_of=32, axes_dim_rope=(4, 4, 8), axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(shift_factor=0.0),
        text_encoder=text_encoder, tokenizer=tokenizer,
    )  # fmt: skip


def cogview3() -> Any:
    tokenizer, text_encoder = tiny_text.t5()
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        text_embed_dim=WIDTH, time_embed_dim=32, condition_dim=16, pos_embed_max_size=16, sample_size=8,
    )  # fmt: skip
    return diffusers.CogView3PlusPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=_vae(), transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip


def cogview4() -> Any:
    tokenizer, text_encoder = tiny_text.glm()
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        text_embed_dim=WIDTH, time_embed_dim=32, condition_dim=16, pos_embed_max_size=16, sample_size=8,
        rope_axes_dim=(64, 64),
    )  # fmt: skip
    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=_vae(), transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    )  # fmt: skip


def chroma() -> Any:
    tokenizer, text_encoder = tiny_text.t5()
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8), approximator_num_channels=64,
        approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(shift_factor=0.0), text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def klein() -> Any:
    tokenizer, text_encoder = tiny_text.qwen3(layers=27)  # the pipeline reads the 27th
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * WIDTH, timestep_guidance_channels=64, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )  # fmt: skip
    levels = 4
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8,) * levels, sample_size=64, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, **_LATENT,
    )  # fmt: skip
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_contrasted(vae, torch.randn(1, 4, 8, 8), vae.decoder.conv_out), text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def ltx() -> Any:
    tokenizer, text_encoder = tiny_text.t5()
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )  # fmt: skip
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=1, caption_channels=WIDTH,
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_contrasted(vae, torch.randn(1, 8, 1, 16, 16), vae.decoder.conv_out.conv), text_encoder=text_encoder,
        tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def cogvideox() -> Any:
    tokenizer, text_encoder = tiny_text.t5()
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=4,
        sample_height=64, sample_width=64,
    )  # fmt: skip
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=32,
        text_embed_dim=WIDTH, num_layers=1, sample_width=8, sample_height=8, sample_frames=9,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder,
        vae=_contrasted(vae, torch.randn(1, 4, 1, 8, 8), vae.decoder.conv_out.conv), transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip


def hunyuanvideo() -> Any:
    tokenizer, text_encoder = tiny_text.llama(hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"])
    tokenizer_2, text_encoder_2 = tiny_text.clip()
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH, rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    return diffusers.HunyuanVideoPipeline(
        text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer,
        vae=_contrasted(vae, torch.randn(1, 4, 1, 8, 8), vae.decoder.conv_out.conv),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2,
    )  # fmt: skip


# -- Pipelines that training was not prepared for, each unusual in one way.


def mochi() -> Any:
    """Its schedule counts from noise at 0 to data."""
    tokenizer, text_encoder = tiny_text.t5()
    widths = {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16, text_embed_dim=WIDTH,
        time_embed_dim=32,
    )  # fmt: skip
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), text_encoder=text_encoder,
        vae=diffusers.AutoencoderKLMochi(layers_per_block=(1,) * 5, **widths), tokenizer=tokenizer,
        transformer=transformer,
    )  # fmt: skip


def _byt5() -> tuple[Any, Any]:
    tokenizer = transformers.ByT5Tokenizer()
    sizes = {"vocab_size": len(tokenizer), "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return tokenizer, transformers.T5EncoderModel(transformers.T5Config(**sizes))


def hunyuanimage() -> Any:
    """Guided by components of the pipeline; the tokenizer of its second text encoder has no files."""
    tokenizer, text_encoder = tiny_text.qwen25_vl(_QWEN_TEMPLATE)
    tokenizer_2, text_encoder_2 = _byt5()
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32,) * 4, layers_per_block=1,
        spatial_compression_ratio=8, sample_size=64, scaling_factor=0.75289,
    )  # fmt: skip
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, rope_axes_dim=(8, 8),
    )  # fmt: skip
    return diffusers.HunyuanImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0), vae=vae, text_encoder=text_encoder,
        tokenizer=tokenizer, text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2, transformer=transformer,
        guider=AdaptiveProjectedMixGuidance(), ocr_guider=AdaptiveProjectedMixGuidance(),
    )  # fmt: skip


def hunyuanvideo15() -> Any:
    """Its network is given the latents of no image beside the noisy ones; its VAE encodes one image at a time."""
    tokenizer, text_encoder = tiny_text.qwen25_vl(_QWEN_TEMPLATE)
    tokenizer_2, text_encoder_2 = _byt5()
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16,) * 4, layers_per_block=1, spatial_compression_ratio=8
    )
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2, num_refiner_layers=1,
        text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, image_embed_dim=12, rope_axes_dim=(2, 6, 8), target_size=16,
        task_type="t2v",
    )  # fmt: skip
    text_config = text_encoder.config.text_config
    text_config.num_hidden_layers, text_config.layer_types = 4, ["full_attention"] * 4  # the pipeline reads the second
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(text_config), tokenizer=tokenizer, transformer=transformer,
        vae=vae, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2, guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def sana_video() -> Any:
    """Its call names the number of frames differently."""
    transformer = diffusers.SanaVideoTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=WIDTH, sample_size=8, rope_max_seq_len=32,
    )  # fmt: skip
    tokenizer, text_encoder = tiny_text.gemma()
    return diffusers.SanaVideoPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=wan21().vae, transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )  # fmt: skip


def ovis() -> Any:
    tokenizer, text_encoder = tiny_text.qwen3()
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.OvisImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=_vae(shift_factor=0.1159),
        text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer,
    )  # fmt: skip


def _awake(network: Any) -> Any:
    """Give random values to weights that start at zero, such as gates, which would hide others from their gradients."""
    with torch.no_grad():
        for weight in network.parameters():
            if not weight.any():
                weight.normal_(std=0.3)
    return network


def latte() -> Any:
    """Texts without their padding; a learned variance; frames like the images of a batch in its VAE."""
    tokenizer, text_encoder = tiny_text.t5()
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=16, num_attention_heads=2, caption_channels=WIDTH,
        in_channels=4, out_channels=8, cross_attention_dim=32, num_embeds_ada_norm=1000, attention_bias=True,
        activation_fn="gelu-approximate", norm_elementwise_affine=False, norm_type="ada_norm_single", video_length=1,
    )  # fmt: skip
    return diffusers.LattePipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=_vae(), transformer=transformer,
        scheduler=diffusers.DDIMScheduler(),
    )  # fmt: skip


def lumina() -> Any:
    """Time counts from noise to data, and the output is its negative."""
    tokenizer, text_encoder = tiny_text.gemma()
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=32, num_layers=1, num_attention_heads=2, num_kv_heads=1,
        multiple_of=32, cross_attention_dim=WIDTH,
    )  # fmt: skip
    return diffusers.LuminaPipeline(
        transformer=_awake(transformer), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=_vae(),
        text_encoder=text_encoder, tokenizer=tokenizer,
    )  # fmt: skip


def _mistral(layers: int, whole: bool = False) -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "intermediate_size": 16, "image_size": 32, "patch_size": 8, "num_channels": 3}  # fmt: skip
    text = {"model_type": "mistral", "vocab_size": len(tiny_text.qwen_tokenizer()), "hidden_size": WIDTH,
            "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "intermediate_size": 32, "initializer_range": 0.3}  # fmt: skip
    config = transformers.Mistral3Config(text_config=text, vision_config=vision)
    return (transformers.Mistral3ForConditionalGeneration if whole else transformers.Mistral3Model)(config)


def flux2() -> Any:
    """Its guidance is distilled into the network."""
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * WIDTH, timestep_guidance_channels=64, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=klein().vae, text_encoder=_mistral(31, whole=True),
        tokenizer=tiny_text.qwen_tokenizer(), transformer=transformer,
    )  # fmt: skip


def ernie() -> Any:
    """Prompts are rewritten by a language model, if there is one; texts vary in length."""
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=1, ffn_hidden_size=64, in_channels=16, out_channels=16,
        patch_size=1, text_in_dim=WIDTH, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return diffusers.ErnieImagePipeline(
        transformer=_awake(transformer), vae=klein().vae, text_encoder=_mistral(3),
        tokenizer=tiny_text.qwen_tokenizer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=4.0),
    )  # fmt: skip


def longcat() -> Any:
    """Prompts are rewritten by its text encoder, unless the call says otherwise."""
    tokenizer, text_encoder = tiny_text.qwen25_vl(_QWEN_TEMPLATE)
    transformer = diffusers.LongCatImageTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return diffusers.LongCatImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.1159, latent_channels=16), text_encoder=text_encoder, tokenizer=tokenizer,
        text_processor=tiny_text.qwen_tokenizer(), transformer=transformer,
    )  # fmt: skip


def kandinsky5() -> Any:
    """Writes the next step's latents into the tensor that its network was given."""
    tokenizer, text_encoder = tiny_text.qwen25_vl(_QWEN_TEMPLATE)
    tokenizer_2, text_encoder_2 = tiny_text.clip()
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=WIDTH, time_dim=32, out_visual_dim=4, model_dim=32, ff_dim=64,
        num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 6, 6), visual_cond=True,
    )  # fmt: skip
    return diffusers.Kandinsky5T2VPipeline(
        transformer=_awake(transformer), vae=hunyuanvideo().vae, text_encoder=text_encoder, tokenizer=tokenizer,
        text_encoder_2=text_encoder_2, tokenizer_2=tokenizer_2,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )  # fmt: skip


def kandinsky5_image() -> Any:
    """Makes images of the nearest size in a table, of about a megapixel each."""
    parts = kandinsky5().components
    config = dict(parts["transformer"].config) | {"visual_cond": False}
    changed = {"vae": _vae(), "transformer": diffusers.Kandinsky5Transformer3DModel.from_config(config)}
    return diffusers.Kandinsky5T2IPipeline(**parts | changed)


def krea2() -> Any:
    """A list of numbers among its components; guided at every scale above 0, by a second call of the network."""
    tokenizer = tiny_text.qwen_tokenizer()
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=WIDTH, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=32, num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=qwenimage().vae,
        text_encoder=transformers.Qwen3VLModel(tiny_text.qwen3_vl(len(tokenizer))), tokenizer=tokenizer,
        transformer=_awake(transformer), text_encoder_select_layers=(1, 2),
    )  # fmt: skip


def sd_pag() -> Any:
    """Guided by a second scale, in a batch of twice the size."""
    return diffusers.StableDiffusionPAGPipeline(**sd().components, requires_safety_checker=False)


def ltx_condition() -> Any:
    """Hands its scheduler the negative output, and a timestep for each token."""
    return diffusers.LTXConditionPipeline(**ltx().components)


def allegro() -> Any:
    """Its VAE encodes whole clips only."""
    tokenizer, text_encoder = tiny_text.t5()
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, num_layers=1, cross_attention_dim=48, sample_width=8,
        sample_height=8, sample_frames=8, caption_channels=WIDTH,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLAllegro(block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2)
    return diffusers.AllegroPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer,
        scheduler=diffusers.EulerAncestralDiscreteScheduler(),
    )  # fmt: skip


def skyreels() -> Any:
    """Its call needs a package that is not among ours."""
    parts = wan21().components
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, text_dim=WIDTH, freq_dim=64, ffn_dim=32, num_layers=1,
        rope_max_seq_len=128,
    )  # fmt: skip
    return diffusers.SkyReelsV2Pipeline(**_without(parts, "transformer", "transformer_2"), transformer=transformer)


# -- Pipelines with image inputs; image-to-image and inpainting use the folders of text pipelines too.


def sd_inpaint() -> Any:
    """The U-Net of the inpainting checkpoints: latents, mask and masked image are nine channels."""
    parts = sd().components | {
        "unet": diffusers.UNet2DConditionModel(cross_attention_dim=WIDTH, **_UNET | {"in_channels": 9})
    }
    return diffusers.StableDiffusionInpaintPipeline(**_without(parts, "image_encoder"), requires_safety_checker=False)


def sd3_16() -> Any:
    """With the 16 latent channels of the real one, without which inpainting is refused."""
    parts = sd3().components
    config = dict(parts["transformer"].config) | {"in_channels": 16, "out_channels": 16}
    changed = {
        "vae": _vae(shift_factor=0.0, latent_channels=16),
        "transformer": diffusers.SD3Transformer2DModel.from_config(config),
    }
    return diffusers.StableDiffusion3Pipeline(**_without(parts, "image_encoder", "feature_extractor") | changed)


def pix2pix() -> Any:
    parts = sd().components | {
        "unet": diffusers.UNet2DConditionModel(cross_attention_dim=WIDTH, **_UNET | {"in_channels": 8})
    }
    return diffusers.StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False)


def _controlnet(unet: Any) -> Any:
    """A ControlNet with random instead of zero output convolutions: its image makes a difference."""
    controlnet = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16,) * 4)
    for layer in (controlnet.controlnet_cond_embedding.conv_out, controlnet.controlnet_mid_block,
                  *controlnet.controlnet_down_blocks):  # fmt: skip
        torch.nn.init.normal_(layer.weight, std=1.0)
    return controlnet


def sd_controlnet() -> Any:
    parts = sd().components
    return diffusers.StableDiffusionControlNetPipeline(
        **parts, controlnet=_controlnet(parts["unet"]), requires_safety_checker=False
    )


def sdxl_controlnet() -> Any:
    parts = sdxl().components
    return diffusers.StableDiffusionXLControlNetPipeline(
        **parts, controlnet=_controlnet(parts["unet"]), add_watermarker=False
    )


def kontext() -> Any:
    return diffusers.FluxKontextPipeline(**flux().components)


def _without(parts: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if name not in names}


_ALL = (
    hunyuan, hunyuan11, sd, sdxl, sd3, flux, schnell, pixart, sana, wan21, wan22, zimage, qwenimage, pixart_alpha,
    sana_sprint, lcm, auraflow, lumina2, cogview3, cogview4, chroma, klein, ltx, cogvideox, hunyuanvideo,
)  # fmt: skip
BUILDERS: dict[str, Callable[[], Any]] = {build.__name__: build for build in _ALL}
IMAGE_BUILDERS: dict[str, Callable[[], Any]] = {
    build.__name__: build for build in (sd_inpaint, sd3_16, pix2pix, sd_controlnet, sdxl_controlnet, kontext)
}
UNPREPARED_BUILDERS: dict[str, Callable[[], Any]] = {
    build.__name__: build
    for build in (
        mochi,
        hunyuanimage,
        hunyuanvideo15,
        sana_video,
        ovis,
        latte,
        lumina,
        flux2,
        ernie,
        longcat,
        kandinsky5,
        krea2,
        sd_pag,
        ltx_condition,
        kandinsky5_image,
        allegro,
        skyreels,
    )
}


REPRESENTATIVE = (
    "hunyuan", "sd", "sdxl", "sd3", "flux", "pixart", "sana", "wan22", "zimage", "qwenimage", "cogview4", "lumina2",
)  # fmt: skip
"""One of each way to encode text, to guide and to schedule; the contract itself is tested on all of `BUILDERS`."""


def build_pipeline(name: str, folder: Path) -> Path:
    """Write a tiny pipeline, or find the one that another process wrote; the folder appears complete."""
    final = folder / name
    if final.is_dir():
        return final
    aside = folder / f".{name}.{os.getpid()}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = (BUILDERS | IMAGE_BUILDERS | UNPREPARED_BUILDERS)[name]()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.save_pretrained(aside)
    with contextlib.suppress(OSError):  # another process was faster
        aside.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    return final


def drop_last_tensor(component: Path) -> str:
    """Remove a tensor from a component's weights, and return its name."""
    (file,) = component.glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    return name
