"""Weights of the scores of single images: the published formats and architectures, small and random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from tests.support.evaluating import small_clip
from tests.support.tiny_text import bert, clip, qwen_tokenizer

AESTHETIC = "sac+logos+ava1-l14-linearMSE.pth"
HPSV2 = "HPS_v2.1_compressed.pt"


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def small_hpsv2(folder: Path) -> Path:
    """Write open_clip's ViT-H-14 with two layers of two heads each, images of 28 x 28 pixels, in float16."""
    torch.manual_seed(1)
    tokenizer, _ = clip()
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    tensors = {
        "logit_scale": torch.tensor(4.6),
        "visual.class_embedding": _random(160),
        "visual.positional_embedding": _random(5, 160),
        "visual.conv1.weight": _random(160, 3, 14, 14) / 10,
        "visual.proj": _random(160, 24),
        "positional_embedding": _random(77, 128),
        "token_embedding.weight": _random(len(tokenizer), 128) * 8,
        "text_projection": _random(128, 24),
        "attn_mask": torch.zeros(77, 77),
    }
    for name, width in (("visual.ln_pre", 160), ("visual.ln_post", 160), ("ln_final", 128)):
        tensors |= {f"{name}.weight": 1 + _random(width), f"{name}.bias": _random(width)}
    for prefix, width in (("visual.transformer", 160), ("transformer", 128)):
        for layer in (f"{prefix}.resblocks.{number}" for number in range(2)):
            tensors |= {f"{layer}.{norm}.weight": 1 + _random(width) for norm in ("ln_1", "ln_2")}
            tensors |= {f"{layer}.{norm}.bias": _random(width) for norm in ("ln_1", "ln_2")}
            tensors |= {f"{layer}.attn.in_proj_weight": _random(3 * width, width)}
            tensors |= {f"{layer}.attn.in_proj_bias": _random(3 * width)}
            for part, shape in (("attn.out_proj", (width, width)), ("mlp.c_fc", (2 * width, width))):
                tensors |= {f"{layer}.{part}.weight": _random(*shape), f"{layer}.{part}.bias": _random(shape[0])}
            tensors |= {f"{layer}.mlp.c_proj.weight": _random(width, 2 * width)}
            tensors |= {f"{layer}.mlp.c_proj.bias": _random(width)}
    torch.save({"state_dict": {name: value.half() for name, value in tensors.items()}}, folder / HPSV2)
    return folder


def small_imagereward(folder: Path) -> Path:
    """Write BLIP's image and text encoders with two layers of two heads each, images of 32 x 32 pixels, and the head."""
    torch.manual_seed(3)
    folder.mkdir(parents=True)
    vocabulary = bert()[0].get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=lambda piece: vocabulary[piece])))
    config = {"hidden_size": 48, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"max_position_embeddings": 40, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "model_type": "bert"}
    (folder / "med_config.json").write_text(json.dumps(config))
    tensors = {"blip.vision_proj.weight": _random(8, 128)}  # which the reward does not use
    tensors |= {f"blip.visual_encoder.{name}": value for name, value in _blip_vision(128).items()}
    tensors |= {f"blip.text_encoder.{name}": value for name, value in _blip_text(48, 128, len(vocabulary) + 2).items()}
    sizes = (48, 10, 8, 6, 4, 1)
    for number, before, after in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        tensors |= _linear(f"mlp.layers.{number}", after, before)
    torch.save(tensors, folder / "ImageReward.pt")
    return folder


def _linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    return {f"{name}.weight": 2 * _random(rows, columns), f"{name}.bias": _random(rows)}


def _norm(name: str, width: int) -> dict[str, Tensor]:
    return {f"{name}.weight": 1 + _random(width), f"{name}.bias": _random(width)}


def _blip_vision(width: int) -> dict[str, Tensor]:
    tensors = {"cls_token": _random(1, 1, width), "pos_embed": _random(1, 5, width)}
    tensors |= {"patch_embed.proj.weight": _random(width, 3, 16, 16) / 10, "patch_embed.proj.bias": _random(width)}
    for block in ("blocks.0", "blocks.1"):
        tensors |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        tensors |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        tensors |= _linear(f"{block}.mlp.fc1", 2 * width, width) | _linear(f"{block}.mlp.fc2", width, 2 * width)
    return tensors | _norm("norm", width)


