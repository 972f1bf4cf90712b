"""Measured speeds: of a run, of a file under bench/results, of a probe."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muralist.errors import UserError
from muralist.models import variants

_WARM_UP = 0.1  # of a run's steps, in which caches fill and clocks rise
_BATCH = re.compile(r"batch (\d+)")
_CASE = re.compile(r"(.+)@(\d+)x(\d+)")  # of bench/train_speed.py: model, size, batch


@dataclass(frozen=True)
class Measured:
    """Readings of a training's speed."""

    origin: str
    model: str
    img_size: int
    batch_size: int
    gpu: str
    gpus: int
    readings: tuple[float, ...]
    """Tokens per second of all GPUs together."""
    image_bytes: float | None = None
    """Memory that each image took, where that was measured."""

    def per_gpu(self) -> tuple[float, float, float]:
        """Low, middle and high tokens per second of one GPU: a tenth of the readings is below low, a tenth above high."""
        return tuple(_quantile(self.readings, part) / self.gpus for part in (0.1, 0.5, 0.9))  # type: ignore[return-value]


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def read_measured(path: Path, batch_size: int | None) -> Measured:
    """A run's folder or a file of bench/results; of several batch sizes, the one that was asked for or the nearest."""
    if (path / "metrics.jsonl").is_file():
        return _read_run(path)
    if path.is_file() and path.suffix == ".json":
        return _read_bench(path, batch_size)
    raise UserError(
        f"{path} is no measurement.",
        "A run's folder has a metrics.jsonl; a benchmark's result is a .json file.",
        "Give one of them as --from, or `--from probe` to measure this machine.",
    )


def _read_run(run: Path) -> Measured:
    from muralist.config import from_yaml
    from muralist.settings import TrainSettings

    settings = from_yaml(TrainSettings, run / "config.yaml")
    _require_jit(settings.model.name, run)
    readings: list[float] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            readings.append(float(json.loads(line)["train/tokens_per_second"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short
    # Steps that were written out together have one reading among them.
    distinct = [value for before, value in zip([None, *readings], readings, strict=False) if value != before]
    kept = distinct[int(_WARM_UP * len(distinct)) :] if len(distinct) > 2 else distinct
    if not kept:
        raise UserError(f"The run {run} has no metrics yet.", fix="Wait for its first steps.")
    log = run / "logs" / "train.log"
    said = log.read_text(errors="replace") if log.is_file() else ""
    processes = re.findall(r"Number of processes: (\d+)", said)
    gpus = int(processes[-1]) if processes else 1
    share = (settings.data.global_batch_size or settings.data.batch_size * gpus) // gpus
    devices = re.findall(r" device +(.+)", said)
    kind = devices[-1] if devices else "GPU" if "Number of GPUs:" in said else "CPU"
    side = variants.square(settings.model.img_size)
    return Measured(str(run), settings.model.name, side, share, kind, gpus, tuple(kept))


def _read_bench(file: Path, batch_size: int | None) -> Measured:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        hardware = content.get("hardware", {})
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from None
    model, side, batch = _model_of(str(content.get("command", "")))
    by_batch = {
        int(match[1]): value["tokens/s"]
        for key, value in content.items()
        if (match := _BATCH.fullmatch(key)) and isinstance(value, dict) and "tokens/s" in value
    }
    if steps := _steps(content.get("rows")):
        (model, side), by_batch = next(iter(steps.items()))
    if by_batch:
        batch = min(by_batch, key=lambda size: abs(size - (batch_size or batch)))
        readings = by_batch[batch]
    elif "median train/tokens_per_second" in content:
        readings = content.get("tokens/s", [content["median train/tokens_per_second"]])
    else:
        raise UserError(f"{file} says nothing of a training's tokens per second.", fix="Choose another result.")
    gpu = str(hardware.get("gpu", hardware.get("cpu", "unknown")))
    return Measured(str(file), model, side, batch, gpu, int(hardware.get("gpus") or 1), tuple(map(float, readings)))


def _steps(rows: Any) -> dict[tuple[str, int], dict[int, list[float]]]:
    """Tokens per second of the steps that `muralist train` takes, by model and size, and by batch."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows if isinstance(rows, list) else ():
        try:
            case, words = _CASE.fullmatch(row["case"]), row["variant"].split("+")
            best = 1e3 * row["K tokens/s"]
            again = best * row["ms a step"] / row["ms a step, the other row"]
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            continue  # of another bench, or damaged
        if case and words[0] == "fused" and "fp8" not in words:
            found.setdefault((case[1], int(case[2])), {})[int(case[3])] = [again, best]
    return found


def _model_of(command: str) -> tuple[str, int, int]:
    """Model, size and batch that a recorded command trained; what it does not say is the default's."""
    from muralist.config import from_yaml
    from muralist.settings import TrainSettings

    config = re.search(r"--config[= ](\S+)", command)
    settings = from_yaml(TrainSettings, Path(config[1])) if config and Path(config[1]).is_file() else TrainSettings()
    name = re.search(r"--model[= ](\S+)", command)
    side = re.search(r"--im(?:a)?ge?_size[= ](\d+)", command)
    batch = re.search(r"--batch_size[= ](\d+)", command)
    model = name[1] if name else settings.model.name
    _require_jit(model, command)
    return (
        model,
        int(side[1]) if side else variants.square(settings.model.img_size),
        int(batch[1]) if batch else settings.data.batch_size,
    )


def _require_jit(model: str, where: object) -> None:
    if variants.is_hunyuan(model):
        raise UserError(f"{where} is of HunyuanDiT; estimates are made for JiT.", fix="Give a measurement of a JiT.")
