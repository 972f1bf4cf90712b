"""Checks of the job: settings, batch and learning rate, prompts and images, model folder, output folder, packages."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.models.spec import find_family
from muralist.tools.doctor.check import GENERATE, TRAIN, Check, CheckContext, Finding, failed, ok, skipped, warning

_STEEP_RATE = 4.0  # factor above the base learning rate from which warm-up matters
_SHORT_WARMUP = 100  # steps
_SUBSET = 100  # rows or images that are read
_SEED = 0  # the same subset every time, so that a result can be reproduced


@Check(
    "settings",
    symptom="a command with a wrong image size, model or batch",
    why="The run would be refused at its start.",
    fix="Correct the setting that is named.",
    jobs=TRAIN,
)
def check_settings(context: CheckContext) -> Finding:
    """Check that the settings are compatible with each other."""
    from muralist.train import preflight

    assert context.train
    preflight.check_settings(context.train)
    return ok("compatible with each other")


@Check(
    "run folder",
    symptom="a run that resumes, or refuses to resume",
    why="Two runs in one folder would overwrite each other.",
    fix="Give another --run_name, or the settings that the run was started with.",
    jobs=TRAIN,
)
def check_run_folder(context: CheckContext) -> Finding:
    """Check that the run folder is new, or holds a run with the same settings."""
    from muralist.core.run_dir import RunDir
    from muralist.train.resume import check_same_settings

    assert context.train and context.run
    run = RunDir(context.run)
    if not run.config.exists():
        return ok(f"{context.run} is new")
    check_same_settings(run, context.train)
    return ok(f"{context.run} holds this run: it will resume")


@Check(
    "batch",
    symptom="effective batch = batch_size x GPUs x gradient_accumulation_steps",
    why="Ranks with unequal batches would wait for each other.",
    fix="Use a number of processes that divides --global_batch_size.",
    jobs=TRAIN,
)
def check_batch(context: CheckContext) -> Finding:
    """Divide the total batch among the ranks."""
    from muralist.train.schedule import plan_batch

    assert context.train
    return ok(str(plan_batch(context.train.data, context.train.optim, context.ranks)))


@Check(
    "learning rate",
    symptom="loss oscillates after the batch grew",
    why="A learning rate raised at once for a larger batch can make the loss oscillate or diverge.",
    fix="A larger --warmup_steps, a lower --learning_rate, or --gradient_accumulation_steps; below a total batch of "
    "256 try the original rate first.",
    jobs=TRAIN,
)
def check_learning_rate(context: CheckContext) -> Finding:
    """Check that a learning rate scaled up with the batch has a warm-up."""
    from muralist.train.schedule import TrainingClock, learning_rate, plan_batch

    assert context.train
    optim = context.train.optim
    total = plan_batch(context.train.data, optim, context.ranks).total
    rate = learning_rate(optim, TrainingClock(total, total, 1))
    message = f"{rate.peak:.3g} ({rate.reason}) at a total batch of {total}, warm-up {optim.warmup_steps} steps"
    if rate.peak > _STEEP_RATE * (optim.blr or optim.learning_rate) and optim.warmup_steps < _SHORT_WARMUP:
        return warning(f"The learning rate is {message}.")
    return ok(message)


@Check(
    "rows over GPUs",
    symptom="rows that do not divide evenly (1001 over 4); GPUs without work",
    why="A GPU without rows is idle.",
    fix="No action needed if rows do not divide evenly: some GPUs generate one more.",
    jobs=GENERATE,
)
def check_rows(context: CheckContext) -> Finding:
    """Divide the rows among the GPUs."""
    from muralist.core.hardware import select_devices

    rows = context.images
    if context.uses_ray:
        return skipped("Ray distributes the rows")
    workers = context.ranks if context.ranks > 1 else len(select_devices(context.gpu_ids))
    shares = sorted(rows // workers + (worker < rows % workers) for worker in range(workers))
    message = f"{rows:,} over {workers}: {format_list([f'{share:,}' for share in shares], 8)}"
    if rows < workers:
        return warning(f"{message}: some GPUs are idle.", fix=f"Use {rows} GPUs, or more rows.")
    return ok(message)


@Check(
    "same results",
    symptom="results that differ (seed or assignment)",
    why="The folder would mix images of different settings. An image depends only on its row, seed, settings and "
    "model, not on the number of GPUs.",
    fix="Use the settings of the first run, or choose another --output_dir.",
    jobs=GENERATE,
)
def check_output_folder(context: CheckContext) -> Finding:
    """Check that images already in the output folder were generated with these settings and this model."""
    from muralist.generate.model_info import settings_identity
    from muralist.generate.output_dir import Header, OutputDir

    assert context.generate
    folder = OutputDir(Path(context.generate.output_dir).absolute())
    header = Header.read(folder.ledger)
    if header is None:
        return ok("the folder has no images yet")
    if context.generate.overwrite:
        return ok("existing images will be generated again")
    folder.check_settings(settings_identity(context.generate, context.model), header)
    return ok("existing images were generated with the same settings")


@Check(
    "packages",
    symptom="`--use_wandb`, TensorBoard or DeepSpeed without the package",
    why="The run would end when it imports the package.",
    fix="Install the extra that is named, or leave the setting out.",
    jobs=TRAIN | GENERATE,
)
def check_packages(context: CheckContext) -> Finding:
    """Check that the optional packages that the settings need are installed."""
    needed: dict[str, str] = {}
    if context.train:
        strategy, log = context.train.distributed.strategy, context.train.log
        needed |= {"deepspeed": f"--strategy {strategy}"} if strategy.startswith("zero") else {}
        needed |= {"tensorboard": "--use_tensorboard"} if log.use_tensorboard else {}
        needed |= {"wandb": "--use_wandb"} if log.use_wandb else {}
    if context.uses_ray:
        needed["ray"] = "--engine ray"
    for name, flag in needed.items():
        if importlib.util.find_spec(name) is None:
            fix = f"`pip install 'muralist[{name}]'`, or leave {flag} out (--no_use_tensorboard for TensorBoard)."
            return failed(f"{flag} needs the package {name}, which is not installed.", fix=fix)
    return ok(f"installed: {', '.join(needed)}" if needed else "the settings need no optional package")


@Check(
    "model folder",
    symptom="error during sampling (the model was not loaded right); a process that hangs (wrong model path)",
    why="Loading would fail after minutes, on every GPU at once.",
    fix="Check the path, or copy the model again.",
    jobs=TRAIN | GENERATE,
)
def check_model(context: CheckContext) -> Finding:
    """Check that every part and weights file of the model exists, and that none is truncated."""
    if context.train:
        from muralist.train.preflight import check_model_settings

        check_model_settings(context.train.model)
        return ok(find_family(context.train.model.name).origin(context.train.model))
    assert context.generate
    return ok(f"{context.generate.model_path} is complete: {context.model.identity['model']}")


@Check(
    "prompts table",
    symptom="`--prompts_csv` with a `prompt` or a `caption` column",
    why="Rows that cannot be read get no images.",
    fix="Correct the table; the message names file and line.",
    jobs=GENERATE,
)
def check_prompts(context: CheckContext) -> Finding:
    """Read the table of prompts: its columns, every row once, and a hundred rows by index."""
    from muralist.data.prompts import open_prompt_table

    assert context.generate
    table = open_prompt_table(context.generate.prompts_csv, context.generate.num_samples)
    rows = table.rows(_subset(len(table)))
    message = f"{len(table):,} rows, {len(rows)} of them read, such as {rows[0].prompt[:60]!r}"
    if table.notes:
        return warning(f"{message}. {' '.join(table.notes)}", "The table may have been misread.", "Check the table.")
    return ok(message)


@Check(
    "data set",
    symptom="data prepared ahead of time to cut I/O",
    why="An image that cannot be decoded ends training when it is read, perhaps after days.",
    fix="`muralist pack SRC DST` leaves broken images out and lists them in broken.txt; or delete them.",
    jobs=TRAIN,
)
def check_data(context: CheckContext) -> Finding:
    """Open the data as training does, and decode a hundred randomly chosen images."""
    from muralist.train.dataset import open_data

    assert context.train
    if not context.train.data.path:
        return skipped("no --data_path")
    data = open_data(context.train)
    indices = _subset(data.split.source_size)
    broken: list[str] = []
    began = time.perf_counter()
    for index in indices:
        try:
            if data.latents:  # latents: nothing to decode
                data.latents.read_latents(np.array([index]))
            else:
                data.source.read(index)
        except UserError as error:
            broken.append(error.what)
    speed = len(indices) / max(1e-9, time.perf_counter() - began)
    message = f"{data.split.source_size:,} images, {len(indices)} decoded"
    if broken:
        return failed(
            f"{message}: {len(broken)} of them broken. {format_list(broken, 2)}", facts={"broken": len(broken)}
        )
    return ok(f"{message} at {speed:,.0f} images/s on one core", facts={"images per second": speed})


def _subset(count: int) -> list[int]:
    """Choose a hundred of `count` indices."""
    chosen = np.random.default_rng(_SEED).choice(count, min(_SUBSET, count), replace=False)
    return [int(index) for index in np.sort(chosen)]
