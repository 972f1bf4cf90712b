"""Sample images from every GPU at every checkpoint, and the contact sheet that shows them side by side.

    samples/step_0000500/gpu_0_sample.png, gpu_0_prompt.txt      further images of a GPU: gpu_0_sample_2.png, ...
    samples/sheet.png                                            rows: prompts, columns: checkpoints

Sample i has prompt i modulo their number and seed + i, on whichever GPU: GPU r generates samples r, r + GPUs, ...

No collective runs here: a rank that fails logs the error, and the others go on.
"""

from __future__ import annotations

import io
import logging
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from muralist.core.errors import UserError
from muralist.core.images import contact_sheet, encode_png, to_uint8_array
from muralist.core.run_dir import atomic_write, check_exists
from muralist.models.spec import ModelSpec
from muralist.settings import SampleSettings
from muralist.train.checkpoint import folder_name, list_checkpoints, step_of
from muralist.train.loggers import MetricsLogger

log = logging.getLogger("muralist")
_MAX_COLUMNS = 10
_ON_ONE_GPU = (4, 8)  # fewest and most samples of a GPU that trains alone, by default
_MIN_WIDTH, _MAX_WIDTH, _GAP = 96, 256, 6
_PROMPT_FILE = re.compile(r"gpu_(?P<rank>\d+)_prompt(?P<number>(?:_(?P<turn>\d+))?)\.txt")
_MAX_FILE_NAME = 256  # bytes; a longer prompt cannot be a file, and asking the disk for one would be an error


def samples_of_rank(prompts: Sequence[str], settings: SampleSettings, rank: int, ranks: int) -> list[int]:
    """The samples of a GPU: as many as asked for, and together at least one for every prompt that was given."""
    if settings.per_gpu == 0:
        return []
    if settings.per_gpu != "auto":
        count = settings.per_gpu * ranks
    else:
        alone = ranks == 1 and not settings.prompts
        count = min(max(len(prompts), _ON_ONE_GPU[0]), _ON_ONE_GPU[1]) if alone else ranks
    if settings.prompts:
        count = max(count, len(prompts))
    return list(range(rank, count, ranks))


def read_prompts(given: Sequence[str], spec: ModelSpec, captions: Callable[[], list[str]] = list) -> list[str]:
    """Prompts from the settings: the lines of a text file, the texts themselves, or the model's defaults.

    A model without defaults takes `captions` of its training data.
    """
    prompts = [prompt.strip() for prompt in given]
    if len(prompts) == 1 and len(prompts[0].encode()) < _MAX_FILE_NAME:
        file = Path(prompts[0])
        if file.is_file():
            prompts = _read_lines(file)
        elif file.suffix == ".txt" and " " not in prompts[0]:
            check_exists(file, "file of --sample_prompts", "Give a text file with one prompt per line, or the prompts.")
    prompts = prompts or spec.default_prompts() or captions() or [""]
    spec.check_prompts(prompts)
    return prompts


def _read_lines(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"Cannot read the prompts in {file}: {reason}.") from None
    if not lines:
        raise UserError(f"The file {file} holds no prompts.", fix="Write one prompt per line.")
    return lines


@torch.no_grad()
def generate_samples(
    spec: ModelSpec,
    network: nn.Module,
    prompts: Sequence[str],
    chosen: Sequence[int],
    settings: SampleSettings,
    autocast: torch.dtype | None,
) -> np.ndarray:
    """Generate the chosen samples, uint8 [B, H, W, 3]."""
    device = next(network.parameters()).device
    texts, seeds = [prompts[i % len(prompts)] for i in chosen], [settings.seed + i for i in chosen]
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        return to_uint8_array(spec.sample(network, texts, seeds, settings))


def write_samples(
    folder: Path,
    step: int,
    rank: int,
    ranks: int,
    spec: ModelSpec,
    network: nn.Module,
    prompts: Sequence[str],
    settings: SampleSettings,
    autocast: torch.dtype | None,
    loggers: Sequence[MetricsLogger],
    logger: logging.Logger = log,
    at_once: int = 1,
) -> None:
    """Generate and write this rank's samples of a step, `at_once` in a batch.

    An error is logged and written down, and training goes on.
    """
    target = folder / folder_name(step)
    chosen = samples_of_rank(prompts, settings, rank, ranks)
    was_training = network.training
    try:
        network.eval()
        logger.info("Generating samples at step %d", step)
        target.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(chosen), at_once):
            batch = chosen[start : start + at_once]
            images = generate_samples(spec, network, prompts, batch, settings, autocast)
            for turn, (index, image) in enumerate(zip(batch, images, strict=True), start=start):
                number, prompt = f"_{turn + 1}" if turn else "", prompts[index % len(prompts)]
                texts = {"prompt": prompt, "seed": str(settings.seed + index), "step": str(step)}
                atomic_write(target / f"gpu_{rank}_sample{number}.png", encode_png(image, texts))
                atomic_write(target / f"gpu_{rank}_prompt{number}.txt", prompt + "\n")
                for metrics_logger in loggers:
                    metrics_logger.image(step, f"samples/gpu_{rank}{number}", image, prompt)
        if rank == 0:
            write_sheet(folder, prompts)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.error("Error during sampling on GPU %d: %s", rank, reason)
        with suppress(OSError):  # the disk itself may be the reason
            atomic_write(target / f"gpu_{rank}_error.txt", reason + "\n")
    finally:
        network.train(was_training)


