"""Outputs of a run's progress: metrics.jsonl, TensorBoard, W&B, the log file and the progress bar."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from muralist.core.errors import UserError
from muralist.core.formatting import format_duration
from muralist.core.run_dir import RunDir, atomic_write, disk_write_error, is_disk_full, open_no_follow
from muralist.settings import LogSettings, TrainSettings

log = logging.getLogger("muralist")
Scalars = Mapping[str, float]


class MetricsLogger:
    """Records scalars and images; a class and a line in `open_loggers` add another one."""

    def scalars(self, step: int, values: Scalars) -> None:
        """Record named values of a step."""

    def image(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record an image, uint8 [H, W, 3]."""

    def flush(self) -> None:
        """Write to disk what was recorded."""

    def close(self) -> None:
        """Finish."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_write_error(error, path) from None


class JsonlLogger(MetricsLogger):
    """metrics.jsonl: one line per step, with its hardware; truncated on resume, so that each step appears once."""

    def __init__(self, path: Path, first_step: int, hardware: Mapping[str, int | str] = {}) -> None:
        self.path, self.hardware = path, hardware
        _truncate(path, first_step)
        self.file = open_no_follow(path, "a", encoding="utf-8", buffering=1)  # line-buffered, for `tail -f`

    def scalars(self, step: int, values: Scalars) -> None:
        """Append one line."""
        with _writing(self.path):
            self.file.write(json.dumps({"step": step, **values, **self.hardware}) + "\n")

    def flush(self) -> None:
        """Flush the lines to disk."""
        with _writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # lines that a full disk refuses are not part of a checkpoint
            self.file.close()


def _truncate(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line truncated by a crash
            if int(json.loads(line)["step"]) <= last_step:
                kept.append(line + "\n")
    atomic_write(path, "".join(kept))


def _ignore_full_disk(arguments: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread would print a traceback when the disk is full; the main thread reports it."""
    if not is_disk_full(arguments.exc_value):
        threading.__excepthook__(arguments)


class TensorBoardLogger(MetricsLogger):
    """TensorBoard event files in the run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _ignore_full_disk
        # purge_step hides what an interrupted run wrote after its last checkpoint.
        with _writing(folder):
            self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self.folder = folder

    def scalars(self, step: int, values: Scalars) -> None:
        """Record scalars; keys without a group, such as images, are only in metrics.jsonl."""
        with _writing(self.folder):
            for name, value in values.items():
                if "/" in name:
                    self.writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record an image."""
        with _writing(self.folder):
            self.writer.add_image(name, image_u8, step, dataformats="HWC")

    def flush(self) -> None:
        """Flush the event file."""
        with _writing(self.folder):
            self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with suppress(OSError):
            self.writer.close()


class WandbLogger(MetricsLogger):
    """A W&B run that keeps its id when training is resumed."""

    def __init__(self, run: RunDir, settings: LogSettings, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--use_wandb needs the wandb package, which is not installed.",
                fix="Run `pip install 'muralist[wandb]'`.",
            ) from None
        self.wandb = wandb
        # One id per run folder: a run with the same name elsewhere is another W&B run.
        identity, name = run.root / "wandb_id", settings.wandb_name or run.root.name
        if not identity.exists():
            atomic_write(identity, secrets.token_hex(4))
        project, run_id, folder = settings.wandb_project, identity.read_text().strip(), str(run.root)
        try:
            self.run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=folder, config=config)
        except wandb.Error as error:
            raise UserError(
                f"W&B could not start: {error}.",
                fix="Run `wandb login`, or set WANDB_MODE=offline, or leave --use_wandb out.",
            ) from None
        log.info("W&B: %s", self.run.url or f"offline, files in {self.run.dir}")

    def scalars(self, step: int, values: Scalars) -> None:
        """Record scalars."""
        self.run.log({name: value for name, value in values.items() if "/" in name}, step=step)

    def image(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record an image with its prompt."""
        self.run.log({name: self.wandb.Image(image_u8, caption=caption)}, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self.run.finish()


def open_loggers(
    run: RunDir, settings: TrainSettings, first_step: int, hardware: Mapping[str, int | str]
) -> list[MetricsLogger]:
    """Open the loggers of a run, continuing after `first_step`."""
    loggers: list[MetricsLogger] = [JsonlLogger(run.metrics, first_step, hardware)]
    if settings.log.use_tensorboard:
        loggers.append(TensorBoardLogger(run.tensorboard, first_step))
    if settings.log.use_wandb:
        loggers.append(WandbLogger(run, settings.log, settings.model_dump(mode="json")))
    return loggers


console = Console(highlight=False)


class _Output(logging.StreamHandler):
    """A stream; a line that cannot be written, because of a full disk or `| head`, is dropped without a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report only errors that are not the system's."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LogFile(_Output, logging.FileHandler):
    """The run's log file."""

    def _open(self) -> Any:
        """Open without following a symbolic link."""
        return open_no_follow(Path(self.baseFilename), "a", encoding=self.encoding)


def start_log(path: Path | None, rank: int) -> None:
    """Log to the terminal (rank 0; warnings from all ranks) and to the run's log file (rank 0)."""
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    terminal: logging.Handler = _Output(sys.stdout)
    if console.is_terminal:
        terminal = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(terminal)
    if path is not None and rank == 0:
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _LogFile(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(file)


class ProgressLogger:
    """A progress bar on a terminal, and a log line every `log_every` steps: loss, speed, MFU, time left."""

    def __init__(self, first_step: int, last_step: int, log_every: int, quiet: bool) -> None:
        self.log_every, self.last_step = log_every, last_step
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("train", total=last_step, completed=first_step, metrics="")
        self.bar.start()

    def show(self, step: int, values: Scalars) -> None:
        """Update the progress bar; every `log_every` steps write a log line."""
        metrics = (
            f"loss {values.get('train/loss', float('nan')):.4f}  {values['train/samples_per_second']:,.1f} images/s  "
            f"{values['train/tokens_per_second']:,.0f} tokens/s  MFU {values['train/mfu']:.1%}"
        )
        self.bar.update(self.task, completed=step, metrics=metrics)
        if step % self.log_every == 0 or step == self.last_step:
            step_images = values["images"] / step
            left = format_duration((self.last_step - step) * step_images / values["train/samples_per_second"])
            norm = values.get("train/grad_norm", float("nan"))
            rates = f"lr {values['train/learning_rate']:.3g}  grad {norm:.3f}"
            log.info("step %d/%d  %s  %s  left %s", step, self.last_step, metrics, rates, left)

    def close(self) -> None:
        """Remove the progress bar."""
        self.bar.stop()
