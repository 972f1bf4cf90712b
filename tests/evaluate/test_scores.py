"""Scores of single images against their authors' formulas, on small random weights in the published formats."""

from __future__ import annotations

import csv
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from muralist.cli import main
from muralist.evaluate.features import BATCH, Features, hash_files
from muralist.evaluate.report import METRICS
from muralist.evaluate.scores import SCORES
from muralist.evaluate.scores.vlm_judge import DpgBench, DpgQuestion, JudgeEncoder
from tests.conftest import REPOSITORY
from tests.support.evaluating import evaluate, scenes, write_images
from tests.support.runs import finish, fork
from tests.support.score_models import (
    AESTHETIC,
    HPSV2,
    HPSV3_TEXTS,
    copy_without,
    small_aesthetic,
    small_hpsv2,
    small_hpsv3,
    small_imagereward,
    small_judge,
    small_llava,
    small_pickscore,
)

pytestmark = pytest.mark.usefixtures("clean_environment")
PROMPTS = ["a red square", "Two dogs, one cat!", "a  green   field " * 12]
MEAN, STD = (np.array(v) for v in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three images of several shapes, and prompts.csv with their categories beside it."""
    folder = tmp_path_factory.mktemp("scored") / "images"
    folder.mkdir()
    for number, (pixels, size) in enumerate(zip(scenes(3, 7, 40), ((28, 28), (60, 34), (30, 48)), strict=True)):
        Image.fromarray(pixels).resize(size).save(folder / f"{number:06d}.png")
    lines = ["image_id,prompt,category,level"]
    lines += [f'{i:06d},"{prompt}",{"odd" if i % 2 else "even"},{i}' for i, prompt in enumerate(PROMPTS)]
    (folder.parent / "prompts.csv").write_text("\n".join(lines))
    return folder


def scored(images: Path, output: Path, *flags: object) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Evaluate; returns report.json and the columns of scores.parquet."""
    report = evaluate(output, "--images", images, "--prompts_csv", images.parent / "prompts.csv", *flags)
    return report, pyarrow.parquet.read_table(output / "scores.parquet").to_pydict()


def opened(images: Path) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in sorted(images.iterdir())]


def cropped(image: Image.Image, side: int) -> np.ndarray:
    """Resize the shorter side with Pillow and crop the center, [3, side, side], as torchvision's transforms do."""
    scale = side / min(image.size)
    size = [side if edge == min(image.size) else int(edge * scale) for edge in image.size]
    image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    left, top = (round((edge - side) / 2) for edge in image.size)
    pixels = np.asarray(image.crop((left, top, left + side, top + side))) / 255
    return ((pixels - MEAN) / STD).transpose(2, 0, 1)


def test_scores_on_clip_embeddings(images: Path, clip: Path, tmp_path: Path) -> None:
    pick, hps = small_pickscore(tmp_path / "pick"), small_hpsv2(tmp_path / "hps")
    aesthetic = small_aesthetic(tmp_path / "aesthetic", 12)
    flags = ("--pickscore_weights", pick, "--hpsv2_weights", hps, "--aesthetic_weights", aesthetic, "--clip_path", clip)
    report, columns = scored(images, tmp_path / "out", *flags)
    assert list(columns) == ["image", "prompt", "clip_score", "pickscore", "hpsv2", "aesthetic", "category", "level"]
    assert columns["image"] == [f"{number:06d}.png" for number in range(3)]
    assert columns["prompt"] == [prompt.strip() for prompt in PROMPTS]
    assert columns["category"] == ["even", "odd", "even"]
    np.testing.assert_allclose(columns["pickscore"], [pickscore(pick, *pair) for pair in pairs(images)], atol=1e-3)
    np.testing.assert_allclose(columns["hpsv2"], [hpsv2(hps, *pair) for pair in pairs(images)], atol=1e-3)
    expected = [aesthetic_score(aesthetic, clip, image) for image in opened(images)]
    np.testing.assert_allclose(columns["aesthetic"], expected, atol=1e-3)
    for key in ("pickscore", "hpsv2", "aesthetic"):
        assert np.ptp(columns[key]) > 1e-2  # not the same for all
        score = report["scores"][key]
        assert (
            score["value"] == pytest.approx(np.mean(columns[key])) and score["low"] <= score["value"] <= score["high"]
        )
        assert len(report["settings"][f"{key}_sha256"]) == 64
    assert "1 prompt is longer than the 77 tokens PickScore reads, and is truncated." in report["warnings"]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert all(f">{SCORES[key].title}</span>" in page for key in ("pickscore", "hpsv2", "aesthetic"))


def pairs(images: Path) -> list[tuple[Image.Image, str]]:
    return list(zip(opened(images), PROMPTS, strict=True))