def collect_samples(folder: Path, step: int, prompts: Sequence[str], loggers: Sequence[MetricsLogger]) -> None:
    """Log the samples of the other ranks and add them to the sheet; for the main rank, which alone has loggers."""
    try:
        for prompt, image_file in _samples_in(folder / folder_name(step)):
            if image_file.name.startswith("gpu_0_"):
                continue
            with Image.open(image_file) as image:
                image_u8 = np.asarray(image.convert("RGB"))
            for metrics_logger in loggers:
                metrics_logger.image(step, f"samples/{image_file.stem.replace('_sample', '', 1)}", image_u8, prompt)
        write_sheet(folder, prompts)
    except OSError as error:
        log.error("Cannot collect the samples of step %d: %s", step, error)


def _samples_in(step_folder: Path) -> Iterator[tuple[str, Path]]:
    """Prompt and image file of every sample of a step, in the order of the samples."""
    texts = step_folder.iterdir() if step_folder.is_dir() else ()
    found = [(match, text) for text in texts if (match := _PROMPT_FILE.fullmatch(text.name))]
    for match, text in sorted(found, key=lambda pair: (int(pair[0]["turn"] or 1), int(pair[0]["rank"]))):
        image_file = text.with_name(f"gpu_{match['rank']}_sample{match['number']}.png")
        if image_file.is_file():
            yield text.read_text(encoding="utf-8").strip(), image_file


def write_sheet(folder: Path, prompts: Sequence[str]) -> Path | None:
    """Write the contact sheet of a run: rows are prompts, columns checkpoints, evenly chosen when there are many.

    A prompt with several samples has as many rows.
    """
    columns: list[tuple[int, dict[tuple[str, int], Path]]] = []
    for step_folder in list_checkpoints(folder):
        repeats: Counter[str] = Counter()
        files: dict[tuple[str, int], Path] = {}
        for prompt, file in _samples_in(step_folder):
            repeats[prompt] += 1
            files[prompt, repeats[prompt]] = file
        if files:
            columns.append((step_of(step_folder), files))
    if len(columns) > _MAX_COLUMNS:
        columns = [columns[round(i * (len(columns) - 1) / (_MAX_COLUMNS - 1))] for i in range(_MAX_COLUMNS)]
    found = {row for _, files in columns for row in files}
    order = {prompt: place for place, prompt in reversed(list(enumerate(prompts)))}
    shown = sorted((row for row in found if row[0] in order), key=lambda row: (order[row[0]], row[1]))
    if not shown:
        return None
    with Image.open(next(iter(columns[-1][1].values()))) as image:
        width = min(_MAX_WIDTH, image.width * max(1, math.ceil(_MIN_WIDTH / image.width)))
        cell = (width, round(width * image.height / image.width))

    def read(file: Path | None) -> Image.Image | None:
        if file is None:
            return None
        with Image.open(file) as image:
            return image.convert("RGB").resize(cell, Image.Resampling.LANCZOS)

    rows = [[read(files.get(row)) for _, files in columns] for row in shown]
    titles = [f"step {step:,}" for step, _ in columns]
    labels = [prompt if number == 1 else f"{prompt} ({number})" for prompt, number in shown]
    buffer = io.BytesIO()
    contact_sheet(rows, len(columns), cell, _GAP, labels=labels, titles=titles).save(buffer, "PNG")
    atomic_write(folder / "sheet.png", buffer.getvalue())
    return folder / "sheet.png"


@torch.no_grad()
def sample_images_multi_gpu(
    model: Any,
    diffusion: Any,
    vae: nn.Module,
    text_encoder: nn.Module,
    tokenizer: Any,
    text_encoder_t5: nn.Module,
    tokenizer_t5: Any,
    rank: int,
    world_size: int,
    args: Namespace,
    logger: logging.Logger,
    train_steps: int,
) -> None:
    """Generate and write this GPU's HunyuanDiT samples in a training script of your own; errors never stop training.

    `model` is the network with the weights to sample with, `diffusion` its noise schedule (a diffusers scheduler, or
    its config). `args` has `samples_dir` and `image_size`, and may have `sample_prompts`, `sample_steps`,
    `sample_guidance`, `sample_seed`, `samples_per_gpu`, `sample_solver`, `autocast` (a dtype), `monitors` (metrics
    loggers) and `embedded_prompts` (a dict that is filled here, so that each prompt is embedded only once).
    """
    from muralist.models.hunyuan_dit import FrozenEncoders, HunyuanDiTSpec

    schedule = diffusion if isinstance(diffusion, Mapping) else diffusion.config
    network = getattr(model, "module", model)  # as DistributedDataParallel keeps it
    cache = getattr(args, "embedded_prompts", {})
    encoders = FrozenEncoders(vae, text_encoder, tokenizer, text_encoder_t5, tokenizer_t5, cache)
    size = (int(args.image_size[0]), int(args.image_size[1]))
    spec = HunyuanDiTSpec(encoders, dict(_transformer_config(network)), dict(schedule), size)
    names = {"steps": "sample_steps", "guidance": "sample_guidance", "seed": "sample_seed", "solver": "sample_solver"}
    given = {ours: getattr(args, theirs, None) for ours, theirs in {**names, "per_gpu": "samples_per_gpu"}.items()}
    settings = SampleSettings(**{name: value for name, value in given.items() if value is not None})
    prompts = list(getattr(args, "sample_prompts", None) or spec.default_prompts())
    settings = settings.model_copy(update={"prompts": list(getattr(args, "sample_prompts", None) or [])})
    autocast, loggers = getattr(args, "autocast", None), getattr(args, "monitors", ())
    folder = Path(args.samples_dir)
    write_samples(folder, train_steps, rank, world_size, spec, network, prompts, settings, autocast, loggers, logger)


def _transformer_config(network: Any) -> Mapping[str, Any]:
    while not hasattr(network, "config"):
        network = network.network  # SwappedWeights
    return network.config
