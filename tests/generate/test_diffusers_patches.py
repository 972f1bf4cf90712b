"""Patches of diffusers and transformers: canaries for the patched code, and tests that results stay the same."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline
from diffusers.models.activations import GELU
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion
from diffusers.schedulers import scheduling_ddpm
from diffusers.utils.torch_utils import randn_tensor
from torch import overrides
from transformers import BertConfig, masking_utils

from muralist.generate import diffusers_patches as patches
from tests.support.pipeline_calls import load
from tests.support.pipelines import BUILDERS

Build = Callable[[str], Path]
WRITTEN_FOR = "diffusers 0.42.1 and transformers 5.22.2"

_WAN_VAE, _WAN = "diffusers.models.autoencoders.autoencoder_kl_wan", "diffusers.models.transformers.transformer_wan"
# (patch in muralist/generate/diffusers_patches.py or elsewhere, the patched or repeated code, its fingerprint)
SOURCES = [
    ("per_sample_noise", "diffusers.utils.torch_utils:randn_tensor", "032d6aa2e3d6"),
    ("forced_attention_mask", "transformers.masking_utils:is_tracing", "7202abba792f"),
    ("forced_attention_mask", "transformers.masking_utils:_ignore_causal_mask_sdpa", "b3d03cfa0d76"),
    ("forced_attention_mask", "transformers.masking_utils:_ignore_bidirectional_mask_sdpa", "5d5f81caad7d"),
    ("decode_single_frames_in_2d", f"{_WAN_VAE}:AutoencoderKLWan._decode", "7c6f228efce7"),
    ("decode_single_frames_in_2d", f"{_WAN_VAE}:WanCausalConv3d", "14c69720a12e"),
    ("decode_single_frames_in_2d", f"{_WAN_VAE}:WanDecoder3d.forward", "927efe06256e"),
    ("FusedWanAttnProcessor", f"{_WAN}:WanAttnProcessor", "422e95da65cb"),
    ("FusedWanAttnProcessor", f"{_WAN}:WanAttention.__init__", "08406ffba285"),
    ("fuse_linear_gelu", "diffusers.models.activations:GELU", "532b42315ab1"),
    ("repeated_blocks", "diffusers:ModelMixin.compile_repeated_blocks", "1ef7f2825f88"),
    (
        "models.hunyuan_dit.use_official_rope",
        "diffusers.models.embeddings:get_2d_rotary_pos_embed_from_grid",
        "a1792ce8f7eb",
    ),
]
_CLIP, _T5 = "_get_clip_prompt_embeds", "_get_t5_prompt_embeds"
TEXT_METHODS = {
    "sd3": {_CLIP, _T5},
    "flux": {_CLIP, _T5},
    "wan21": {_T5},
    "sana": {"_get_gemma_prompt_embeds"},
    "qwenimage": {"_get_qwen_prompt_embeds"},
}
# do not warn that they truncated a prompt
SILENT = ("wan21", "wan22", "sana", "sana_sprint", "zimage", "qwenimage", "chroma", "klein")
REPEATED_BLOCKS = {
    "wan21": {"WanTransformerBlock"},
    "hunyuan": {"HunyuanDiTBlock"},
    "sdxl": {"BasicTransformerBlock", "ResnetBlock2D"},
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "pixart": {"BasicTransformerBlock"},
    "sana": {"SanaTransformerBlock"},
}


def check_source(patch: str, target: str, fingerprint: str) -> None:
    """Fail with instructions if the source of a patched object is not the one that the patch was written for."""
    module, _, name = target.partition(":")
    library = module.partition(".")[0]
    written_for = f"The patch `{patch}` was written for {WRITTEN_FOR}; this is {library} {version(library)}."
    try:
        patched = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{target} does not exist: {error}. {written_for} Remove the patch or find its new place.")
    found = hashlib.sha256(inspect.getsource(patched).encode()).hexdigest()[:12]
    assert found == fingerprint, (
        f"The source of {target} has changed. {written_for} Compare both versions, adapt the patch, run "
        f"`pytest tests/generate`, and set the fingerprint in {Path(__file__).name} to {found!r}."
    )


@pytest.mark.parametrize(("patch", "target", "fingerprint"), SOURCES, ids=[f"{row[0]}-{row[1]}" for row in SOURCES])
def test_patched_sources_are_those_the_patches_were_written_for(patch: str, target: str, fingerprint: str) -> None:
    check_source(patch, target, fingerprint)


def test_a_canary_says_which_patch_is_concerned_and_what_to_do() -> None:
    with pytest.raises(AssertionError, match="GELU has changed. The patch `fuse_linear_gelu` was written for .* adapt"):
        check_source("fuse_linear_gelu", "diffusers.models.activations:GELU", "another")
    with pytest.raises(pytest.fail.Exception, match="activations:Gone does not exist.* Remove the patch"):
        check_source("fuse_linear_gelu", "diffusers.models.activations:Gone", "")


@pytest.mark.parametrize("name", BUILDERS)
def test_pipelines_have_what_the_wrappers_rely_on(name: str, tiny_pipeline: Build) -> None:
    """`encode_prompt` and the text encoders' methods, `set_timesteps(device=)`, `step`, and one denoiser at least."""
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    assert "prompt" in inspect.signature(pipe.encode_prompt).parameters
    methods = set(filter(patches._ENCODER_METHOD.fullmatch, dir(type(pipe))))
    assert methods >= TEXT_METHODS.get(name, set())
    scheduler = pipe.scheduler
    assert "device" in inspect.signature(scheduler.set_timesteps).parameters and callable(scheduler.step)
    more = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(2, **more)
    assert scheduler.timesteps.device.type == "cpu" and len(scheduler.timesteps) >= 2
    if name not in SILENT:
        assert "truncated" in inspect.getsource(sys.modules[type(pipe).__module__])


