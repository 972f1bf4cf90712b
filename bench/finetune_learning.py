"""Does LoRA learn? Train a small pipeline on driving scenes without their names, then LoRA with the names.

    python bench/finetune_learning.py RECORD.json [--steps 450] [--lora_steps 250] [--sheet FILE.png]

The base model, a small StableDiffusionPipeline, is trained with the same caption for every image, so that it draws street
scenes and follows no prompt. LoRA is then trained on the eight scenes of driving_world with their captions, exported as
`pytorch_lora_weights.safetensors`, and given to `muralist generate --lora`. A classifier that never saw an image of a
model says which scene an image shows: for images of both models, with the same prompts and seeds. Chance is 1 in 8.
Everything is done by the commands of muralist, on data of `muralist pack --encode`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIZE, PER_PROMPT, STEPS = 64, 12, 15
_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")


def main() -> None:
    """Train, generate, classify, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--lora_steps", type=int, default=250)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sheet", type=Path, help="where to write a contact sheet of both models")
    options = parser.parse_args()
    from bench.measure_training import hardware, versions
    from tests.support.scene_classifier import scenes, train_classifier

    from muralist.demo.driving_world import PROMPTS

    started = time.process_time()
    content: dict[str, Any] = {
        "about": " ".join((__doc__ or "").split()),
        "hardware": hardware(),
        "versions": versions("diffusers", "peft"),
        "command": " ".join(["python", "bench/finetune_learning.py", *sys.argv[1:]]),
        "settings": {name: value for name, value in vars(options).items() if isinstance(value, int)},
    }
    classify = train_classifier(SIZE, 2048, 250, 0)
    images, kinds = scenes(range(400), SIZE, seed=7)
    content["accuracy of the classifier on real images"] = _share(classify(images) == kinds)
    print(content["accuracy of the classifier on real images"], flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        small = _build_pipeline(place / "small")
        _write_scenes(place / "scenes", options.images)
        base = _train(place, "base", small, options.steps, ("--caption", "a street"), "--learning_rate", 1e-3)
        _muralist("export", base, place / "exported")
        lora = _train(
            place, "lora", place / "exported", options.lora_steps, (), "--training_parts", "lora",
            "--lora_rank", options.rank, "--lora_targets", *_TARGETS, "--learning_rate", 2e-3,
        )  # fmt: skip
        _muralist("export", lora, place / "alone", "--lora_format", "diffusers")
        sheets = []
        for name, more in (("base", ()), ("lora", ("--lora", place / "alone"))):
            found, expected = _generate(place / f"{name}-images", place / "exported", list(PROMPTS), *more)
            content[f"accuracy, {name}"] = _share(classify(found) == expected)
            sheets.append(found)
            print(name, content[f"accuracy, {name}"], flush=True)
        content["seconds of training"] = {name: _seconds(place / "results" / name) for name in ("base", "lora")}
    times = os.times()
    content["CPU minutes"] = round(
        (time.process_time() - started + times.children_user + times.children_system) / 60, 1
    )
    options.record.write_text(json.dumps(content, indent=1) + "\n")
    if options.sheet:
        from PIL import Image

        rows = [torch.cat([found[i * PER_PROMPT + j] for j in range(4)], dim=1) for found in sheets for i in range(8)]
        left, right = torch.cat(rows[:8]), torch.cat(rows[8:])
        Image.fromarray(torch.cat([left, right], dim=1).numpy()).save(options.sheet)


def _build_pipeline(folder: Path) -> Path:
    """Write a small StableDiffusionPipeline: a random U-Net, with the VAE and the text encoder of the small HunyuanDiT."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    from muralist.demo.small_hunyuan_dit import assemble_small_hunyuan

    parts = assemble_small_hunyuan()
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(64, 128), layers_per_block=1, norm_num_groups=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=parts.text_encoder.config.hidden_size,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", clip_sample=False, steps_offset=1
    )
    pipe: Any = StableDiffusionPipeline(
        vae=parts.vae, text_encoder=parts.text_encoder, tokenizer=parts.tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


def _write_scenes(folder: Path, count: int) -> None:
    """Write scenes with their captions, of another seed than the classifier's."""
    from PIL import Image
    from tests.support.scene_classifier import scenes

    from muralist.demo.driving_world import PROMPTS

    folder.mkdir()
    for number, (image, kind) in enumerate(zip(*scenes(range(count), SIZE, seed=0), strict=True)):
        Image.fromarray(image.numpy()).save(folder / f"{number:05d}.png")
        (folder / f"{number:05d}.txt").write_text(PROMPTS[kind])


def _train(place: Path, name: str, model: Path, steps: int, packing: Sequence[str], *more: Any) -> Path:
    pack = place / f"{name}-data"
    _muralist("pack", place / "scenes", pack, "--encode", model, "--img_size", SIZE, *packing)
    _muralist(
        "train", "--model.path", model, "--img_size", SIZE, "--data_path", pack, "--results_dir", place / "results",
        "--run_name", name, "--batch_size", 32, "--max_steps", steps, "--ckpt_every", steps, "--warmup_steps", 50,
        "--samples_per_gpu", 0, "--no_use_tensorboard", "--val_fraction", 0, "--num_workers", 0, *more,
    )  # fmt: skip
    return place / "results" / name


def _generate(folder: Path, model: Path, prompts: list[str], *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    table = folder.with_suffix(".csv")
    table.write_text("prompt\n" + "".join(f'"{prompt}"\n' for prompt in prompts for _ in range(PER_PROMPT)))
    _muralist(
        "generate", "--prompts_csv", table, "--model_path", model, "--output_dir", folder, "--num_inference_steps", STEPS,
        "--height", SIZE, "--width", SIZE, "--batch_size", 24, "--guidance_scale", 3, *more,
    )  # fmt: skip
    files = sorted(folder.glob("*.png"))
    assert len(files) == len(prompts) * PER_PROMPT, len(files)
    images = torch.from_numpy(np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]))
    return images, torch.arange(len(prompts)).repeat_interleave(PER_PROMPT)


def _muralist(*words: Any) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "muralist", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{words[0]}: {time.monotonic() - started:.0f} s", flush=True)


def _seconds(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return round(lines[-1]["time"] - lines[0]["time"], 1)


def _share(hits: torch.Tensor) -> float:
    return round(float(hits.float().mean()), 4)


if __name__ == "__main__":
    main()