def pickscore(folder: Path, image: Image.Image, prompt: str) -> float:
    """As in the README of yuvalkirstain/PickScore at f79607f: each text alone, without padding."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    tokens = tokenizer(prompt, truncation=True, max_length=77, return_tensors="pt")
    pixels = torch.from_numpy(cropped(image, 16)).float()[None]
    with torch.no_grad():
        seen = model(pixel_values=pixels, **tokens)
        scores = model.logit_scale.exp() * (
            F.normalize(seen.text_embeds, dim=-1) @ F.normalize(seen.image_embeds, dim=-1).T
        )
    return float(scores)


def aesthetic_score(folder: Path, clip: Path, image: Image.Image) -> float:
    """As in simple_inference.py of christophschuhmann/improved-aesthetic-predictor at 6934dd8."""
    from transformers import CLIPModel

    tensors = torch.load(folder / AESTHETIC, weights_only=True)
    layers = torch.nn.Sequential(
        torch.nn.Linear(12, 10), torch.nn.Dropout(0.2), torch.nn.Linear(10, 8), torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 6), torch.nn.Dropout(0.1), torch.nn.Linear(6, 4), torch.nn.Linear(4, 1),
    ).eval()  # fmt: skip
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in tensors.items()})
    model = CLIPModel.from_pretrained(clip)
    with torch.no_grad():
        embedding = model.visual_projection(
            model.vision_model(torch.from_numpy(cropped(image, 16)).float()[None]).pooler_output
        )
        return float(layers(embedding / embedding.norm()))


def hpsv2(folder: Path, image: Image.Image, prompt: str) -> float:
    """As in hpsv2/img_score.py of tgxs002/HPSv2 at 866735e, times 100 as in its benchmark: open_clip's network."""
    from transformers import CLIPTokenizer

    w = {name: v.float() for name, v in torch.load(folder / HPSV2, weights_only=True)["state_dict"].items()}
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    height, width = pixels.shape[1:]
    if max(height, width) != 28:
        size = (round(height * 28 / max(height, width)), round(width * 28 / max(height, width)))
        small = F.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
        top, left = (28 - size[0]) // 2, (28 - size[1]) // 2
        pixels = torch.zeros(3, 28, 28)
        pixels[:, top : top + size[0], left : left + size[1]] = small
    pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    x = F.conv2d(pixels.float()[None], w["visual.conv1.weight"], stride=14).flatten(2).transpose(1, 2)
    x = torch.cat((w["visual.class_embedding"].expand(1, 1, -1), x), 1) + w["visual.positional_embedding"]
    x = blocks(norm(x, w, "visual.ln_pre"), w, "visual.transformer", 80, None)
    of_image = norm(x[:, 0], w, "visual.ln_post") @ w["visual.proj"]

    tokenizer = CLIPTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, truncation=True, max_length=77)["input_ids"]
    tokens = torch.tensor([ids + [0] * (77 - len(ids))])
    mask = torch.full((77, 77), -torch.inf).triu(1)
    x = blocks(w["token_embedding.weight"][tokens] + w["positional_embedding"], w, "transformer", 64, mask)
    of_text = norm(x, w, "ln_final")[0, tokens.argmax()] @ w["text_projection"]
    return 100 * float(F.normalize(of_image, dim=-1) @ F.normalize(of_text, dim=-1))


def test_prompts_of_hpsv2_are_cleaned_as_by_open_clip(tmp_path: Path) -> None:
    """Its tokenizer straightens quotes and resolves HTML's entities: the score is that of the plain prompt."""
    plain = ['the dog\'s "red" ball & a hat, fine', "a < b"]
    written = ["the dog\u2019s \u201cred\u201d ball &amp;amp; a hat\uff0c \ufb01ne", "a &lt; b"]
    folder = small_hpsv2(tmp_path / "hps")
    images = write_images(tmp_path / "images", scenes(2, 3, 28))
    for name, prompts in (("plain", plain), ("written", written)):
        with (tmp_path / "prompts.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image_id", "prompt"), *((f"{i:06d}", p) for i, p in enumerate(prompts))])
        _, columns = scored(images, tmp_path / name, "--hpsv2_weights", folder)
        assert columns["prompt"] == prompts
        expected = [hpsv2(folder, *pair) for pair in zip(opened(images), plain, strict=True)]
        np.testing.assert_allclose(columns["hpsv2"], expected, atol=1e-3)
    assert abs(hpsv2(folder, opened(images)[0], written[0]) - expected[0]) > 0.01, "the tokenizer alone does not clean"


def test_the_aesthetic_score_crops_as_torchvision(clip: Path, tmp_path: Path) -> None:
    """An odd margin of 3 pixels is cut after 2, where transformers, and so the CLIP score, cuts after 1."""
    images = tmp_path / "images"
    images.mkdir()
    for number, size in enumerate(((34, 28), (28, 34), (28, 28))):
        Image.fromarray(scenes(3, 7, 40)[number]).resize(size).save(images / f"{number:06d}.png")
    folder = small_aesthetic(tmp_path / "aesthetic", 12)
    report = evaluate(tmp_path / "out", "--images", images, "--aesthetic_weights", folder, "--clip_path", clip)
    found = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pydict()["aesthetic"]
    expected = [aesthetic_score(folder, clip, image) for image in opened(images)]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    told = "The LAION aesthetic score is computed with CLIP ViT/8 at 16 px: it was trained on ViT-L/14 at 224 px "
    assert any(text.startswith(told) for text in report["warnings"])


