"""Who is told how training goes: metrics.jsonl, TensorBoard, W&B, the log file and the progress line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from muralist.errors import UserError
from muralist.runfolder import RunFolder, no_space, write_atomically
from muralist.settings import LogSettings
from muralist.words import duration

log = logging.getLogger("muralist")
Scalars = Mapping[str, float]


class Monitor(Protocol):
    """Takes scalars and pictures; one file and one line in `open_monitors` add another."""

    def scalars(self, step: int, values: Scalars) -> None:
        """Record named numbers of a step."""

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record a picture, uint8 [H, W, 3]."""

    def flush(self) -> None:
        """Make what was recorded survive a crash."""

    def close(self) -> None:
        """Finish."""


class MetricsFile:
    """metrics.jsonl: one line per step; on resume it is cut back to the checkpoint, so each step stands there once."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        _cut_back(path, first_step)
        self.file = path.open("a", encoding="utf-8")

    def scalars(self, step: int, values: Scalars) -> None:
        """Append one line."""
        try:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise no_space(error, self.path) from None

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Pictures are files of their own under samples/."""

    def flush(self) -> None:
        """Hand the lines to the disk."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise no_space(error, self.path) from None

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _cut_back(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if int(json.loads(line)["step"]) <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by a crash
    write_atomically(path, "".join(kept))


class TensorBoardFiles:
    """TensorBoard event files in the run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted leg wrote beyond its last checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def scalars(self, step: int, values: Scalars) -> None:
        """Record scalars; bookkeeping keys without a group are left to metrics.jsonl."""
        for name, value in values.items():
            if "/" in name:
                self.writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record a picture."""
        self.writer.add_image(name, image_u8, step, dataformats="HWC")

    def flush(self) -> None:
        """Write out."""
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases:
    """A W&B run that goes on under the same id when training is resumed."""

    def __init__(self, run: RunFolder, settings: LogSettings, config: dict[str, Any], first_step: int) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--use_wandb needs the wandb package, which is not installed.",
                fix="Run `pip install 'muralist[wandb]'`.",
            ) from None
        self.wandb = wandb
        name = settings.wandb_name or run.root.name
        self.run = wandb.init(
            project=settings.wandb_project,
            name=name,
            id=run.root.name,
            resume="allow",
            dir=str(run.root),
            config=config,
        )
        log.info("W&B: %s", self.run.url or f"offline, files in {self.run.dir}")

    def scalars(self, step: int, values: Scalars) -> None:
        """Record scalars."""
        self.run.log({name: value for name, value in values.items() if "/" in name}, step=step)

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record a picture with its prompt."""
        self.run.log({name: self.wandb.Image(image_u8, caption=caption)}, step=step)

    def flush(self) -> None:
        """W&B uploads in a process of its own."""

    def close(self) -> None:
        """Finish the W&B run."""
        self.run.finish()


def open_monitors(run: RunFolder, settings: LogSettings, config: dict[str, Any], first_step: int) -> list[Monitor]:
    """The monitors of this run, continuing after `first_step`."""
    monitors: list[Monitor] = [MetricsFile(run.metrics, first_step)]
    if settings.use_tensorboard:
        monitors.append(TensorBoardFiles(run.tensorboard, first_step))
    if settings.use_wandb:
        monitors.append(WeightsAndBiases(run, settings, config, first_step))
    return monitors


console = Console(highlight=False)


def start_log(path: Path | None, rank: int) -> None:
    """Send log lines to the terminal (rank 0; warnings from all) and to the run's log file (rank 0)."""
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    terminal: logging.Handler
    if console.is_terminal:
        terminal = RichHandler(
            console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S", markup=False
        )
    else:
        terminal = logging.StreamHandler(sys.stdout)
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(terminal)
    if path is not None and rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(file)


class _Facts(ProgressColumn):
    """Loss, images/s, tokens/s and MFU of the last steps."""

    def render(self, task: Task) -> Text:
        """Draw the column."""
        return Text(str(task.fields.get("facts", "")))


class ProgressLine:
    """One line on a terminal, a log line every so often: loss, images/s, tokens/s, MFU, time left."""

    def __init__(self, first_step: int, last_step: int, log_every: int, quiet: bool) -> None:
        self.log_every, self.last_step = log_every, last_step
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            _Facts(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("train", total=last_step, completed=first_step)
        self.bar.start()

    def show(self, step: int, values: Scalars) -> None:
        """Update the line; every `log_every` steps write one to the log."""
        facts = (
            f"loss {values['train/loss']:.4f}  {values['train/samples_per_second']:,.1f} images/s  "
            f"{values['train/tokens_per_second']:,.0f} tokens/s  MFU {values['train/mfu']:.1%}"
        )
        self.bar.update(self.task, completed=step, facts=facts)
        if step % self.log_every == 0 or step == self.last_step:
            step_images = values["images"] / step
            left = duration((self.last_step - step) * step_images / values["train/samples_per_second"])
            rates = f"lr {values['train/learning_rate']:.3g}  grad {values['train/grad_norm']:.3f}"
            log.info("step %d/%d  %s  %s  left %s", step, self.last_step, facts, rates, left)

    def close(self) -> None:
        """Take the line away."""
        self.bar.stop()
