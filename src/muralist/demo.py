"""`muralist demo`: a small conditional JiT learns eight driving scenes on two CPU cores, and one can watch it learn."""

from __future__ import annotations

import os
import time

from muralist.runfolder import RunFolder
from muralist.settings import (
    CheckpointSettings,
    DataSettings,
    DemoSettings,
    ModelSettings,
    OptimSettings,
    SampleSettings,
    TrainSettings,
)
from muralist.words import duration

RUN_NAME = "demo"
STEPS = 1500


def demo_settings(results_dir: str, max_steps: int | None) -> TrainSettings:
    """The demo as a recipe: 64 px in patches of 8, batch 32, a falling learning rate."""
    return TrainSettings(
        data=DataSettings(path="driving_world", batch_size=32, max_samples=8000, num_workers=1),
        model=ModelSettings(name="JiT-T/8", img_size=64, enable_condition=True),
        optim=OptimSettings(learning_rate=2e-3, lr_schedule="cosine", warmup_steps=50, beta2=0.99),
        checkpoint=CheckpointSettings(every=STEPS // 6, init_from="none"),
        samples=SampleSettings(per_gpu=8, steps=20, guidance=2.0, interval=(0.0, 1.0)),
        epochs=STEPS * 32 // 8000,
        max_steps=max_steps,
        results_dir=results_dir,
        run_name=RUN_NAME,
    )


def demo(settings: DemoSettings) -> int:
    """Train, then say where to look."""
    from muralist.train.loop import train

    started = time.monotonic()
    status = train(demo_settings(settings.results_dir, settings.max_steps), RUN_NAME)
    sheet = RunFolder.named(settings.results_dir, RUN_NAME).samples / "sheet.png"
    if status == 0 and sheet.exists():
        print(f"\nEight prompts, from noise to scenes, in {duration(time.monotonic() - started)}:\n  {os.fspath(sheet)}")
    return status
