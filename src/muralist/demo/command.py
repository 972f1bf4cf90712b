"""`muralist demo`: train a small conditional JiT on eight driving scenes, in minutes on two CPU cores."""

from __future__ import annotations

import sys
import time

from muralist.core.errors import UserError, report_errors
from muralist.core.formatting import format_duration
from muralist.core.hardware import available_cpus
from muralist.core.run_dir import RunDir
from muralist.demo.driving_world import PROMPTS
from muralist.settings import (
    CheckpointSettings,
    DataSettings,
    DemoSettings,
    LogSettings,
    ModelSettings,
    OptimSettings,
    SampleSettings,
    TrainSettings,
)
from muralist.settings.load import load
from muralist.tools.launch import launch

RUN_NAME = "demo"
SCENES, BATCH, EPOCHS, COLUMNS = 3360, 16, 8, 8
STEPS = SCENES * EPOCHS // BATCH


def recipe(settings: DemoSettings) -> TrainSettings:
    """The demo's settings: many small steps and a cosine schedule give the best images after four minutes."""
    return TrainSettings(
        data=DataSettings(
            path="driving_world", global_batch_size=BATCH, max_samples=SCENES, random_flip=False, num_workers=0
        ),
        model=ModelSettings(name="JiT-T/8", img_size=64, enable_condition=True),
        optim=OptimSettings(learning_rate=4e-3, lr_schedule="cosine", warmup_steps=100, beta2=0.99),
        checkpoint=CheckpointSettings(every=STEPS // COLUMNS, keep_last=1, init_from="none"),
        samples=SampleSettings(prompts=list(PROMPTS), steps=20, guidance=1.5, interval=(0.0, 1.0)),
        log=LogSettings(every=50),
        epochs=EPOCHS,
        max_steps=settings.max_steps,
        results_dir=settings.results_dir,
        run_name=RUN_NAME,
    )


def demo(settings: DemoSettings) -> int:
    """Train on every core of a small machine, or on one GPU, then say where to look."""
    import torch

    started = time.monotonic()
    processes = 1 if torch.cuda.is_available() else min(2, available_cpus())
    arguments = [f"--results_dir={settings.results_dir}"]
    if settings.max_steps:
        arguments.append(f"--max_steps={settings.max_steps}")
    # One process a core, one thread each: for a network this small that is faster than threads, and steady under load.
    status = launch([sys.executable, "-m", "muralist.demo.command", *arguments], processes)
    sheet = RunDir.named(settings.results_dir, RUN_NAME).samples / "sheet.png"
    if status == 0 and sheet.exists():
        print(
            f"\nEight prompts, columns of training, {format_duration(time.monotonic() - started)}. Look at:\n  {sheet}"
        )
    return status


def _train(arguments: list[str]) -> int:
    from muralist.tools.doctor.command import check_training
    from muralist.train.resume import SettingsMismatch
    from muralist.train.trainer import train

    settings = load(DemoSettings, arguments, {})
    try:
        return train(recipe(settings), RUN_NAME, preflight=check_training).exit_status
    except SettingsMismatch as error:
        folder = RunDir.named(settings.results_dir, RUN_NAME).root
        raise UserError(error.what, fix=f"Delete {folder}, or give another --results_dir.") from None


if __name__ == "__main__":
    sys.exit(report_errors(lambda: _train(sys.argv[1:])))
