"""Images per second of a few-step student and of its teacher, through `muralist generate`: files and tar shards.

python bench/few_step_rate.py RECORD.json --folder FOLDER [--model JiT-B/4] [--img_size 64]        random weights
python bench/few_step_rate.py RECORD.json --folder FOLDER --teacher RUN --student RUN [--guidance 1.5]

Without --student, a teacher is trained for two steps on the driving scenes and distilled for two: the rate does not depend
on the weights. Each rate is that of a command of its own, and is taken between the first fifth of its batches and the last
one: without loading, compiling and the end. The record has the seconds of the whole command beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from bench.cifar_fid import CommandRunner, warm_rate
from bench.measure_training import hardware, versions

from muralist.core.run_dir import atomic_write_json
from muralist.models.weights import latest_checkpoint, read_description

SHARD = 10_000  # images of a tar file
TRAIN = (
    "--enable_condition --data_path driving_world --max_steps 2 --epochs 1000 --batch_size 8 --samples_per_gpu 0 "
    "--no_use_tensorboard --num_workers 0 --val_fraction 0"
)
DISTILL = "--steps 2 --max_steps 2 --batch_size 8 --samples_per_gpu 0"


def build(runner: CommandRunner, options: argparse.Namespace) -> tuple[Path, Path]:
    """Return teacher and student: those given, or new ones."""
    runs = runner.folder / "runs"
    if options.student is None:
        place = ("--results_dir", runs, "--compile", "false")
        size = ("--model", options.model, "--img_size", options.img_size)
        if not (runs / "student").is_dir():
            shutil.rmtree(runs, ignore_errors=True)
            runner.run("train", "train", *TRAIN.split(), *size, "--run_name", "teacher", *place)
            runner.run("distill", "distill", runs / "teacher", *DISTILL.split(), "--run_name", "student", *place)
    return options.teacher or runs / "teacher", options.student or runs / "student"


def measure(runner: CommandRunner, name: str, model: Path, images: int, batch: int, *words: object) -> dict[str, Any]:
    """Generate images of all classes in turn; return the rate and the seconds of the command."""
    output, table = runner.folder / name, runner.folder / f"{images}.csv"
    classes = len(read_description(latest_checkpoint(model))["label_names"])
    table.write_text("prompt\n" + "".join(f"{row % classes}\n" for row in range(images)))
    shutil.rmtree(output, ignore_errors=True)
    words = ("--batch_size", batch, *words)
    seconds = runner.run(
        name, "generate", "--model_path", model, "--prompts_csv", table, "--output_dir", output, *words
    )
    rate = warm_rate(output, batch)
    shutil.rmtree(output)
    flags = " ".join(map(str, words))
    return {"images": images, "flags": flags, "images/s": round(rate, 1), "seconds of the command": round(seconds, 1)}


def main() -> None:
    """Measure and write the record after every command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="JiT-B/4")
    parser.add_argument("--img_size", type=int, default=64)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--student", type=Path)
    parser.add_argument("--guidance", type=float, default=2.9)
    parser.add_argument("--images", type=int, default=50_000, help="of the student")
    parser.add_argument("--teacher_images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=500)
    options = parser.parse_args()
    if (options.teacher is None) != (options.student is None):
        parser.error("give --teacher and --student, or neither")
    options.folder.mkdir(parents=True, exist_ok=True)
    runner = CommandRunner(options.folder)
    teacher, student = build(runner, options)
    record: dict[str, Any] = {"command": " ".join(["python", "bench/few_step_rate.py", *sys.argv[1:]])}
    record |= {"hardware": hardware(), "versions": versions(), "model": options.model if not options.student else None}
    heun = ("--scheduler", "heun", "--num_inference_steps", 50, "--guidance_scale", options.guidance)
    parts: dict[str, tuple[Path, int, tuple[object, ...]]] = {
        "student, PNG files": (student, options.images, ()),
        "student, tar shards": (student, options.images, ("--shards", SHARD)),
        "teacher, 50 Heun steps": (teacher, options.teacher_images, heun),
    }
    for name, (model, images, words) in parts.items():
        output = name.replace(", ", "-").replace(" ", "-")
        record[name] = measure(runner, output, model, images, options.batch, *words)
        print(name, json.dumps(record[name]), flush=True)
        rates = [record[part]["images/s"] for part in parts if part in record]
        if len(rates) == len(parts) and rates[2]:
            record["student, PNG files / teacher"] = round(rates[0] / rates[2], 1)
        atomic_write_json(options.record, record)


if __name__ == "__main__":
    main()
