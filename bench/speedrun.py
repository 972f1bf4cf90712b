"""Quality for a time: train a JiT for some seconds from a cold process, generate, score, and write a record.

python bench/speedrun.py RECORD.json --data cifar10.npz --inception_weights WEIGHTS --folder FOLDER --seconds 600 \\
    [--recipe best p_mean0.4 p_mean0.4+b4 ...] [--seeds 0 1 2] [--guidance 1 1.5] [--images 50000] [flags of train]

The data are CIFAR-10, or images in an .npz of the same form, such as that of bench/scenes_data.py; the model has their size
and classes. A recipe is configs/speedrun_cifar10.yaml with changes from RECIPES, joined by +. For each recipe and seed:
`muralist train`, timed from before the process starts until it has ended, with an empty compile cache; then for every number
of steps and guidance scale `muralist generate`, `muralist evaluate` against the training images, KID, precision and recall
against the test images, and the distance of each image to its nearest training image beside those of test images.

The learning rate is a function of images seen, so a time limit must become a number of steps before training begins. A
probe of the same settings with as cold a process measures the seconds outside of the steps and the images per second;
the steps that fit into the limit are planned from it, with a reserve of MARGIN. It is done once per speed: a finished
training corrects the plan of later ones of the same speed. --train_images sets the length without a probe. A training that
takes longer than the limit is marked; one that takes OVERTIME times as long is stopped.

The record is written after every stage. The same command goes on where an earlier one was killed; a training that was
interrupted starts over, because its seconds are those of one process. One that fails is listed, and tried again by the
next call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import yaml
from bench.cifar_fid import STOPPED, CommandRunner, warm_rate
from bench.measure_training import hardware, versions
from torch import Tensor

from muralist.core.compile_cache import INDUCTOR_VARIABLE, TRITON_VARIABLE
from muralist.core.hardware import select_devices, share_devices
from muralist.core.run_dir import atomic_open, atomic_write_json
from muralist.data.decode import decode_pixels
from muralist.evaluate import metrics
from muralist.evaluate.encoders import InceptionEncoder
from muralist.evaluate.features import compute_features, hash_files
from muralist.evaluate.inception import read_tensors
from muralist.evaluate.inputs import find_images

CONFIG = "configs/speedrun_cifar10.yaml"
RECIPES = {
    "best": "",
    "official": "--optimizer=adamw --blr=5e-5 --warmup_steps=500 --lr_schedule=constant --p_mean=-0.8 --p_std=0.8",
    "adamw": "--optimizer=adamw --learning_rate=1.5e-3",
    "muon1.5e-3": "--learning_rate=1.5e-3",
    "muon6e-3": "--learning_rate=6e-3",
    "p_mean-0.8": "--p_mean=-0.8 --p_std=0.8",
    "p_mean-0.4": "--p_mean=-0.4",
    "p_mean0.4": "--p_mean=0.4",
    "p_mean0.8": "--p_mean=0.8",
    "p_std0.8": "--p_std=0.8",
    "p_std1.2": "--p_std=1.2",
    "s2": "--model=JiT-S/2 --batch_size=256",
    "b2": "--model=JiT-B/2 --batch_size=256",
    "b4": "--model=JiT-B/4",
    "batch256": "--batch_size=256",
    "batch1024": "--batch_size=1024",
    "constant": "--lr_schedule=constant",
    "cosine": "--lr_schedule=cosine",
    "decay0.5": "--lr_decay_fraction=0.5",
    "linear": "--lr_decay_fraction=1",
    "ema100k": "--ema_half_life=100000",
    "ema500k": "--ema_half_life=500000",
    "no_flips": "--random_flip=false",
    "dropout": "--proj_dropout=0.1",
}
SAME_SPEED = (
    *("--p_mean", "--p_std", "--learning_rate", "--blr", "--warmup_steps", "--lr_schedule", "--lr_decay_fraction"),
    *("--min_lr", "--ema_half_life", "--ema2_half_life", "--weight_decay", "--beta1", "--beta2", "--seed"),
)
MARGIN = 0.02  # of the limit: what a training may be slower than its probe
OVERTIME = 1.2
PATIENCE = 60.0  # seconds for the last checkpoint after a request to stop
BINS = 60  # points of a loss curve
CHUNK = 1024  # images whose distances to all others are held at once
QUANTILES = (0.0, 0.01, 0.05, 0.5)
NEAR = "share nearer than 1% of the test images"
SHOWN = 8  # pairs of a generated image and its nearest training image in the record
Flags = dict[str, list[str]]
Record = dict[str, Any]


def read_flags(words: Sequence[str]) -> Flags:
    """Read `--name=value` and `--name value ...`; of a flag that comes twice, the last one counts."""
    flags: Flags = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            flags[name] = [value] if value else []
        elif name:
            flags[name].append(word)
        else:
            raise SystemExit(f"{word} is not a flag of train.")
    return flags


def recipe_flags(recipe: str, further: Flags, recipes: Mapping[str, str] = RECIPES) -> Flags:
    """Return what a recipe changes, on top of the flags that all recipes have."""
    flags = dict(further)
    for name in recipe.split("+"):
        if name not in recipes:
            raise SystemExit(f"There is no recipe {name}. There are {', '.join(recipes)}, which + joins.")
        flags |= read_flags(shlex.split(recipes[name]))
    return flags


def to_words(flags: Flags) -> list[str]:
    """Write flags as they are given to a command."""
    written = [[f"{name}={values[0]}"] if len(values) == 1 else [name, *values] for name, values in flags.items()]
    return [word for words in written for word in words]


def speed_key(flags: Flags) -> str:
    """Name what trainings have in common that take equally long per image."""
    return " ".join(to_words({name: values for name, values in sorted(flags.items()) if name not in SAME_SPEED}))


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a training takes: seconds outside of its steps, and images per second in them."""

    outside: float
    images_per_second: float

    def images(self, seconds: float) -> float:
        """Return how many images fit into some seconds."""
        return max(0.0, seconds * (1 - MARGIN) - self.outside) * self.images_per_second

    @classmethod
    def of(cls, seconds: float, images: int, lines: Sequence[Record]) -> Speed:
        """Measure a training that took `seconds` for `images`, from its metrics; the first half warms up."""
        rate = median(line["train/samples_per_second"] for line in lines[len(lines) // 2 :])
        return cls(seconds - images / rate, rate)


def read_metrics(run: Path) -> list[Record]:
    """Read the metrics of a run."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def loss_curve(lines: Sequence[Record], began: float) -> list[Record]:
    """Average the loss over equal parts of a run."""
    size = max(1, math.ceil(len(lines) / BINS))
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    return [
        {
            "seconds": round(part[-1]["time"] - began, 2),
            "images": part[-1]["images"],
            "train/loss": round(mean(line["train/loss"] for line in part), 5),
        }
        for part in parts
    ]


def nearest(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of each row to the nearest of others, and which it is; float64, without rounding."""
    found = [torch.cdist(part, others).min(1) for part in rows.split(CHUNK)]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


def quantiles(distances: Tensor) -> dict[str, float]:
    """Return some quantiles of distances."""
    return {f"{q:g}": round(float(torch.quantile(distances, q)), 4) for q in QUANTILES}


@dataclasses.dataclass(frozen=True)
class NearestImages:
    """Distances to the nearest training image, in one space, and those of the test images for comparison."""

    training: Tensor
    of_tests: Tensor

    @classmethod
    def build(cls, training: np.ndarray, tests: np.ndarray, device: str) -> NearestImages:
        """Compute the distances of the test images; one row per image."""
        on_device = torch.from_numpy(training).to(device, torch.float64)
        return cls(on_device, nearest(torch.from_numpy(tests).to(on_device), on_device)[0])

    def compare(self, generated: np.ndarray) -> tuple[Record, Tensor, Tensor]:
        """Compare generated images with the test images; returns distances and nearest training images too."""
        distances, places = nearest(torch.from_numpy(generated).to(self.training), self.training)
        # One test image in a hundred is nearer than this by definition.
        close = torch.quantile(self.of_tests, 0.01)
        found = {
            "generated, quantiles": quantiles(distances),
            "test images, quantiles": quantiles(self.of_tests),
            NEAR: round(float((distances < close).double().mean()), 5),
            "share nearer than any test image": round(float((distances < self.of_tests.min()).double().mean()), 5),
        }
        return found, distances, places


def as_rows(images_u8: np.ndarray) -> np.ndarray:
    """Flatten images, in units in which a distance is the root of the mean squared difference in gray levels."""
    return images_u8.reshape(len(images_u8), -1) / math.sqrt(math.prod(images_u8.shape[1:]))


class Data:
    """Training and test images, with their Inception features and statistics; opened when the first image is scored."""

    def __init__(self, path: Path, folder: Path, run: Callable[..., float], weights: Path) -> None:
        self.path, self.folder, self.run, self.weights = path, folder, run, weights
        with np.load(path) as stored:
            self.side, self.classes = stored["train_x"].shape[1], int(stored["train_y"].max()) + 1
        self.devices = share_devices(select_devices([]))
        self.device = next(iter(self.devices.values()))
        self.statistics = folder / "statistics-train.npz"
        self._spaces: tuple[NearestImages, NearestImages] | None = None

    def prepare(self) -> dict[str, float]:
        """Write the statistics of training and test images, where they are not there yet; returns the seconds."""
        tests = self.folder / "test-images.npz"
        if not tests.is_file():
            with np.load(self.path) as stored, atomic_open(tests) as file:
                np.savez(file, train_x=stored["test_x"], train_y=stored["test_y"])
        seconds = {}
        for name, source in (("train", self.path), ("test", tests)):
            output = self.folder / f"statistics-{name}.npz"
            if not output.is_file():
                words = ("stats", source, "-o", output, "--img_size", self.side, "--inception_weights", self.weights)
                seconds[f"statistics of {name} images"] = round(self.run(f"stats-{name}", *words), 1)
        return seconds

    def features(self, split: str) -> np.ndarray:
        """Read the features of the training or test images."""
        with np.load(self.folder / f"statistics-{split}.npz") as stored:
            return stored["features"]

    @property
    def spaces(self) -> tuple[NearestImages, NearestImages]:
        """The spaces of pixels, where training images count mirrored too, and of Inception features."""
        if self._spaces is None:
            with np.load(self.path) as stored:
                training, tests = stored["train_x"], stored["test_x"]
            pixels = as_rows(np.concatenate([training, training[:, :, ::-1]]))
            self._spaces = (
                NearestImages.build(pixels, as_rows(tests), self.device),
                NearestImages.build(self.features("train"), self.features("test"), self.device),
            )
        return self._spaces

    def check_images(self, images: Path, cache: Path) -> Record:
        """Return KID against the test images and the distances to training images; features come from the cache."""
        paths = find_images(images, "--images")
        items = hash_files(paths)
        encoder = InceptionEncoder.from_file(self.weights)
        features = compute_features(encoder, items, self.devices, cache).rows
        tests = self.features("test")
        kid = metrics.kid(features, tests, 0, self.device)
        neighbors, _ = metrics.neighbor_metrics(features, tests, 0, self.device)
        pixels = as_rows(np.stack([decode_pixels(item.read()) for item in items]))
        found: Record = {f"{name}, test images": neighbors[name].value for name in ("precision", "recall")}
        found |= {"kid, test images": kid.value, "kid, test images, 95%": kid.interval(0)}
        for name, space, rows in zip(("pixels", "features"), self.spaces, (pixels, features), strict=True):
            comparison, distances, places = space.compare(rows)
            order = distances.argsort()[:SHOWN].tolist()
            training = self.spaces[1].training.shape[0]
            comparison["nearest pairs: image, training image, distance"] = [
                [paths[i].name, int(places[i]) % training, round(float(distances[i]), 4)] for i in order
            ]
            found[f"nearest training image, {name}"] = comparison
        return found


class Speedrun:
    """One call of this script."""

    script, recipes = "bench/speedrun.py", RECIPES

    def __init__(self, options: argparse.Namespace, further: Flags) -> None:
        self.options, self.further = options, further
        self.folder: Path = options.folder
        self.runner = CommandRunner(self.folder)
        self.data = Data(options.data, self.folder, self.runner.run, options.inception_weights)
        self.speeds: dict[str, Speed] = {}
        self.record: Record = json.loads(options.record.read_text()) if options.record.is_file() else {}

    def save(self) -> None:
        """Write the record."""
        atomic_write_json(self.options.record, self.record)

    def run(self) -> None:
        """Write what is common to all runs, run them, and print the scores."""
        options = self.options
        if (before := self.record.get("limit, s", options.seconds)) != options.seconds:
            raise SystemExit(f"{options.record} is of runs of {before} s, not of {options.seconds} s: name another.")
        halved = any(value.dtype is torch.float16 for value in read_tensors(options.inception_weights).values())
        self.record |= {
            "commands": [*self.record.get("commands", []), shlex.join(["python", self.script, *sys.argv[1:]])],
            "commit": options.commit or commit(),
            "hardware": hardware(),
            "versions": versions(),
            "inception in 16 bits": halved,
            "limit, s": options.seconds,
        }
        self.record.setdefault("runs", [])
        seconds = self.data.prepare()
        self.record["seconds"] = self.record.get("seconds", {}) | seconds
        self.save()
        self.run_all()
        print(self.table())

    def run_all(self) -> None:
        """Run every recipe with every seed."""
        for seed in self.options.seeds:
            for recipe in self.options.recipe:
                self.run_recipe(recipe, seed)

    def run_recipe(self, recipe: str, seed: int) -> None:
        """Train one recipe with one seed, where the record has no training of it, and score it."""
        flags = recipe_flags(recipe, self.further, self.recipes) | {"--seed": [str(seed)]}
        wanted = {"recipe": recipe, "seed": seed, "flags": to_words(flags), "images given": self.options.train_images}
        run = next((one for one in self.record["runs"] if one.items() >= wanted.items()), None)
        if run is None:
            self.record["failed"] = [one for one in self.record.get("failed", []) if not one.items() >= wanted.items()]
            try:
                training = self.train(f"{recipe}-{seed}", flags)
            except SystemExit as error:  # such as a loss of NaN: the other recipes go on
                print(error, flush=True)
                self.record["failed"].append({**wanted, "error": str(error).splitlines()})
                self.save()
                return
            self.record["runs"].append(run := {**wanted, **training, "scores": []})
            self.save()
        folder = self.folder / "runs" / f"{recipe}-{seed}"
        for step in run["steps scored"]:
            is_last = step == run["steps"]
            images = self.options.images if is_last else self.options.curve_images
            for sampler in self.samplers() if is_last else self.samplers()[:1]:
                wanted = {"step": step, **sampler, "images": images}
                self.score(run, folder / "checkpoints" / f"step_{step:07d}", wanted)

    def samplers(self) -> list[Record]:
        """Return the samplers of the last checkpoint, of which the others have the first."""
        options = self.options
        return [{"sampler steps": steps, "guidance": scale} for steps in options.steps for scale in options.guidance]

    def command(self) -> tuple[list[object], int]:
        """Return the command that trains, and its batch size unless a recipe has another."""
        words = ["train", "--config", CONFIG, "--img_size", self.data.side]
        return words, yaml.safe_load(Path(CONFIG).read_text())["data"]["batch_size"]

    def train(self, name: str, flags: Flags) -> Record:
        """Train for the given number of images, or as many as fit into the limit; returns the record."""
        options = self.options
        batch = int(flags.get("--batch_size", [self.command()[1]])[0])
        key, planned = speed_key(flags), Record()
        if options.train_images:
            steps = options.train_images // batch
        else:
            if key not in self.speeds:
                self.speeds[key] = self.probe(f"probe-{name}", flags, batch)
            speed = self.speeds[key]
            steps = int(speed.images(options.seconds) // batch)
            planned = {name: round(value, 1) for name, value in dataclasses.asdict(speed).items()}
        if steps < 1:
            raise SystemExit(f"No step of {name} fits: {options.seconds} s, or {options.train_images} images.")
        every = max(1, steps // (options.checkpoints + 1)) if options.checkpoints else 10**6
        began, seconds, run = self.time_training(name, flags, steps, every)
        lines = read_metrics(run)
        if not lines:
            raise SystemExit(f"{name} was stopped before its first step: raise --seconds.")
        last, images = lines[-1], lines[-1]["images"]
        saved = sorted(int(path.parent.name.split("_")[1]) for path in run.glob("checkpoints/step_*/manifest.json"))
        if last["step"] == steps:
            self.speeds[key] = Speed.of(seconds, images, lines)
        return {
            "settings": yaml.safe_load((run / "config.yaml").read_text()),
            "planned": planned,
            "steps": last["step"],
            "ended with its schedule": last["step"] == steps,
            "steps scored": saved,
            "images": images,
            "seconds": round(seconds, 2),
            "within the limit": options.seconds is None or seconds <= options.seconds,
            "seconds to the first metrics": round(lines[0]["time"] - began, 2),
            "seconds outside of steps": round(seconds - images / Speed.of(seconds, images, lines).images_per_second, 2),
            "images per second": round(Speed.of(seconds, images, lines).images_per_second, 1),
            "mfu": round(median(line["train/mfu"] for line in lines), 4),
            "learning rate of the last step": last["train/learning_rate"],
            "train/loss, mean of the last 100 steps": round(mean(line["train/loss"] for line in lines[-100:]), 5),
            "curve": loss_curve(lines, began),
        }

    def probe(self, name: str, flags: Flags, batch: int) -> Speed:
        """Measure the speed of a training by a short one of the same settings."""
        _, seconds, run = self.time_training(name, flags, self.options.probe_steps, 10**6)
        lines = read_metrics(run)
        shutil.rmtree(run)
        speed = Speed.of(seconds, lines[-1]["images"], lines)
        probes = self.record.setdefault("probes", {})
        probes[name] = {"seconds": round(seconds, 1), **dataclasses.asdict(speed)}
        self.save()
        return speed

    def time_training(self, name: str, flags: Flags, steps: int, every: int) -> tuple[float, float, Path]:
        """Train anew in a cold process; returns when it began, its seconds, and its folder."""
        options, run = self.options, self.folder / "runs" / name
        shutil.rmtree(run, ignore_errors=True)
        words, _ = self.command()
        words += ["--data_path", options.data, "--results_dir", run.parent, "--run_name", name, "--epochs", 10**6,
                  "--max_steps", steps, "--ckpt_every", every, "--keep_last", options.checkpoints + 2]  # fmt: skip
        print(f"{name}: {steps:,} steps", flush=True)
        with compile_cache(self.folder / "compiled", options.warm) as variables:
            began, started = time.time(), time.perf_counter()
            process = self.runner.start(f"train-{name}", *words, *to_words(flags), variables=variables)
            try:
                process.wait(options.seconds and OVERTIME * options.seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(PATIENCE)
            seconds = time.perf_counter() - started
        self.runner.check(f"train-{name}", process, STOPPED)
        print(f"{name}: {seconds:.1f} s", flush=True)
        return began, seconds, run

    def score(self, run: Record, checkpoint: Path, wanted: Record) -> None:
        """Generate and score the images of one checkpoint, as far as the record does not have it."""
        found = next((one for one in run["scores"] if one.items() >= wanted.items()), None)
        if found is None:
            run["scores"].append(found := dict(wanted))
        name = "-".join([run["recipe"], str(run["seed"]), f"step{wanted['step']}", self.sampler_name(wanted)])
        name += f"-{wanted['images']}"
        images, output = self.folder / "images" / name, self.folder / "evaluations" / name
        weights = ("--inception_weights", self.options.inception_weights)
        if "fid" not in found:
            generate = ("generate", "--model_path", checkpoint, "--prompts_csv", self.prompts(wanted["images"]),
                        "--output_dir", images, "--weights", self.options.weights, "--batch_size",
                        min(self.options.batch, wanted["images"]), *self.sampler_flags(wanted))  # fmt: skip
            found["seconds of generation"] = round(self.runner.run(f"generate-{name}", *generate), 1)
            found["images per second"] = round(warm_rate(images, min(self.options.batch, wanted["images"])), 1)
            self.save()
            evaluate = ("evaluate", "--images", images, "--reference", self.data.statistics, "--output_dir", output)
            found["seconds of evaluation"] = round(self.runner.run(f"evaluate-{name}", *evaluate, *weights), 1)
            found |= self.read_report(output, wanted["images"])
            self.save()
        if "kid, test images" not in found:
            started = time.perf_counter()
            found |= self.data.check_images(images, output / "features")
            found["seconds of the comparison with test images"] = round(time.perf_counter() - started, 1)
            self.save()
        print(f"{name}: FID {found['fid']:.3f}", flush=True)
        self.keep_examples(name, images)
        if not self.options.keep:
            shutil.rmtree(images, ignore_errors=True)
            shutil.rmtree(output / "features", ignore_errors=True)

    def sampler_name(self, wanted: Record) -> str:
        """Name a sampler in the names of folders."""
        return f"{wanted['sampler steps']}x{wanted['guidance']:g}"

    def sampler_flags(self, wanted: Record) -> list[object]:
        """Return the flags of generate for a sampler."""
        return ["--guidance_scale", wanted["guidance"], "--num_inference_steps", wanted["sampler steps"]]

    def keep_examples(self, name: str, images: Path) -> None:
        """Keep some images before they are deleted."""

    def prompts(self, count: int) -> Path:
        """Write a table of the classes in turn."""
        path = self.folder / f"prompts-{count}.csv"
        path.write_text("prompt\n" + "".join(f"{row % self.data.classes}\n" for row in range(count)))
        return path

    @staticmethod
    def read_report(output: Path, images: int) -> Record:
        """Return the scores of a report."""
        report = json.loads((output / "report.json").read_text())
        if report["images"]["count"] != images:
            raise SystemExit(f"{output} is of {report['images']['count']} images, not {images}.")
        found: Record = {"reference images": report["reference"]["count"]}
        for name in ("fid", "kid", "precision", "recall", "density", "coverage"):
            score = report["scores"][name]
            found |= {name: score["value"], f"{name}, 95%": [score["low"], score["high"]]}
        return found

    def table(self) -> str:
        """Return all scores as a table, the best FID first."""
        columns = ("recipe", "seed", "s", "images seen", "images/s", "step", "sampler", "w", "scored", "FID (95%)",
                   "KID test", "precision", "recall", "near in pixels", "near in features")  # fmt: skip
        rows = [(run, score) for run in self.record["runs"] for score in run["scores"] if "kid, test images" in score]
        lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        spaces = [f"nearest training image, {name}" for name in ("pixels", "features")]
        for run, score in sorted(rows, key=lambda pair: pair[1]["fid"]):
            low, high = score["fid, 95%"]
            late = "" if run["within the limit"] and run["ended with its schedule"] else " (late)"
            cells = (run["recipe"], run["seed"], f"{run['seconds']:.0f}{late}", f"{run['images']:,}",
                     f"{run['images per second']:,.0f}", f"{score['step']:,}", score["sampler steps"], score["guidance"],
                     f"{score['images']:,}", f"{score['fid']:.2f} ({low:.2f} to {high:.2f})",
                     f"{score['kid, test images']:.5f}", f"{score['precision']:.3f}", f"{score['recall']:.3f}",
                     *(f"{score[space][NEAR]:.2%}" for space in spaces))  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)


@contextmanager
def compile_cache(folder: Path, warm: bool) -> Iterator[dict[str, str]]:
    """Yield the variables that name a compile cache; unless `warm`, it is empty."""
    if not warm:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    yield {INDUCTOR_VARIABLE: str(folder.absolute()), TRITON_VARIABLE: str(folder.absolute() / "triton")}


def commit() -> str:
    """Return the commit of this tree, with + where files differ from it; ? where git does not know."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, text=True)
    return found.stdout.strip() or "?"


def add_options(parser: argparse.ArgumentParser, recipes: Mapping[str, str]) -> None:
    """Add the options of all trainings and scores."""
    parser.add_argument("record", type=Path, help="JSON file to write, or to go on with")
    parser.add_argument(
        "--data", type=Path, required=True, help="as by bench/cifar10_data.py: train_x, train_y, test_x, test_y"
    )
    parser.add_argument("--inception_weights", type=Path, required=True, help="as of evaluate")
    parser.add_argument("--folder", type=Path, required=True, help="for runs, images and evaluations")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="limit of a training, from the start of its process to its end")
    length.add_argument("--train_images", type=int, help="length of a training, instead of a limit")
    parser.add_argument(
        "--recipe", nargs="+", default=[next(iter(recipes))], help=f"{', '.join(recipes)}; + joins several"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--weights", default="ema1", choices=("model", "ema1", "ema2"))
    parser.add_argument("--images", type=int, default=50_000, help="generated and scored")
    parser.add_argument("--batch", type=int, default=1000, help="images generated at once")
    parser.add_argument("--checkpoints", type=int, default=0, help="also scored during training, for a curve")
    parser.add_argument("--curve_images", type=int, default=5000, help="generated for each of them")
    parser.add_argument("--probe_steps", type=int, default=200)
    parser.add_argument("--warm", action="store_true", help="keep compiled code from run to run: for ablations")
    parser.add_argument("--keep", action="store_true", help="keep images and features after they are scored")
    parser.add_argument("--commit", help="where the tree has no .git")


def start(kind: type[Speedrun], parser: argparse.ArgumentParser) -> None:
    """Read the options and run."""
    options, words = parser.parse_known_args()
    further = read_flags(words)
    for recipe in options.recipe:
        recipe_flags(recipe, further, kind.recipes)  # a name that does not exist fails before anything runs
    options.folder.mkdir(parents=True, exist_ok=True)
    kind(options, further).run()


def main() -> None:
    """Measure trainings from scratch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser, RECIPES)
    parser.add_argument("--guidance", nargs="+", type=float, default=[1.0, 1.5], help="guidance scales; 1: none")
    parser.add_argument("--steps", nargs="+", type=int, default=[25], help="of the sampler")
    start(Speedrun, parser)


if __name__ == "__main__":
    main()
