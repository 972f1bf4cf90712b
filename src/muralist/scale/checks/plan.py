"""What is planned: settings that can work, batches and rows that divide, a learning rate, the same results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.words import listed

_TRAIN, _GENERATE = frozenset({"train"}), frozenset({"generate"})
_STEEP = 4.0  # a learning rate raised by more than this wants a warm-up
_SHORT_WARMUP = 100


def look_at_settings(around: Circumstances) -> Finding:
    """Refuse impossible settings, as train itself does."""
    from muralist.train.contract import check

    assert around.train
    check(around.train)
    return ok("they can work together")


def look_at_batch(around: Circumstances) -> Finding:
    """Share the total batch among the ranks."""
    from muralist.train.schedule import plan_batch

    assert around.train
    return ok(str(plan_batch(around.train.data, around.train.optim, around.ranks)))


def look_at_rate(around: Circumstances) -> Finding:
    """See whether a learning rate that grew with the batch has a warm-up."""
    from muralist.train.schedule import Clock, learning_rate, plan_batch

    assert around.train
    optim = around.train.optim
    total = plan_batch(around.train.data, optim, around.ranks).total
    rate = learning_rate(optim, Clock(total, total, 1))
    told = f"{rate.peak:.3g} ({rate.reason}) at a total batch of {total}, warm-up {optim.warmup_steps} steps"
    base = optim.blr or optim.learning_rate
    if rate.peak > _STEEP * base and optim.warmup_steps < _SHORT_WARMUP:
        return warning(f"The learning rate is {told}.")
    return ok(told)


def look_at_rows(around: Circumstances) -> Finding:
    """Share the rows among the GPUs."""
    from muralist.machine import choose_devices

    assert around.generate
    rows = around.pictures
    if around.generate.engine == "ray":
        return skipped("Ray shares them")
    workers = around.ranks if around.ranks > 1 else len(choose_devices(around.generate.gpu_ids))
    shares = sorted(rows // workers + (worker < rows % workers) for worker in range(workers))
    told = f"{rows:,} over {workers}: {listed([f'{share:,}' for share in shares], 8)}"
    if rows < workers:
        return warning(f"{told}: some have no work.", remedy=f"Use {rows} GPUs, or more rows.")
    return ok(told)


def look_at_folder(around: Circumstances) -> Finding:
    """Compare with what made the pictures that are there already."""
    from muralist.generate.folder import OutputFolder
    from muralist.generate.job import identity_of
    from muralist.generate.ledger import Header

    assert around.generate
    folder = OutputFolder(Path(around.generate.output_dir).absolute())
    header = Header.read(folder.ledger)
    if header is None:
        return ok("nothing is there yet")
    if around.generate.overwrite:
        return ok("what is there will be made anew")
    folder.check_settings(identity_of(around.generate, around.model), header)
    return ok("what is there was made with the same settings")


def look_at_run(around: Circumstances) -> Finding:
    """Look whether the run's folder holds a run with other settings."""
    from muralist.runfolder import RunFolder
    from muralist.train.start import refuse_other

    assert around.train and around.run
    run = RunFolder(around.run)
    if not run.config.exists():
        return ok(f"{around.run} is new")
    refuse_other(run, around.train)
    return ok(f"{around.run} is this run: it goes on")


def look_for_extras(around: Circumstances) -> Finding:
    """Look for the packages that settings ask for."""
    wanted: dict[str, str] = {}
    if around.train:
        strategy = around.train.distributed.strategy
        wanted |= {"deepspeed": f"--strategy {strategy}"} if strategy.startswith("zero") else {}
        wanted |= {"tensorboard": "--use_tensorboard"} if around.train.log.use_tensorboard else {}
        wanted |= {"wandb": "--use_wandb"} if around.train.log.use_wandb else {}
    if around.generate and around.generate.engine == "ray":
        wanted["ray"] = "--engine ray"
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        name = missing[0]
        return failed(
            f"{wanted[name]} needs the package {name}, which is not installed.",
            "",
            f"`pip install 'muralist[{name}]'`, or leave {wanted[name]} out (--no_use_tensorboard for TensorBoard).",
        )
    return ok(f"installed: {', '.join(wanted)}" if wanted else "nothing beyond muralist itself is needed")


CHECKS = [
    Check(
        name="settings",
        what="Whether the settings can work together.",
        trouble="Guide 1 and 2: a command with a wrong size, model or batch",
        why="The run would be refused at its start.",
        remedy="Put the setting right that is named.",
        look=look_at_settings,
        jobs=_TRAIN,
    ),
    Check(
        name="run folder",
        what="Whether the run's folder is new or holds this very run.",
        trouble="Guide 1: the same command goes on",
        why="Two runs in one folder would overwrite each other.",
        remedy="Give another --run_name, or the settings the run was started with.",
        look=look_at_run,
        jobs=_TRAIN,
    ),
    Check(
        name="batch",
        what="Whether the ranks share the total batch equally.",
        trouble="Guide 2: effective batch = batch_size x GPUs x gradient_accumulation_steps",
        why="Ranks with different shares would wait for each other.",
        remedy="Use a number of processes that divides --global_batch_size.",
        look=look_at_batch,
        jobs=_TRAIN,
    ),
    Check(
        name="learning rate",
        what="Whether a learning rate that grew with the batch has a warm-up.",
        trouble="Guide 2: loss oscillates after the batch grew",
        why="A rate raised at once for a larger batch can make the loss oscillate or diverge.",
        remedy="A larger --warmup_steps, a lower --learning_rate, or --gradient_accumulation_steps; below a total batch of "
        "256 try the original rate first.",
        look=look_at_rate,
        jobs=_TRAIN,
    ),
    Check(
        name="rows over GPUs",
        what="How many rows each GPU has to do.",
        trouble="Guide 4: rows that do not divide evenly (1001 over 4); GPUs without work",
        why="A GPU without rows only waits.",
        remedy="Nothing is lost when rows do not divide: some GPUs do one more.",
        look=look_at_rows,
        jobs=_GENERATE,
    ),
    Check(
        name="same results",
        what="Whether pictures that are there already were made with these settings and this model.",
        trouble="Guide 4: results that differ (seed or assignment)",
        why="A folder would hold pictures of two kinds. A picture depends on its row, seed, settings and model alone, never "
        "on the number of GPUs.",
        remedy="Run the command as it was, or choose another --output_dir.",
        look=look_at_folder,
        jobs=_GENERATE,
    ),
    Check(
        name="packages",
        what="Whether the optional packages that the settings ask for are installed.",
        trouble="Guide 1: `--use_wandb`; guide 3: TensorBoard, DeepSpeed",
        why="The run would end when it comes to need them.",
        remedy="Install the extra that is named, or leave the setting out.",
        look=look_for_extras,
        jobs=_TRAIN | _GENERATE,
    ),
]
