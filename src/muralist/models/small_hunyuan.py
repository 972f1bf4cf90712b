"""A small HunyuanDiT, made offline: every part of the real pipeline in diffusers layout, sized for a laptop's CPU.

Its autoencoder was trained on driving_world by scripts/train_small_vae.py and is part of the package. The two text
encoders are random and stay so: what a diffusion model needs of them is that different captions look different and equal
words alike, and wide random word vectors with a little mixing give that. The transformer starts random, to be trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from diffusers import AutoencoderKL, DDPMScheduler, HunyuanDiT2DModel
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizer, T5Config, T5EncoderModel, T5Tokenizer
from transformers.utils import logging as transformers_logging

from muralist.data.driving_props import HOURS, SEASONS, WEATHERS
from muralist.data.driving_world import PROMPTS
from muralist.errors import UserError
from muralist.models.hunyuan_family import BERT_TOKENS, T5_TOKENS
from muralist.runfolder import disk_error, flush_folder, no_space, write_json

Variant = Literal["1.1", "1.2"]

ASSETS = Path(__file__).parent / "assets"
VAE_WEIGHTS, VAE_CONFIG = ASSETS / "driving_world_vae.safetensors", ASSETS / "driving_world_vae.json"
RECIPE_FILE = "muralist.json"
# Raise it whenever a change alters any weight or token: folders of the old recipe are then no longer taken for new ones.
RECIPE_VERSION = 2
# What HunyuanDiT is trained on where a picture has no caption: "make any picture".
EMPTY_CAPTION = "随机生成一张图片"
TEXT_WIDTH = 64
# How much a word's vector outweighs that of its position: at 1, captions that differ in one word are hard to tell apart.
WORD_EMPHASIS = 3.0
BETA_START = 0.00085
BETA_END: dict[Variant, float] = {"1.1": 0.03, "1.2": 0.018}


def build_small_hunyuan(folder: Path, variant: Variant = "1.2", seed: int = 0) -> Path:
    """Write a HunyuanDiTPipeline folder that appears whole, or find the one that an equal call left there."""
    if variant not in get_args(Variant):
        raise UserError(
            f"There is no small HunyuanDiT {variant}.", fix=f"Choose one of {', '.join(get_args(Variant))}."
        )
    folder = Path(folder)
    recipe = _recipe(variant, seed)
    if _holds(folder, recipe):
        return folder
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        pipeline: Any = assemble_small_hunyuan(variant, seed)  # diffusers hides its methods from type checkers
        with _without_progress_bars():
            pipeline.save_pretrained(aside)
        write_json(aside / RECIPE_FILE, recipe)
        _settle(aside)
        _move(aside, folder, recipe)
    except (OSError, SafetensorError) as error:
        raise no_space(disk_error(error), folder) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def assemble_small_hunyuan(variant: Variant = "1.2", seed: int = 0) -> Any:
    """The pipeline in memory, in eval mode and single precision; torch's random state is left as it was."""
    words, signs = caption_words(), fallback_signs()
    bert_tokenizer, t5_tokenizer = _bert_tokenizer(words, signs), _t5_tokenizer(words, signs)
    with torch.random.fork_rng(devices=[]):
        text_encoder = _seeded(seed, BertModel, _bert_config(len(bert_tokenizer)))
        text_encoder.embeddings.word_embeddings.weight.data.mul_(WORD_EMPHASIS)
        text_encoder_2 = _seeded(seed, T5EncoderModel, _t5_config(len(t5_tokenizer)))
        transformer = _seeded(seed, HunyuanDiT2DModel, **_transformer_config(variant))
        vae = load_small_vae()
    return _pipeline_class()(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=bert_tokenizer,
        transformer=transformer,
        scheduler=_scheduler(variant),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer,
    )


def load_small_vae() -> AutoencoderKL:
    """The autoencoder that was trained on driving_world, with its measured scaling factor."""
    with torch.random.fork_rng(devices=[]):
        vae: Any = AutoencoderKL(**json.loads(VAE_CONFIG.read_text())["config"])
    vae.load_state_dict({name: value.float() for name, value in load_file(VAE_WEIGHTS).items()})
    return vae.eval()