def norm(x: Tensor, w: dict[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Attention of [L, C], [S, C], [S, C]; `mask` says which keys count."""
    q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in (query, key, value))
    weights = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    weights = weights if mask is None else weights.masked_fill(~mask, -torch.inf)
    return (weights.softmax(-1) @ v).transpose(0, 1).flatten(1)


def test_imagereward(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_imagereward(tmp_path / "imagereward")
    report, columns = scored(images, tmp_path / "out", "--imagereward_weights", folder)
    expected = [imagereward(folder, *pair) for pair in pairs(images)]
    np.testing.assert_allclose(columns["imagereward"], expected, atol=1e-3)
    assert np.ptp(expected) > 0.05
    assert "1 prompt is longer than the 35 tokens ImageReward reads, and is truncated." in report["warnings"]
    # The reward depends on the prompt, and the same pair is taken from the cache.
    table = (images.parent / "prompts.csv").read_text().replace("a red square", "a blue circle")
    (tmp_path / "other.csv").write_text(table)
    evaluate(
        tmp_path / "out", "--images", images, "--prompts_csv", tmp_path / "other.csv", "--imagereward_weights", folder
    )
    other = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pydict()["imagereward"]
    assert other[1:] == columns["imagereward"][1:] and abs(other[0] - columns["imagereward"][0]) > 1e-3
    (cache,) = (tmp_path / "out" / "features").iterdir()
    assert sum(file.stat().st_size for file in cache.iterdir()) == 4 * (32 + 4 + 4)
    monkeypatch.setitem(BATCH, "cpu", 2)  # as on a GPU, where pairs are computed in batches
    _, batched = scored(images, tmp_path / "batched", "--imagereward_weights", folder)
    np.testing.assert_allclose(batched["imagereward"], columns["imagereward"], atol=1e-5)


def imagereward(folder: Path, image: Image.Image, prompt: str) -> float:
    """As ImageReward.score of THUDM/ImageReward at c1392c6, with its BLIP written out."""
    from transformers import BertTokenizer

    w = torch.load(folder / "ImageReward.pt", weights_only=True)
    v = {name.removeprefix("blip.visual_encoder."): value for name, value in w.items()}
    x = F.conv2d(
        torch.from_numpy(cropped(image, 32)).float()[None], v["patch_embed.proj.weight"], v["patch_embed.proj.bias"], 16
    )
    x = torch.cat((v["cls_token"][0], x[0].flatten(1).T)) + v["pos_embed"][0]
    for block in ("blocks.0", "blocks.1"):
        mixed = attend(*linear(norm(x, v, f"{block}.norm1", 1e-6), v, f"{block}.attn.qkv").chunk(3, -1), heads=2)
        x = x + linear(mixed, v, f"{block}.attn.proj")
        inner = F.gelu(linear(norm(x, v, f"{block}.norm2", 1e-6), v, f"{block}.mlp.fc1"))
        x = x + linear(inner, v, f"{block}.mlp.fc2")
    seen = norm(x, v, "norm", 1e-6)

    t = {name.removeprefix("blip.text_encoder."): value for name, value in w.items()}
    pieces = (folder / "vocab.txt").read_text().splitlines()
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    tokens = tokenizer(prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    mask = tokens["attention_mask"][0].bool()
    x = t["embeddings.word_embeddings.weight"][tokens["input_ids"][0]] + t["embeddings.position_embeddings.weight"][:35]
    x = norm(x, t, "embeddings.LayerNorm", 1e-12)
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for part, source, valid in (("attention", None, mask), ("crossattention", seen, None)):
            name = f"{layer}.{part}"
            keys = x if source is None else source
            inputs = (linear(y, t, f"{name}.self.{role}") for y, role in ((x, "query"), (keys, "key"), (keys, "value")))
            mixed = linear(attend(*inputs, heads=2, mask=valid), t, f"{name}.output.dense")
            x = norm(x + mixed, t, f"{name}.output.LayerNorm", 1e-12)
        inner = linear(F.gelu(linear(x, t, f"{layer}.intermediate.dense")), t, f"{layer}.output.dense")
        x = norm(x + inner, t, f"{layer}.output.LayerNorm", 1e-12)
    reward = x[0]
    for number in (0, 2, 4, 6, 7):
        reward = linear(reward, w, f"mlp.layers.{number}")
    return float((reward - 0.16717362830052426) / 1.0333394966054072)


def blocks(x: Tensor, w: dict[str, Tensor], prefix: str, head: int, mask: Tensor | None) -> Tensor:
    for name in (f"{prefix}.resblocks.{number}" for number in range(2)):
        attention = torch.nn.MultiheadAttention(x.shape[-1], x.shape[-1] // head, batch_first=True)
        attention.load_state_dict({part: w[f"{name}.attn.{part}"] for part in attention.state_dict()})
        inner = norm(x, w, f"{name}.ln_1")
        with torch.no_grad():
            x = x + attention(inner, inner, inner, attn_mask=mask, need_weights=False)[0]
        inner = F.linear(norm(x, w, f"{name}.ln_2"), w[f"{name}.mlp.c_fc.weight"], w[f"{name}.mlp.c_fc.bias"])
        x = x + F.linear(F.gelu(inner), w[f"{name}.mlp.c_proj.weight"], w[f"{name}.mlp.c_proj.bias"])
    return x


def test_hpsv3(images: Path, tmp_path: Path) -> None:
    folder = small_hpsv3(tmp_path / "hpsv3")
    _, columns = scored(images, tmp_path / "out", "--hpsv3_weights", folder)
    expected = [hpsv3(folder, *pair) for pair in pairs(images)]
    np.testing.assert_allclose(columns["hpsv3"], expected, atol=1e-3)
    assert np.ptp(expected) > 0.02


def hpsv3(folder: Path, image: Image.Image, prompt: str) -> float:
    """As HPSv3RewardInferencer.reward() of MizzenAI/HPSv3 at 72b7eba, which takes the first of two outputs."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    w = load_file(folder / "HPSv3.safetensors")
    config = Qwen2VLConfig.from_pretrained(folder)
    config.text_config.vocab_size += 1
    model = Qwen2VLForConditionalGeneration(config).eval()
    renamed = {f"model.{name}" if name.startswith("visual.") else name: value for name, value in w.items()}
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.") and "visual" not in name
        else name: v
        for name, v in renamed.items()
    }
    model.load_state_dict({name: value for name, value in renamed.items() if not name.startswith("rm_head")})
    # The image: about 256 squares of 8 x 8 pixels, as smart_resize() of qwen_vl_utils with both limits at 256 x 8 x 8.
    pixels, (width, height) = 256 * 64, image.size
    rounded = [max(8, round(edge / 8) * 8) for edge in image.size]
    if rounded[0] * rounded[1] > pixels:
        shrink = (width * height / pixels) ** 0.5
        size = [int(np.floor(edge / shrink / 8)) * 8 for edge in image.size]
    else:
        grow = (pixels / (width * height)) ** 0.5
        size = [int(np.ceil(edge * grow / 8)) * 8 for edge in image.size]
    resized = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[resized], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [[1, size[1] // 4, size[0] // 4]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    patches = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
    asked = HPSV3_TEXTS[0].format(text_prompt=prompt.strip()) + HPSV3_TEXTS[1]
    text = f"<|im_start|>user\n<|vision_start|>{patches}<|vision_end|>{asked}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
    with torch.no_grad():
        output = model(input_ids=ids, position_ids=positions, output_hidden_states=True, **seen)
    reward = output.hidden_states[-1][0, int((ids[0] == len(tokenizer) - 1).nonzero())]
    for number in (0, 3):
        reward = F.relu(linear(reward, w, f"rm_head.{number}"))
    return float(linear(reward, w, "rm_head.5")[0])


GENEVAL2 = [
    ["How many squares are in the image?", "two"],
    ["Is the square red?", "Yes"],
    ["Are there any squares in the image?", "Yes"],
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_judge(tmp_path_factory.mktemp("judges") / "small-vl")


def asked(judge: Path, image: Image.Image, question: str) -> tuple[Tensor, Any]:
    """The logits after a question, and the tokenizer: the network without `generate`, its inputs put together here."""
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = Qwen3VLForConditionalGeneration.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    seen = Qwen2VLImageProcessorPil.from_pretrained(judge)(images=[image], return_tensors="pt")
    patches = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
    text = f"<|im_start|>user\n<|vision_start|>{patches}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    marks = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    with torch.no_grad():
        return model(input_ids=ids, mm_token_type_ids=marks, **seen).logits[0, -1].float(), tokenizer


def soft_tifa(judge: Path, image: Image.Image) -> list[float]:
    """As soft_tifa() of evaluation.py of facebookresearch/GenEval2 at a6e82d2."""
    found = []
    for question, answer in GENEVAL2:
        answers = ["Yes", "yes", " yes", " Yes"]
        if question.startswith("How many"):
            answers = [answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", "2", " 2"]
        logits, tokenizer = asked(judge, image, f"{question} Answer in one word.")
        found.append(sum(float(logits.softmax(-1)[tokenizer.encode(text)[0]]) for text in answers))
    return found


def test_scores_by_a_judge(images: Path, judge: Path, tmp_path: Path) -> None:
    skills = ["count", "attribute", "object"]
    lines = [
        {"prompt": prompt, "atom_count": atoms, "vqa_list": GENEVAL2, "skills": skills}
        for prompt, atoms in zip(PROMPTS[:2], (3, 10), strict=True)
    ]
    (tmp_path / "geneval2.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_dpg(tmp_path / "dpg.csv")
    flags = ("--vqascore_weights", judge, "--judge_weights", judge)
    flags += ("--geneval2_questions", tmp_path / "geneval2.jsonl", "--dpg_questions", tmp_path / "dpg.csv")
    report, columns = scored(images, tmp_path / "out", *flags)
    expected = []
    for image, prompt in pairs(images):
        logits, tokenizer = asked(judge, image, f'Does this figure show "{prompt.strip()}"? Please answer Yes or No.')
        expected.append(float(logits.softmax(-1)[tokenizer.encode("Yes")[0]]))
    np.testing.assert_allclose(columns["vqascore"], expected, rtol=1e-3)
    assert len(set(expected)) == 3
    atoms = np.array([soft_tifa(judge, image) for image in opened(images)[:2]])
    geometric = 100 * np.prod(atoms, axis=1) ** (1 / 3)
    np.testing.assert_allclose(columns["geneval2"][:2], geometric, rtol=1e-3)
    np.testing.assert_allclose(columns["geneval2_am"][:2], 100 * atoms.mean(1), rtol=1e-3)
    assert columns["geneval2"][2] is None and np.ptp(atoms) > 1e-3
    assert report["scores"]["geneval2"]["value"] == pytest.approx(np.mean(columns["geneval2"][:2]))
    assert any(text.startswith("1 of 3 images have no GenEval 2, which applies to") for text in report["warnings"])
    assert not any("prompts of GenEval 2" in text for text in report["warnings"]), "all of its prompts have an image"
    assert columns["dpg"][:2] == [None, None]
    assert columns["dpg"][2] == pytest.approx(dpg_bench(judge, opened(images)[2])) and 0 < columns["dpg"][2] < 100
    assert "judge small-vl" in report["scores"]["dpg"]["note"]
    # The parts that papers list: Soft-TIFA GM by atoms, AM by skill, and DPG-Bench by category.
    by_atoms, by_skill = (report["categories"][f"GenEval 2 {name}"] for name in ("atom count", "skill"))
    assert [part["scores"]["geneval2"]["value"] for part in by_atoms.values()] == pytest.approx(geometric, rel=1e-3)
    assert list(by_atoms) == ["3", "10"] and [part["count"] for part in by_skill.values()] == [2, 2, 2]
    for place, skill in enumerate(skills):
        found = by_skill[skill]["scores"]["geneval2_am"]
        assert found["value"] == pytest.approx(100 * atoms[:, place].mean(), rel=1e-3)
        assert found["low"] <= found["value"] <= found["high"]
    expected = {category: 100 * np.mean(answers) for category, answers in dpg_answers(judge, opened(images)[2]).items()}
    found = {name: part["scores"]["dpg"]["value"] for name, part in report["categories"]["DPG-Bench category"].items()}
    assert found == pytest.approx(expected) and list(found) == ["attribute", "entity", "global"]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "<h3>By DPG-Bench category</h3>" in page and "<h3>By GenEval 2 skill</h3>" in page


def test_a_judge_of_another_family(images: Path, tmp_path: Path) -> None:
    """LLaVA, through its own processor."""
    from transformers import AutoTokenizer, LlavaForConditionalGeneration

    judge = small_llava(tmp_path / "llava")
    _, columns = scored(images, tmp_path / "out", "--vqascore_weights", judge)
    model, tokenizer = LlavaForConditionalGeneration.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    expected = []
    for image, prompt in pairs(images):
        question = f'Does this figure show "{prompt.strip()}"? Please answer Yes or No.'
        ids = tokenizer(f"USER: {'<image>' * 4}\n{question} ASSISTANT:", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            pixels = torch.from_numpy(cropped(image, 16)).float()[None]
            logits = model(input_ids=ids, pixel_values=pixels).logits[0, -1]
        expected.append(float(logits.softmax(-1)[tokenizer.encode("Yes")[0]]))
    np.testing.assert_allclose(columns["vqascore"], expected, rtol=1e-3)
    assert len(set(expected)) == 3


DPG_PARENTS = [(), (1,), (2,), (1, 3), ()]
DPG_TEXTS = ["Is there a field?", "Is the field green?", "Is the sky blue?", "Is the light warm?", "Is it 1?"]


DPG_TUPLES = ["entity - whole (field)", "attribute - color (field, green)", "attribute - color (sky, blue)"]
DPG_TUPLES += ["global - (light, warm)", "entity - part (1)"]


def dpg_answers(judge: Path, image: Image.Image) -> dict[str, list[float]]:
    """The answers by category, before those that depend on others are changed."""
    found: dict[str, list[float]] = {}
    for number, about in enumerate(DPG_TUPLES):
        found.setdefault(about.split("(")[0].strip().split("-")[0].strip(), []).append(dpg_answer(judge, image, number))
    return found


def dpg_answer(judge: Path, image: Image.Image, number: int) -> float:
    logits, tokenizer = asked(judge, image, f"{DPG_TEXTS[number]} Answer in one word.")
    yes = [tokenizer.encode(text)[0] for text in ("Yes", "yes", " yes", " Yes")]
    return float(int(logits.argmax()) in yes)


def dpg_bench(judge: Path, image: Image.Image) -> float:
    """As compute_dpg_one_sample() of TencentQQGYLab/ELLA at 3c228f1, without the grid."""
    scores = {number + 1: dpg_answer(judge, image, number) for number in range(len(DPG_PARENTS))}
    for number, parents in enumerate(DPG_PARENTS, start=1):
        if any(scores[parent] == 0 for parent in parents):
            scores[number] = 0.0
    return 100 * sum(scores.values()) / len(scores)


def test_dependent_questions_of_dpg_bench(images: Path, tmp_path: Path) -> None:
    """No to a question is no to those that depend on it, however many steps away."""
    questions = [DpgQuestion(n, f"Is it {n}?", parents, "") for n, parents in enumerate(DPG_PARENTS, start=1)]
    items = hash_files(sorted(images.iterdir())[:1])

    def answering(no: set[int]) -> float:
        def compute(encoder: Any, items: Any, what: str) -> Features:
            rows = [[0.5, float(n not in no)] for n in range(1, 6)]
            return Features(np.array(rows, np.float32), list(range(5)))

        score = DpgBench(tmp_path, "", JudgeEncoder(tmp_path, "", 2, "judge"), "", {"a prompt": questions})
        return float(score.values(items, ["a prompt "], compute)[0])

    assert [answering(no) for no in ({}, {5}, {2}, {1})] == [100, 80, 40, 20]


def test_prompts_of_a_benchmark_without_an_image(images: Path, judge: Path, tmp_path: Path) -> None:
    """A benchmark is the mean over all of its prompts: the report says how many are missing, once for both means."""
    lines = [{"prompt": prompt, "vqa_list": GENEVAL2} for prompt in (PROMPTS[0], "a prompt nobody drew", "another")]
    (tmp_path / "geneval2.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_dpg(tmp_path / "dpg.csv")
    with (tmp_path / "dpg.csv").open("a") as file:
        file.write('\nlost,a prompt nobody drew,,1,"0",,,,Is it?')
    flags = ("--geneval2_questions", tmp_path / "geneval2.jsonl", "--dpg_questions", tmp_path / "dpg.csv")
    report, _ = scored(images, tmp_path / "out", "--judge_weights", judge, *flags)
    assert [text for text in report["warnings"] if text.startswith("No image belongs to ")] == [
        "No image belongs to 2 of the 3 prompts of GenEval 2: published values average over all.",
        "No image belongs to 1 of the 2 prompts of DPG-Bench: published values average over all.",
    ]
    (tmp_path / "geneval2.jsonl").write_text("\n".join(map(json.dumps, lines[:2])))
    other, _ = scored(images, tmp_path / "out", "--judge_weights", judge, *flags)
    same = {key: report["settings"][f"{key}_sha256"] == other["settings"][f"{key}_sha256"] for key in SCORES if key in
            report["scores"]}  # fmt: skip
    assert same == {"geneval2": False, "geneval2_am": False, "dpg": True}, "of the judge and the questions"


@pytest.mark.parametrize("template", ["<think>", "{% if enable_thinking is not defined %}<think>{% endif %}"])
def test_a_judge_answers_at_once(
    images: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    """A model that thinks first does not begin with Yes: thinking is switched off, or the model is refused."""
    folder = tmp_path / "judge"
    shutil.copytree(judge, folder)
    chat = folder / "chat_template.jinja"
    chat.write_text(chat.read_text().replace("assistant\n{% endif %}", f"assistant\n{template}\n{{% endif %}}"))
    flags = ("--images", images, "--prompts_csv", images.parent / "prompts.csv", "--vqascore_weights")
    if "enable" not in template:
        evaluate(tmp_path / "out", *flags, folder, expect=1)
        assert f"The model in {folder} thinks before it answers.\n" in capsys.readouterr().err
        return
    evaluate(tmp_path / "out", *flags, folder)
    found = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pydict()["vqascore"]
    _, plain = scored(images, tmp_path / "plain", "--vqascore_weights", judge)
    assert found == plain["vqascore"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("geneval2_questions", '{"prompt": "a", "vqa_list": [["Is it?"]]}', "line 1 has no prompt with a vqa_list"),
        ("dpg_questions", "item_id,text\n0,a", "line 2 is not one of DPG-Bench"),
        ("geneval2_questions", None, "do not exist.\nThey are geneval2_data.jsonl of facebookresearch/GenEval2"),
    ],
)
def test_bad_questions_are_refused(
    images: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    file = tmp_path / ("questions.jsonl" if name.startswith("geneval2") else "questions.csv")
    if content is not None:
        file.write_text(content)
    evaluate(tmp_path / "out", "--images", images, "--judge_weights", judge, f"--{name}", file, expect=1)
    assert message in capsys.readouterr().err
    evaluate(tmp_path / "out", "--images", images, f"--{name}", file, expect=1)
    assert "needs --judge_weights, which is not given." in capsys.readouterr().err
    evaluate(tmp_path / "out", "--images", images, "--judge_weights", judge, expect=1)
    assert "--judge_weights is given, but no questions for the judge." in capsys.readouterr().err


def test_folders_of_classic_geneval(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of generate are put into GenEval's folders, and such folders are scored with their prompts and tags."""
    rows = [
        {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
        {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "a photo of two dogs"},
    ]
    table = tmp_path / "evaluation_metadata.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)) + "\n")
    images = tmp_path / "images"
    images.mkdir()
    for name, pixels in zip(("000001_seed1.png", "000001_seed2.webp", "000002_seed1.png"), scenes(3, 0), strict=True):
        Image.fromarray(pixels).save(images / name, lossless=True)
    common = ("--images", images, "--clip_path", clip)
    layout = tmp_path / "geneval"
    direct = evaluate(tmp_path / "out", *common, "--prompts_csv", table, "--geneval_layout", layout)
    assert sorted(file.relative_to(layout).as_posix() for file in layout.rglob("*.*")) == [
        "00000/metadata.jsonl", "00000/samples/00000.png", "00000/samples/00001.png", "00001/metadata.jsonl",
        "00001/samples/00000.png",
    ]  # fmt: skip
    assert json.loads((layout / "00001" / "metadata.jsonl").read_text()) == rows[1]
    (layout / "00000" / "grid.png").write_bytes((layout / "00000" / "samples" / "00000.png").read_bytes())
    again = evaluate(tmp_path / "again", "--images", layout, "--clip_path", clip)
    assert again["per_image"]["file"][2] == "00001/samples/00000.png" and again["images"]["count"] == 3
    assert again["per_image"]["clip_score"] == direct["per_image"]["clip_score"]
    columns = pyarrow.parquet.read_table(tmp_path / "again" / "scores.parquet").to_pydict()
    assert columns["tag"] == ["single_object", "single_object", "counting"]
    # The same command again writes the same; other images do not mix with them.
    evaluate(tmp_path / "out", *common, "--prompts_csv", table, "--geneval_layout", layout)
    (layout / "00007").mkdir()
    evaluate(tmp_path / "out", *common, "--prompts_csv", table, "--geneval_layout", layout, expect=1)
    assert "holds images of other prompts, such as 00007." in capsys.readouterr().err
    evaluate(tmp_path / "no", *common, "--prompts_csv", table, "--geneval_layout", images / "geneval", expect=1)
    assert "lies in the folder of the images." in capsys.readouterr().err
    table.write_text('{"prompt": "a"}')
    evaluate(tmp_path / "no", *common, "--prompts_csv", table, "--geneval_layout", layout, expect=1)
    assert "Row 1 of" in capsys.readouterr().err and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("flag", "make", "file", "origin"),
    [
        ("pickscore", small_pickscore, "model.safetensors", "hf download yuvalkirstain/PickScore_v1 config.json"),
        (
            "imagereward",
            small_imagereward,
            "vocab.txt",
            "hf download google-bert/bert-base-uncased vocab.txt --local-dir",
        ),
        ("hpsv3", small_hpsv3, "data_collator_qwen.py", "-O https://github.com/MizzenAI/HPSv3/raw/HEAD/hpsv3/dataset/"),
        ("vqascore", small_judge, "tokenizer.json", "hf download Qwen/Qwen3-VL-8B-Instruct --local-dir"),
        ("hpsv2", small_hpsv2, "tokenizer.json", "hf download laion/CLIP-ViT-H-14-laion2B-s32B-b79K tokenizer.json"),
    ],
)
def test_a_missing_file_is_named_with_its_origin(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, make: Any, file: str, origin: str
) -> None:
    folder = copy_without(make(tmp_path / "complete"), file, tmp_path / "folder")
    evaluate(tmp_path / "out", "--images", images, f"--{flag}_weights", folder, expect=1)
    message = capsys.readouterr().err
    assert f"needs {file}, and {folder}, which --{flag}_weights names, does not hold it." in message
    assert origin in message and f"-dir {folder}" in message
    assert not (tmp_path / "out").exists()  # nothing was computed


def test_weights_of_something_else_are_refused(
    images: Path, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hps = small_hpsv2(tmp_path / "hps")
    torch.save({"state_dict": {"visual.conv1.weight": torch.zeros(160, 3, 14, 14)}}, hps / HPSV2)
    common = ("--images", images, "--clip_path", clip)
    evaluate(tmp_path / "out", *common, "--hpsv2_weights", hps, expect=1)
    assert f"{hps} does not hold the weights of HPSv2.1." in capsys.readouterr().err
    wide = small_aesthetic(tmp_path / "wide", 13)
    evaluate(tmp_path / "out", *common, "--aesthetic_weights", wide, expect=1)
    assert "reads 13 features, and the CLIP in" in capsys.readouterr().err
    evaluate(tmp_path / "out", "--images", images, "--aesthetic_weights", wide, expect=1)
    assert "LAION aesthetic needs --clip_path, which is not given." in capsys.readouterr().err


def test_code_in_the_folder_of_a_judge_is_not_run(
    images: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "judge"
    shutil.copytree(judge, folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    names = {"AutoConfig": "own.Config", "AutoModelForImageTextToText": "own.Model", "AutoProcessor": "own.Processor"}
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    evaluate(tmp_path / "out", "--images", images, "--vqascore_weights", folder, expect=1)
    assert f"{folder} does not hold the weights of VQAScore." in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_prompt_with_half_a_surrogate_pair(clip: Path, tmp_path: Path) -> None:
    """Prompt tables refuse one, but other tools wrote these folders."""
    write_images(tmp_path / "00000" / "samples", scenes(2, 0))
    (tmp_path / "00000" / "metadata.jsonl").write_text(json.dumps({"prompt": "a \ud800"}))
    folder = small_imagereward(tmp_path / "weights" / "imagereward")
    common = ("--images", tmp_path / "00000", "--clip_path", clip, "--imagereward_weights", folder)
    evaluate(tmp_path / "out", *common)
    columns = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    assert columns["prompt"] == ["a ?"] * 2 and None not in columns["imagereward"] + columns["clip_score"]


def test_an_image_that_a_judge_cannot_take(images: Path, judge: Path, tmp_path: Path) -> None:
    """It is too long and narrow for Qwen: it has no score, and the others have theirs."""
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    Image.new("RGB", (1, 500), "red").save(folder / "000001.png")
    lines = [{"prompt": prompt.strip(), "vqa_list": GENEVAL2} for prompt in PROMPTS]
    (tmp_path / "geneval2.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.copy(images.parent / "prompts.csv", tmp_path)
    flags = ("--judge_weights", judge, "--geneval2_questions", tmp_path / "geneval2.jsonl")
    report, columns = scored(folder, tmp_path / "out", *flags, "--hpsv2_weights", small_hpsv2(tmp_path / "hps"))
    assert columns["geneval2"][1] is None and None not in (columns["geneval2"][0], columns["geneval2"][2])
    assert None not in columns["hpsv2"]
    assert any(text.startswith("1 of 3 images have no GenEval 2,") for text in report["warnings"])


def test_columns_of_the_prompt_table(images: Path, clip: Path, tmp_path: Path) -> None:
    """Numbers stay numbers, mixed cells become text; lists and columns called like a score are left out."""
    rows: list[dict[str, Any]] = [
        {"difficulty": 1, "note": "x", "aesthetic": 5, "tags": ["a"], "Level": 0.5, "huge": 2**70},
        {"difficulty": 2, "note": 3, "Level": 1.5, "huge": 1},
        {"prompt": "c"},
    ]
    lines = [{"image_id": f"{number:06d}", "prompt": "a", **row} for number, row in enumerate(rows)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    evaluate(tmp_path / "out", "--images", images, "--prompts_csv", tmp_path / "prompts.jsonl", "--clip_path", clip)
    columns = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet").to_pydict()
    assert {name: cells for name, cells in columns.items() if name not in ("image", "prompt", "clip_score")} == {
        "difficulty": [1, 2, None], "huge": [str(2**70), "1", None],
        "level": [0.5, 1.5, None], "note": ["x", "3", None],
    }  # fmt: skip


def test_a_score_needs_prompts(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are there, but no prompt: the report gives the reason, and scores.parquet has no such column."""
    weights = small_pickscore(tmp_path / "pick")
    evaluate(tmp_path / "out", "--images", images, "--pickscore_weights", weights, expect=1)  # nothing was measured
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    reasons = {entry["metric"]: entry["reason"] for entry in report["missing"]}
    assert reasons["pickscore"] == "no prompt is known for any image; give --prompts_csv."
    assert "hpsv2" not in reasons  # nobody asked for it
    table = pyarrow.parquet.read_table(tmp_path / "out" / "scores.parquet")
    assert table.column_names == ["image", "prompt"] and table.num_rows == 3
    other = tmp_path / "other.csv"
    other.write_text("image_id,prompt\n000009,a car\n")
    flags = ("--images", images, "--pickscore_weights", weights, "--prompts_csv", other, "--dry_run")
    assert main(["evaluate", *map(str, flags), "--output_dir", str(tmp_path / "out")]) == 0
    why = f"No pickscore: no row of {other} belongs to an image: row ID has the files ID.* and ID_seedN.*; "
    assert f"{why}000000.png has no row.\n" in capsys.readouterr().out


@pytest.mark.slow
def test_all_scores_on_any_number_of_processes(
    images: Path, clip: Path, judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 2 and 3 processes agree to the last digit, the three in a command that was killed and started again.

    Two processes compute one score of each kind: on separate embeddings, on pairs in batches, and on single pairs.
    """
    folders = {
        "pickscore": small_pickscore(tmp_path / "pick"), "hpsv2": small_hpsv2(tmp_path / "hpsv2"),
        "hpsv3": small_hpsv3(tmp_path / "hpsv3"), "imagereward": small_imagereward(tmp_path / "imagereward"),
        "aesthetic": small_aesthetic(tmp_path / "aesthetic", 12), "vqascore": judge, "judge": judge,
    }  # fmt: skip
    lines = [{"prompt": prompt.strip(), "vqa_list": GENEVAL2} for prompt in PROMPTS]
    (tmp_path / "geneval2.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_dpg(tmp_path / "dpg.csv")
    common = ["--images", images, "--prompts_csv", images.parent / "prompts.csv"]
    flags = [
        *common,
        "--clip_path",
        clip,
        "--geneval2_questions",
        tmp_path / "geneval2.jsonl",
        "--dpg_questions",
        tmp_path / "dpg.csv",
    ]
    flags += [word for name, folder in folders.items() for word in (f"--{name}_weights", folder)]
    evaluate(tmp_path / "out1", *flags)
    one = pyarrow.parquet.read_table(tmp_path / "out1" / "scores.parquet")
    assert set(one.column_names) == {"image", "prompt", "clip_score", *SCORES, "category", "level"}
    output = tmp_path / "out3"
    command = ("muralist", "evaluate", *flags, "--output_dir", output)
    killed = fork(*command, NPROC="3")
    while len(list(output.glob("features/*"))) < 4:  # those of some scores are there, and others are not
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate(timeout=60)
    assert not (output / "scores.parquet").exists()
    started_with = {file: file.stat().st_size for file in output.glob("features/*/*.bin")}
    told = finish(fork(*command, NPROC="3"))
    assert "features of 0 computed, of 3 cached" in told  # what the first command had finished
    assert all(file.stat().st_size == size for file, size in started_with.items())
    assert one.equals(pyarrow.parquet.read_table(output / "scores.parquet"))
    monkeypatch.setenv("NPROC", "2")
    kinds = ("pickscore", "imagereward", "vqascore")
    evaluate(tmp_path / "out2", *common, *(word for name in kinds for word in (f"--{name}_weights", folders[name])))
    two = pyarrow.parquet.read_table(tmp_path / "out2" / "scores.parquet")
    assert two.equals(one.select(two.column_names))
    assert len(list((tmp_path / "out2").glob("features/judge*/*.bin"))) == 2  # each process left a file of its own


def write_dpg(file: Path) -> None:
    header = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    rows = [f"{header}question_natural_language"]
    for number, parents in enumerate(DPG_PARENTS, start=1):
        above = ", ".join(map(str, parents or (0,)))
        rows.append(f'000002,other,,{number},"{above}",,,"{DPG_TUPLES[number - 1]}",{DPG_TEXTS[number - 1]}')
    file.write_text("\n".join(rows))


def test_docs_have_a_row_for_each_score() -> None:
    text = (REPOSITORY / "docs" / "evaluating.md").read_text(encoding="utf-8")
    for key, info in SCORES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{key}` | {info.title} "))
        assert all(download.origin.split("/raw/")[0] in row for download in info.downloads), key
        assert all(f"--{flag}" in row for flag in info.flags), key
        assert key in METRICS