def test_hunyuan_takes_rotary_positions_as_an_argument() -> None:
    """models.hunyuan_dit replaces them."""
    assert "image_rotary_emb" in inspect.signature(diffusers.HunyuanDiT2DModel.forward).parameters


def test_private_functions_of_torch_exist() -> None:
    assert callable(overrides._get_current_function_mode) and callable(overrides._pop_mode_temporarily)
    assert callable(torch._addmm_activation)  # linear_gelu
    assert hasattr(importlib.import_module("torch._inductor.config"), "deterministic")
    for name in ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit"):
        assert hasattr(importlib.import_module("torch._dynamo.config"), name)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_float32_noise_is_that_of_diffusers_and_other_dtypes_are_rounded_from_it() -> None:
    shape = (2, 4, 8, 8)
    expected = randn_tensor(shape, generator=generators(3, 4))
    with patches.per_sample_noise([]):
        drawn = pipeline_stable_diffusion.randn_tensor(shape, generator=generators(3, 4))
        half = scheduling_ddpm.randn_tensor(shape, generator=generators(3, 4), dtype=torch.bfloat16)
        alone = scheduling_ddpm.randn_tensor((1, 4, 8, 8), generator=generators(4)[0])
    assert torch.equal(drawn, expected)
    assert torch.equal(half, expected.to(torch.bfloat16))
    assert torch.equal(alone[0], expected[1])


def test_noise_without_a_generator_is_drawn_per_sample() -> None:
    with patches.per_sample_noise(generators(3, 4)):
        drawn = scheduling_ddpm.randn_tensor((2, 5))
    assert torch.equal(drawn, randn_tensor((2, 5), generator=generators(3, 4)))


def test_per_sample_noise_restores_diffusers() -> None:
    with pytest.raises(KeyError), patches.per_sample_noise([]):
        assert scheduling_ddpm.randn_tensor is not randn_tensor
        raise KeyError
    modules = [module for name, module in sys.modules.items() if name.startswith("diffusers")]
    assert {vars(module).get("randn_tensor", randn_tensor) for module in modules} == {randn_tensor}


@pytest.mark.parametrize("forced", [False, True])
def test_a_forced_mask_does_not_depend_on_what_it_masks(forced: bool) -> None:
    config = BertConfig(hidden_size=32, num_attention_heads=2, attn_implementation="sdpa")
    embeds, ones = torch.zeros(1, 4, 32), torch.ones(1, 4, dtype=torch.long)
    padded = ones.clone()
    padded[:, 2:] = 0
    with patches.forced_attention_mask(forced):
        for create in (masking_utils.create_bidirectional_mask, masking_utils.create_causal_mask):
            assert (create(config, embeds, ones, past_key_values=None) is None) != forced
            assert create(config, embeds, padded, past_key_values=None) is not None
    assert masking_utils.create_bidirectional_mask(config, embeds, ones) is None