def caption_words() -> list[str]:
    """The words of every driving_world caption, as they are written there, in the order in which they come."""
    texts = list(PROMPTS)
    texts += [part.words for part in (*HOURS, *SEASONS, *WEATHERS)]
    texts += [weather.words_in_rain for weather in WEATHERS]
    return list(dict.fromkeys(" ".join(texts).split()))


def fallback_signs() -> list[str]:
    """Single signs from which every other English word can be put together, and those of the empty caption."""
    return list(dict.fromkeys(string.digits + string.ascii_letters + string.punctuation + EMPTY_CAPTION))


def _seeded(seed: int, build: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Build a part whose weights depend on the seed alone, not on what was built before it."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    return build(*arguments, **settings).eval()


def _bert_tokenizer(words: list[str], signs: list[str]) -> BertTokenizer:
    """Word pieces: whole words, then single signs; upper case is folded away, as in the real one."""
    signs = [sign.lower() for sign in signs]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word.lower() for word in words), *signs]
    pieces += [f"##{sign}" for sign in signs]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocabulary, model_max_length=BERT_TOKENS)


def _t5_tokenizer(words: list[str], signs: list[str]) -> T5Tokenizer:
    """Unigrams: a whole word is likelier than its signs one by one."""
    spellings = dict.fromkeys(spelling for word in words for spelling in (word, word.lower(), word.capitalize()))
    pieces = dict.fromkeys(("<pad>", "</s>", "<unk>"), 0.0)
    pieces |= {f"▁{word}": -4.0 for word in spellings}
    pieces |= dict.fromkeys(("▁", *signs), -8.0)
    return T5Tokenizer(vocab=list(pieces.items()), extra_ids=0, model_max_length=T5_TOKENS)


def _bert_config(vocabulary: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * TEXT_WIDTH,
        max_position_embeddings=BERT_TOKENS,
        initializer_range=TEXT_WIDTH**-0.5,  # the usual 0.02 is for wide layers: here it would mix nothing
    )


def _t5_config(vocabulary: int) -> T5Config:
    return T5Config(
        vocab_size=vocabulary,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )


def _transformer_config(variant: Variant) -> dict[str, Any]:
    """The real network's settings, fewer and narrower layers; of six, two have a skip."""
    return {
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


def _scheduler(variant: Variant) -> DDPMScheduler:
    return DDPMScheduler(
        beta_start=BETA_START,
        beta_end=BETA_END[variant],
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,  # latents are not confined to [-1, 1]
        steps_offset=1,
    )


def _recipe(variant: Variant, seed: int) -> dict[str, Any]:
    """Everything a folder's content follows from."""
    digest = hashlib.sha256(VAE_WEIGHTS.read_bytes() + VAE_CONFIG.read_bytes()).hexdigest()
    return {"small_hunyuan": RECIPE_VERSION, "variant": variant, "seed": seed, "vae_sha256": digest}


def _holds(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether a folder is there already; one with anything else in it is refused."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = dict(json.loads((folder / RECIPE_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        found = {}
    if found == recipe:
        return True
    different = [
        f"{name} {found.get(name)} instead of {value}"
        for name, value in recipe.items()
        if found.get(name, value) != value
    ]
    raise UserError(
        f"{folder} exists and is not the small HunyuanDiT that is wanted.",
        f"It has {', '.join(different)}." if different else f"It has no {RECIPE_FILE} to tell what it is.",
        "Remove it, or name a folder that does not exist yet.",
    )


def _pipeline_class() -> Any:
    """HunyuanDiTPipeline; its import warns that torchvision is missing, which nothing here needs."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        from diffusers import HunyuanDiTPipeline

        return HunyuanDiTPipeline
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep the libraries from drawing six bars for files that are written at once."""
    shown = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def _settle(folder: Path) -> None:
    """Bring the files of a folder to the disk, readable by whoever may read its configuration."""
    mode = (folder / RECIPE_FILE).stat().st_mode
    for file in folder.rglob("*"):
        if file.is_dir():
            flush_folder(file)
        else:
            file.chmod(mode)  # safetensors lets only the owner read
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    flush_folder(folder)


def _move(aside: Path, folder: Path, recipe: dict[str, Any]) -> None:
    """Rename the finished folder; another process may have been faster with the same."""
    try:
        aside.replace(folder)
    except OSError:
        if not _holds(folder, recipe):
            raise
    flush_folder(folder.parent)
