"""Tokenizers and text encoders of a few thousand weights, made offline; every one reads any English text."""

from __future__ import annotations

import re
import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

WIDTH = 32
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_SIGNS = string.digits + string.ascii_letters + string.punctuation
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": WIDTH}
_STRONG = {"initializer_range": 0.3}  # the usual 0.02 would make all texts alike in so narrow a model


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def bert() -> tuple[Any, Any]:
    signs = list(dict.fromkeys(_SIGNS.lower()))
    vocabulary = _numbered(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{sign}" for sign in signs)])
    config = BertConfig(vocab_size=len(vocabulary), hidden_size=WIDTH, max_position_embeddings=77, **_LAYERS, **_STRONG)
    return BertTokenizer(vocab=vocabulary, model_max_length=77), BertModel(config)


def _t5_tokenizer() -> Any:
    pieces = [*dict.fromkeys(("<pad>", "</s>", "<unk>"), 0.0).items(), *((sign, -8.0) for sign in f"▁{_SIGNS}")]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=256)


def _t5_sizes(tokenizer: Any) -> dict[str, Any]:
    return {"vocab_size": len(tokenizer), "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2,
            "num_heads": 2, "feed_forward_proj": "gated-gelu", "use_cache": False}  # fmt: skip


def t5(width: int = WIDTH) -> tuple[Any, Any]:
    tokenizer = _t5_tokenizer()
    return tokenizer, T5EncoderModel(T5Config(**(_t5_sizes(tokenizer) | {"d_model": width})))


def umt5() -> tuple[Any, Any]:
    tokenizer = _t5_tokenizer()
    return tokenizer, UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer)))


def clip(projected: bool = False) -> tuple[Any, Any]:
    alphabet = sorted(ByteLevel.alphabet())  # its order is random
    pieces = [*alphabet, *(f"{sign}</w>" for sign in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = _numbered(pieces)
    end = vocabulary["<|endoftext|>"]
    config = CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=WIDTH, projection_dim=WIDTH, max_position_embeddings=77,
        bos_token_id=end - 1, eos_token_id=end, pad_token_id=end, **_LAYERS,
    )  # fmt: skip
    config.initializer_factor = 10.0
    model = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77), model


def gemma() -> tuple[Any, Any]:
    """With a first token in every text."""
    vocabulary = _numbered(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "\n", *_SIGNS])
    config = Gemma2Config(
        vocab_size=len(vocabulary), hidden_size=WIDTH, num_key_value_heads=1, head_dim=8, sliding_window=64,
        query_pre_attn_scalar=8, **(_LAYERS | {"num_hidden_layers": 1}), **_STRONG,
    )  # fmt: skip
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[])
    return _with_first(tokenizer, "<bos>"), Gemma2Model(config)


def _with_first(tokenizer: Any, token: str) -> Any:
    """Let every text begin with a token: an empty one would have none."""
    first = [(token, tokenizer.convert_tokens_to_ids(token))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=first)
    return tokenizer


def qwen_tokenizer() -> Any:
    vocabulary = _numbered([*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen3(layers: int = 2) -> tuple[Any, Any]:
    """With more than two layers, as a causal language model."""
    tokenizer = qwen_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_key_value_heads=1, head_dim=8,
        **(_LAYERS | {"num_hidden_layers": layers}), **_STRONG,
    )  # fmt: skip
    return tokenizer, (Qwen3Model if layers == 2 else Qwen3ForCausalLM)(config)


def glm() -> tuple[Any, Any]:
    """With a first token in every text, as GLM's."""
    tokenizer = _with_first(qwen_tokenizer(), "<|im_start|>")
    config = GlmConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_key_value_heads=1, head_dim=8, pad_token_id=0, **_LAYERS,
        **_STRONG,
    )  # fmt: skip
    return tokenizer, GlmModel(config)


def llama(template: str) -> tuple[Any, Any]:
    """With the words of the pipeline's template as tokens, and layers enough for one before the last two."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(re.findall(r"\s?\w+|[^\w\s]", template))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_key_value_heads=1, head_dim=8, pad_token_id=0,
        **(_LAYERS | {"num_hidden_layers": 3}), **_STRONG,
    )  # fmt: skip
    return tokenizer, LlamaModel(config)


def qwen25_vl(template: str) -> tuple[Any, Any]:
    """With the words of the pipeline's template as tokens: character by character it would dominate every prompt."""
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(re.findall(r"\s?\w+|[^\w\s]", template))
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 10000.0}
    text = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_key_value_heads": 1, "rope_parameters": rope,
            **_LAYERS, **_STRONG}  # fmt: skip
    vision = {"depth": 1, "hidden_size": WIDTH, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return tokenizer, Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(vocabulary: int) -> Any:
    """The config of a Qwen3-VL."""
    rope = {"rope_type": "default", "mrope_section": [2, 2, 4], "mrope_interleaved": True, "rope_theta": 10000.0}
    text = {"vocab_size": vocabulary, "hidden_size": WIDTH, "head_dim": 16, "num_key_value_heads": 1,
            "rope_parameters": rope, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
            **_STRONG}  # fmt: skip
    vision = {"depth": 1, "hidden_size": WIDTH, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    return Qwen3VLConfig(text_config=text, vision_config=vision)
