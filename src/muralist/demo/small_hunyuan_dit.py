"""A small HunyuanDiT, built offline: every component of the real pipeline in diffusers layout, sized for a CPU.

Its VAE was trained on driving_world by scripts/train_small_vae.py and ships with the package. The two text encoders are
random and stay so: a diffusion model needs embeddings that differ between captions and agree on equal words, which wide
random word embeddings with a little mixing give. The transformer is random, to be trained.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, DDPMScheduler, HunyuanDiT2DModel
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizer, T5Config, T5EncoderModel, T5Tokenizer
from transformers.utils import logging as transformers_logging

from muralist.core.errors import UserError
from muralist.core.run_dir import atomic_folder, atomic_write_json
from muralist.demo.driving_props import HOURS, SEASONS, WEATHERS
from muralist.demo.driving_world import PROMPTS
from muralist.models.configs import HUNYUAN_BETA_END, HUNYUAN_BETA_START
from muralist.models.hunyuan_dit import BERT_TOKENS, T5_TOKENS

Variant = Literal["1.1", "1.2"]

ASSETS = Path(__file__).parent / "assets"
VAE_WEIGHTS, VAE_CONFIG = ASSETS / "driving_world_vae.safetensors", ASSETS / "driving_world_vae.json"
RECIPE_FILE = "muralist.json"
# Increase it with every change of a weight or token, so that folders of an older recipe are not reused.
RECIPE_VERSION = 2
# The caption of HunyuanDiT's training images without one: "generate any image".
EMPTY_CAPTION = "随机生成一张图片"
TEXT_WIDTH = 64
# Scale of word embeddings to position embeddings: at 1, captions that differ in one word are hard to tell apart.
WORD_EMPHASIS = 3.0


def build_small_hunyuan_dit(folder: Path, variant: Variant = "1.2", seed: int = 0) -> Path:
    """Write the folder of a HunyuanDiTPipeline, or find the one that an equal call wrote."""
    folder, recipe = Path(folder), _recipe(variant, seed)
    if _holds(folder, recipe):
        return folder
    pipeline: Any = assemble_small_hunyuan(variant, seed)  # diffusers hides its methods from type checkers
    try:
        with atomic_folder(folder) as temporary:
            pipeline.save_pretrained(temporary)
            atomic_write_json(temporary / RECIPE_FILE, recipe)
    except UserError:
        if not _holds(folder, recipe):  # another process may have been faster
            raise
    return folder


def assemble_small_hunyuan(variant: Variant = "1.2", seed: int = 0) -> Any:
    """Build the pipeline in memory, in eval mode and float32, without changing torch's random state."""
    words, characters = caption_words(), fallback_characters()
    bert_tokenizer, t5_tokenizer = _bert_tokenizer(words, characters), _t5_tokenizer(words, characters)
    bert_config = BertConfig(
        vocab_size=len(bert_tokenizer),
        hidden_size=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * TEXT_WIDTH,
        max_position_embeddings=BERT_TOKENS,
        initializer_range=TEXT_WIDTH**-0.5,  # the usual 0.02 suits wide layers; here it would mix nothing
    )
    t5_config = T5Config(
        vocab_size=len(t5_tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    # The real network's config with fewer and narrower layers; two of six have a skip connection.
    transformer_config = {
        "sample_size": 8,
        "in_channels": 4,
        "patch_size": 2,
        "num_layers": 6,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "hidden_size": 128,
        "mlp_ratio": 4.3637,
        "activation_fn": "gelu-approximate",
        "learn_sigma": True,
        "cross_attention_dim": TEXT_WIDTH,
        "cross_attention_dim_t5": TEXT_WIDTH,
        "pooled_projection_dim": TEXT_WIDTH,
        "text_len": BERT_TOKENS,
        "text_len_t5": T5_TOKENS,
        "use_style_cond_and_image_meta_size": variant == "1.1",
    }
    scheduler = DDPMScheduler(
        beta_start=HUNYUAN_BETA_START,
        beta_end=HUNYUAN_BETA_END[variant],
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,  # latents are not confined to [-1, 1]
        steps_offset=1,
    )
    with torch.random.fork_rng(devices=[]):
        text_encoder = _seeded(seed, BertModel, bert_config)
        text_encoder.embeddings.word_embeddings.weight.data.mul_(WORD_EMPHASIS)
        text_encoder_2 = _seeded(seed, T5EncoderModel, t5_config)
        transformer = _seeded(seed, HunyuanDiT2DModel, **transformer_config)
    return _pipeline_class()(
        vae=load_small_vae(),
        text_encoder=text_encoder,
        tokenizer=bert_tokenizer,
        transformer=transformer,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer,
    )


def load_small_vae() -> AutoencoderKL:
    """Load the VAE that was trained on driving_world, with its measured scaling factor."""
    with torch.random.fork_rng(devices=[]):
        vae: Any = AutoencoderKL(**json.loads(VAE_CONFIG.read_text())["config"])
    vae.load_state_dict({name: value.float() for name, value in load_file(VAE_WEIGHTS).items()})
    return vae.eval()


def caption_words() -> list[str]:
    """Return the words of all driving_world captions, in order of appearance."""
    texts = [*PROMPTS, *(part.caption for part in (*HOURS, *SEASONS, *WEATHERS))]
    texts += [weather.rain_caption for weather in WEATHERS]
    return list(dict.fromkeys(" ".join(texts).split()))


def fallback_characters() -> list[str]:
    """Return the characters that spell every other English word, and those of the empty caption."""
    return list(dict.fromkeys(string.digits + string.ascii_letters + string.punctuation + EMPTY_CAPTION))


def _seeded(seed: int, build: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Build a component whose weights depend on the seed alone, not on what was built before."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    return build(*arguments, **settings).eval()


def _bert_tokenizer(words: list[str], characters: list[str]) -> BertTokenizer:
    """WordPiece: words, then characters; lower case, as in the real tokenizer."""
    characters = [character.lower() for character in characters]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word.lower() for word in words), *characters]
    pieces += [f"##{character}" for character in characters]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocabulary, model_max_length=BERT_TOKENS)


