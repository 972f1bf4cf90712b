"""Who is told how training goes: metrics.jsonl, TensorBoard, W&B, the log file and the progress line."""

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
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from muralist.errors import UserError
from muralist.runfolder import RunFolder, is_full, no_space, open_own, write_atomically
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise no_space(error, path) from None


class MetricsFile:
    """metrics.jsonl: one line per step; on resume it is cut back to the checkpoint, so each step stands there once."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        _cut_back(path, first_step)
        self.file = open_own(path, "a", encoding="utf-8", buffering=1)  # whole lines, so that one can watch them come

    def scalars(self, step: int, values: Scalars) -> None:
        """Append one line."""
        with _writing(self.path):
            self.file.write(json.dumps({"step": step, **values}) + "\n")

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Pictures are files of their own under samples/."""

    def flush(self) -> None:
        """Hand the lines to the disk."""
        with _writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what a full disk does not take was never part of a checkpoint
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


def _quiet_about_disks(arguments: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread would print a traceback when the disk is full; the main thread is told and says it better."""
    if not is_full(arguments.exc_value):
        threading.__excepthook__(arguments)


class TensorBoardFiles:
    """TensorBoard event files in the run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _quiet_about_disks
        # purge_step hides what an interrupted leg wrote beyond its last checkpoint.
        with _writing(folder):
            self.writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self.folder = folder

    def scalars(self, step: int, values: Scalars) -> None:
        """Record scalars; bookkeeping keys without a group are left to metrics.jsonl."""
        with _writing(self.folder):
            for name, value in values.items():
                if "/" in name:
                    self.writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, image_u8: np.ndarray, caption: str) -> None:
        """Record a picture."""
        with _writing(self.folder):
            self.writer.add_image(name, image_u8, step, dataformats="HWC")

    def flush(self) -> None:
        """Write out."""
        with _writing(self.folder):
            self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        with suppress(OSError):
            self.writer.close()


def _wandb_id(run: RunFolder) -> str:
    """One id for the life of a run folder: a run of the same name elsewhere, or made anew, is another W&B run."""
    path = run.root / "wandb_id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(4))
    return path.read_text().strip()


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
        try:
            self.run = wandb.init(
                project=settings.wandb_project,
                name=name,
                id=_wandb_id(run),
                resume="allow",
                dir=str(run.root),
                config=config,
            )
        except wandb.Error as error:
            raise UserError(
                f"W&B could not start: {error}.",
                fix="Run `wandb login`, or set WANDB_MODE=offline, or leave --use_wandb out.",
            ) from None
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


class _Unwritable(logging.Handler):
    """What cannot be written is left out: a traceback at every line would say less than what comes of it does."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over what the system refuses to take."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Output(_Unwritable, logging.StreamHandler):
    """Standard output; when its reader leaves, as `| head` does, training goes on and the run's log has the rest."""


class _LogFile(_Unwritable, logging.FileHandler):
    """The run's log; of a full disk the checkpoint that does not fit speaks."""

    def _open(self) -> Any:
        """As everything that grows in a run's folder: a link under its name is not followed."""
        return open_own(Path(self.baseFilename), "a", encoding=self.encoding)


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
        terminal = _Output(sys.stdout)
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.addHandler(terminal)
    if path is not None and rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = _LogFile(path, encoding="utf-8")
        except OSError as error:
            raise no_space(error, path) from None
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
            f"loss {values.get('train/loss', float('nan')):.4f}  {values['train/samples_per_second']:,.1f} images/s  "
            f"{values['train/tokens_per_second']:,.0f} tokens/s  MFU {values['train/mfu']:.1%}"
        )
        self.bar.update(self.task, completed=step, facts=facts)
        if step % self.log_every == 0 or step == self.last_step:
            step_images = values["images"] / step
            left = duration((self.last_step - step) * step_images / values["train/samples_per_second"])
            norm = values.get("train/grad_norm", float("nan"))
            rates = f"lr {values['train/learning_rate']:.3g}  grad {norm:.3f}"
            log.info("step %d/%d  %s  %s  left %s", step, self.last_step, facts, rates, left)

    def close(self) -> None:
        """Take the line away."""
        self.bar.stop()