def _blip_text(width: int, seen: int, vocabulary: int) -> dict[str, Tensor]:
    tensors = {"embeddings.position_ids": torch.arange(40)[None]}
    tensors |= {"embeddings.word_embeddings.weight": torch.randn(vocabulary, width)}
    tensors |= {"embeddings.position_embeddings.weight": torch.randn(40, width), **_norm("embeddings.LayerNorm", width)}
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for part, source in (("attention", width), ("crossattention", seen)):
            tensors |= _linear(f"{layer}.{part}.self.query", width, width)
            tensors |= _linear(f"{layer}.{part}.self.key", width, source)
            tensors |= _linear(f"{layer}.{part}.self.value", width, source)
            tensors |= _linear(f"{layer}.{part}.output.dense", width, width)
            tensors |= _norm(f"{layer}.{part}.output.LayerNorm", width)
        tensors |= _linear(f"{layer}.intermediate.dense", 64, width) | _linear(f"{layer}.output.dense", width, 64)
        tensors |= _norm(f"{layer}.output.LayerNorm", width)
    return tensors


def small_aesthetic(folder: Path, width: int) -> Path:
    """Write the five linear layers of the aesthetic predictor, under the numbers they have between dropouts."""
    torch.manual_seed(2)
    sizes = (width, 10, 8, 6, 4, 1)
    folder.mkdir(parents=True)
    tensors = {}
    for number, before, after in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        tensors |= {f"layers.{number}.weight": torch.randn(after, before), f"layers.{number}.bias": torch.randn(after)}
    torch.save(tensors, folder / AESTHETIC)
    return folder


def small_pickscore(folder: Path) -> Path:
    """Write a CLIP in transformers' layout."""
    return small_clip(folder)


def copy_without(folder: Path, name: str, copy: Path) -> Path:
    """Copy a folder of weights, all but one file."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(name))
    return copy


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # the part of Qwen's that one question uses
_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def small_judge(folder: Path) -> Path:
    """Write a Qwen3-VL with two layers, patches of 4 x 4 pixels, and a tokenizer of single bytes."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(4)
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = CHAT
    ids = dict(zip(_MARKS, tokenizer.convert_tokens_to_ids(list(_MARKS)), strict=True))
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.4}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():  # so that this random judge often says Yes, but not always
        model.lm_head.weight[list(ids.values())] = 0
        model.lm_head.weight[[tokenizer.encode(answer)[0] for answer in "nt2"]] *= 4
        often, yes = (tokenizer.encode(answer)[0] for answer in "pY")
        model.lm_head.weight[[often, yes]] = model.lm_head.weight[[yes, often]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)
    return folder


def small_llava(folder: Path) -> Path:
    """Write a LLaVA with two layers and images of 16 x 16 pixels in 4 patches: a judge that is not a Qwen."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(5)
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **sizes}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "initializer_range": 0.4, **sizes}
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    template = (
        "{% for m in messages %}USER: {% for part in m.content %}{% if part.type == 'image' %}<image>\n{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
    )
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def small_hpsv3(folder: Path) -> Path:
    """Write a Qwen2-VL with a reward token and a reward head, its tensors named as transformers did in 2024."""
    from safetensors.torch import save_file
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(6)
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = CHAT
    ids = dict(zip(_MARKS, tokenizer.convert_tokens_to_ids(list(_MARKS)), strict=True))
    text = {"vocab_size": len(tokenizer) + 1, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision | {"initializer_range": 0.4}, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    tensors = Qwen2VLForConditionalGeneration(config).state_dict()
    for new, old in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        tensors = {f"{old}{name.removeprefix(new)}" if name.startswith(new) else name: v for name, v in tensors.items()}
    for number, before, after in ((0, 32, 12), (3, 12, 6), (5, 6, 2)):
        tensors |= _linear(f"rm_head.{number}", after, before)
    folder.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "HPSv3.safetensors")
    config.text_config.vocab_size = len(tokenizer)  # of the model that was tuned
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4).save_pretrained(folder)
    (folder / "data_collator_qwen.py").write_text(
        f'import nowhere\n\nINSTRUCTION = """{HPSV3_TEXTS[0]}"""\nprompt_with_special_token = """{HPSV3_TEXTS[1]}"""\n'
    )
    return folder


HPSV3_TEXTS = ("\nRate it.  \nTextual prompt - {text_prompt}\n\n", "\nThe rating: <|Reward|>\n\nEND\n")