def _t5_tokenizer(words: list[str], characters: list[str]) -> T5Tokenizer:
    """Unigram: a word is likelier than its characters."""
    spellings = dict.fromkeys(spelling for word in words for spelling in (word, word.lower(), word.capitalize()))
    pieces = dict.fromkeys(("<pad>", "</s>", "<unk>"), 0.0)
    pieces |= {f"▁{word}": -4.0 for word in spellings}
    pieces |= dict.fromkeys(("▁", *characters), -8.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=T5_TOKENS)


def _recipe(variant: Variant, seed: int) -> dict[str, Any]:
    """Return everything that determines the content of a folder."""
    digest = hashlib.sha256(VAE_WEIGHTS.read_bytes() + VAE_CONFIG.read_bytes()).hexdigest()
    return {"small_hunyuan": RECIPE_VERSION, "variant": variant, "seed": seed, "vae_sha256": digest}


def _holds(folder: Path, recipe: dict[str, Any]) -> bool:
    """Return whether a folder holds this model already; refuse a folder with other content."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = dict(json.loads((folder / RECIPE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        found = {}
    if found == recipe:
        return True
    raise UserError(
        f"{folder} exists and is not this small HunyuanDiT.",
        f"It was built from another recipe ({RECIPE_FILE})." if found else f"It has no {RECIPE_FILE}.",
        "Remove it, or name a folder that does not exist yet.",
    )


def _pipeline_class() -> Any:
    """Import HunyuanDiTPipeline without its warning about torchvision, which is not needed."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        from diffusers import HunyuanDiTPipeline

        return HunyuanDiTPipeline
    finally:
        transformers_logging.set_verbosity(verbosity)