@pytest.mark.parametrize("name", REPEATED_BLOCKS)
def test_repeated_blocks(name: str, tiny_pipeline: Build) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    blocks = patches.repeated_blocks(pipe.unet if name == "sdxl" else pipe.transformer)
    assert {type(block).__name__ for block in blocks} == REPEATED_BLOCKS[name]


class _Convolutions(overrides.TorchFunctionMode):
    """Notes the names of the convolutions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["wan21", "wan22"])
@pytest.mark.parametrize("frames", [1, 2])
def test_single_frames_decoded_in_2d_are_the_same(name: str, frames: int, tiny_pipeline: Build) -> None:
    plain, patched = (
        AutoencoderKLWan.from_pretrained(tiny_pipeline(name), subfolder="vae").eval().requires_grad_(False)
        for _ in range(2)
    )
    patches.decode_single_frames_in_2d(patched)
    latents = torch.randn(2, plain.config.z_dim, frames, 4, 6, generator=torch.Generator().manual_seed(0))
    with _Convolutions() as convolutions:
        found = patched.decode(latents).sample
    expected = plain.decode(latents).sample
    assert found.shape == expected.shape and expected.std() > 0.01
    assert (found - expected).abs().max() < 1e-4
    assert ("conv3d" in convolutions.names) == (frames > 1) and "conv2d" in convolutions.names


@pytest.mark.parametrize("name", ["wan21", "hunyuan", "sd3"])
def test_fused_linear_gelu_is_the_same(name: str, tiny_pipeline: Build) -> None:
    pipe: Any = DiffusionPipeline.from_pretrained(tiny_pipeline(name), local_files_only=True)
    layers = [module for module in pipe.transformer.modules() if type(module) is GELU]
    inputs = [torch.randn(2, 3, layer.proj.in_features) for layer in layers]
    expected = [layer(rows) for layer, rows in zip(layers, inputs, strict=True)]
    names = set(pipe.transformer.state_dict())
    assert patches.fuse_linear_gelu(pipe.transformer) == len(layers) > 0
    fused = [module for module in pipe.transformer.modules() if isinstance(module, patches.LinearGelu)]
    for layer, rows, wanted in zip(fused, inputs, expected, strict=True):
        assert torch.equal(layer(rows), wanted)
    assert set(pipe.transformer.state_dict()) == names
    weight, bias = layers[0].proj.weight.detach(), layers[0].proj.bias.detach()
    torch.library.opcheck(patches.linear_gelu, (inputs[0], weight, bias))


@pytest.mark.parametrize("name", ["wan21", "wan22"])
def test_fused_qk_norm_and_rope_are_the_same(name: str, tiny_pipeline: Build) -> None:
    pipeline: Any = load(tiny_pipeline(name))
    network, random = pipeline._pipe.transformer, torch.Generator().manual_seed(0)
    for parameter in network.parameters():  # the norms' weights are ones, which would hide that they are missing
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    channels, text = network.config.in_channels, network.config.text_dim
    inputs = {
        "hidden_states": torch.randn(2, channels, 1, 6, 10, generator=random),
        "timestep": torch.tensor([3.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 7, text, generator=random),
    }
    expected = network(**inputs).sample
    assert patches.fuse_qk_norm_rope(network) == len(network.blocks) > 0
    assert patches.fuse_qk_norm_rope(network) == 0  # all are fused
    assert expected.std() > 0.01 and (network(**inputs).sample - expected).abs().max() < 1e-5
    layer = network.blocks[0].attn1
    cos, sin = network.rope(inputs["hidden_states"])
    tokens = torch.randn(2, cos.shape[1], layer.inner_dim, generator=random)
    weights = layer.norm_q.weight.detach(), layer.norm_k.weight.detach()
    arguments = (tokens, tokens.flip(0), *weights, 1e-6, cos, sin, layer.heads)
    torch.library.opcheck(patches.wan_qk_norm_rope, arguments)
