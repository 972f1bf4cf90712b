"""HPSv3: Qwen2-VL-7B reads the image and the prompt, and a small head turns the hidden state of a reward token into the
mean and the deviation of human preference (Ma et al. 2025); the score is the mean."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from muralist.data.decode import decode_image
from muralist.evaluate.decoders import FeatureItem
from muralist.evaluate.encoders import Encoder, LoadedEncoder
from muralist.evaluate.features import pair_items
from muralist.evaluate.scores import ImageScore, build_model, unusable
from muralist.evaluate.scores.vlm_judge import qwen_builder
from muralist.models.weights import read_file
from muralist.settings import EvaluateSettings

if TYPE_CHECKING:
    from muralist.evaluate.scores import ComputeFeatures

WEIGHTS, INSTRUCTIONS = "HPSv3.safetensors", "data_collator_qwen.py"
_REWARD_TOKEN = "<|Reward|>"
_TOKENS = 256  # of an image: it is resized to about so many, whatever its size
_HEAD = (0, 3, 5)  # linear layers of an nn.Sequential, with ReLU between them and one dropout
_TEXTS = ("INSTRUCTION", "prompt_with_special_token")


class HpsV3Encoder(Encoder):
    """The mean preference of an image and its prompt; `source` is the file of the weights."""

    def load(self, device: torch.device) -> LoadedEncoder:
        """Read the weights, in the precision in which they are stored; the head computes in float32."""
        folder, tensors = self.source.parent, read_file(self.source)
        model = _build(tensors, folder, device_map={"": device})
        head = [[tensors[f"rm_head.{n}.{part}"].float().to(device) for part in ("weight", "bias")] for n in _HEAD]
        build, image_token = qwen_builder(folder, [_REWARD_TOKEN], _TOKENS), model.config.image_token_id
        instruction = read_instruction(folder)

        def prepare(pair: tuple[bytes, str]) -> dict[str, Tensor]:
            data, prompt = pair
            text = instruction.replace("{text_prompt}", prompt.replace(_REWARD_TOKEN, ""))
            inputs, tokenizer = build(decode_image(data), text)
            place = inputs["input_ids"] == tokenizer.convert_tokens_to_ids(_REWARD_TOKEN)
            return {**inputs, "place": place}

        def compute(row: Mapping[str, Tensor]) -> Tensor:
            inputs = {name: value.to(device) for name, value in row.items()}
            embeddings = model.get_input_embeddings()(inputs["input_ids"])
            seen = model.model.get_image_features(inputs["pixel_values"].to(model.dtype), inputs["image_grid_thw"])
            is_image = (inputs["input_ids"] == image_token)[..., None].expand_as(embeddings)
            embeddings = embeddings.masked_scatter(is_image, torch.cat(list(seen.pooler_output)).to(embeddings.dtype))
            # Without position_ids, image tokens count like words: so the published model was trained.
            hidden = model.model.language_model(
                inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], use_cache=False
            ).last_hidden_state
            reward = hidden[inputs["place"]].float()
            for weight, bias in head[:-1]:
                reward = F.relu(F.linear(reward, weight, bias))
            return F.linear(reward, *head[-1])[:, :1]

        return LoadedEncoder(prepare, compute, lambda rows: rows[0], max_batch=1)


def _build(tensors: Mapping[str, Tensor], folder: Path, **options: Any) -> Any:
    from transformers import AutoConfig, Qwen2VLForConditionalGeneration

    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backbone = {name: value for name, value in tensors.items() if not name.startswith("rm_head.")}
    config.text_config.vocab_size = len(backbone["lm_head.weight"])  # with the reward token
    dtype = backbone["lm_head.weight"].dtype
    return build_model(Qwen2VLForConditionalGeneration, config, backbone, dtype=dtype, **options)


def read_instruction(folder: Path) -> str:
    """Return the text around the prompt, which the model was trained with, from its authors' file; no code is run."""
    tree = ast.parse((folder / INSTRUCTIONS).read_text(encoding="utf-8"))
    found = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    text = "".join(found[name] for name in _TEXTS)
    if "{text_prompt}" not in text or text.count(_REWARD_TOKEN) != 1:
        raise ValueError(f"{INSTRUCTIONS} does not hold the instruction")
    return text


@dataclass(frozen=True)
class HpsV3(ImageScore):
    """The mean preference."""

    encoder: HpsV3Encoder

    @property
    def note(self) -> str:
        """How it is computed."""
        return f"the mean that the reward head predicts; images resized to {_TOKENS} tokens"

    def values(self, images: Sequence[FeatureItem], prompts: Sequence[str], compute: ComputeFeatures) -> np.ndarray:
        """Return the score of each image."""
        return compute(self.encoder, pair_items(images, prompts), "images with prompts").aligned(len(images))[:, 0]


def _open(folder: Path, sha256: str, settings: EvaluateSettings) -> ImageScore:
    try:
        tensors = read_file(folder / WEIGHTS, shapes_only=True)
        _build(tensors, folder, device_map="meta")
        if missing := [number for number in _HEAD if f"rm_head.{number}.weight" not in tensors]:
            raise ValueError(f"the tensor rm_head.{missing[0]}.weight is missing")
        read_instruction(folder)
        qwen_builder(folder, [_REWARD_TOKEN], _TOKENS)
    except Exception as error:  # of a foreign file
        raise unusable("hpsv3", folder, error) from None
    return HpsV3(folder, sha256, HpsV3Encoder(folder / WEIGHTS, sha256, 1, "hpsv3"))


OPENERS = {"hpsv3": _open}
