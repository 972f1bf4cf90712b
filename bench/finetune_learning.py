"""Does LoRA learn? Train a small pipeline on driving scenes without their names, then LoRA with the names.

    python bench/finetune_learning.py RECORD.json [--steps 1500] [--lora_steps 1000] [--sheet FILE.png]

The base model, a small pipeline of the class HunyuanDiTPipeline, is trained by `muralist train --model.path FOLDER` with the
same caption for every image, so that it draws street scenes and follows no prompt. LoRA is then trained on the eight scenes
of driving_world with their captions. A classifier that never saw an image of a model says which scene an image shows: for
images by the base model and by LoRA, of the same prompts and seeds. Chance is 1 in 8.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIZE, PER_PROMPT = 64, 25


def main() -> None:
    """Train, generate, classify, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lora_steps", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sheet", type=Path, help="where to write a contact sheet of both models")
    options = parser.parse_args()
    from bench.measure_training import hardware, versions
    from tests.support.scene_classifier import scenes, train_classifier

    from muralist.demo.driving_world import PROMPTS
    from muralist.demo.small_hunyuan_dit import build_small_hunyuan_dit

    content: dict[str, Any] = {
        "about": " ".join((__doc__ or "").split()),
        "hardware": hardware(),
        "versions": versions(),
    }
    content["command"] = " ".join(["python", "bench/finetune_learning.py", *sys.argv[1:]])
    classify = train_classifier(SIZE, 4096, 400, 0)
    images, kinds = scenes(range(800), SIZE, seed=7)
    content["accuracy of the classifier on real images"] = _share(classify(images) == kinds)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        small = build_small_hunyuan_dit(place / "small")
        base = _train(place, "base", options.steps, small, "--data.caption", "a street", "--learning_rate", 5e-4)
        _muralist("export", base, place / "exported")
        lora = _train(
            place, "lora", options.lora_steps, place / "exported", "--training_parts", "lora", "--lora_rank", options.rank,
            "--lora_targets", *_TARGETS, "--learning_rate", 1e-3,
        )  # fmt: skip
        sheets = []
        for name, model in (("base", place / "exported"), ("lora", lora)):
            found, expected = _generate(place / f"{name}-images", model, list(PROMPTS))
            content[f"accuracy, {name}"] = _share(classify(found) == expected)
            sheets.append(found)
            options.record.write_text(json.dumps(content, indent=1) + "\n")
            print(name, content[f"accuracy, {name}"], flush=True)
        content["seconds of training"] = {name: _seconds(place / "results" / name) for name in ("base", "lora")}
    options.record.write_text(json.dumps(content, indent=1) + "\n")
    if options.sheet:
        from PIL import Image

        rows = [torch.cat([found[i * PER_PROMPT + j] for j in range(4)], dim=1) for found in sheets for i in range(8)]
        left, right = torch.cat(rows[:8]), torch.cat(rows[8:])
        Image.fromarray(torch.cat([left, right], dim=1).numpy()).save(options.sheet)


_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")


def _train(place: Path, name: str, steps: int, model: Path, *more: Any) -> Path:
    _muralist(
        "train", "--model.path", model, "--img_size", SIZE, "--data_path", "driving_world", "--results_dir",
        place / "results", "--run_name", name, "--batch_size", 64, "--max_steps", steps, "--ckpt_every", steps,
        "--warmup_steps", 50, "--samples_per_gpu", 0, "--no_use_tensorboard", "--val_fraction", 0, *more,
    )  # fmt: skip
    return place / "results" / name


def _generate(folder: Path, model: Path, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    table = folder.with_suffix(".csv")
    table.write_text("prompt\n" + "".join(f'"{prompt}"\n' for prompt in prompts for _ in range(PER_PROMPT)))
    _muralist(
        "generate", "--prompts_csv", table, "--model_path", model, "--output_dir", folder, "--num_inference_steps", 20,
        "--height", SIZE, "--width", SIZE, "--batch_size", 25, "--guidance_scale", 4,
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
