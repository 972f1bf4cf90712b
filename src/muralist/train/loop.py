"""The training loop: set up, say the contract, train, save, sample, leave; state is network, optimizer, averages, images."""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist import compiled_code
from muralist.data.loader import Batch, held_out_batches, training_batches
from muralist.data.on_device import PicturesOnDevice, put_on
from muralist.errors import UserError
from muralist.machine import can_compile
from muralist.models import variants
from muralist.models.family import build_family, prepare_family
from muralist.runfolder import RunFolder, is_full, no_space, write_atomically
from muralist.scale.checks.check import Circumstances
from muralist.scale.doctor import refuse_trouble
from muralist.scale.flops import matmul_rate
from muralist.scale.slurm import adopt_ranks
from muralist.settings import CheckpointSettings, TrainSettings
from muralist.train import checkpoint, contract, samples, start
from muralist.train.data import Data, has_captions, in_buckets, open_data
from muralist.train.distributed import Engine, lost_contact
from muralist.train.forecast import Forecast
from muralist.train.heartbeat import SAVING, WAITING, Heartbeat, rank_and_size
from muralist.train.keeper import Keeper
from muralist.train.monitors import ProgressLine, open_monitors, start_log
from muralist.train.profile import StepProfile
from muralist.train.recorder import EpochLoss, Recorder, SkippedSteps
from muralist.train.schedule import Clock, learning_rate, plan_batch
from muralist.train.stepper import Stepper, autocast_type, build_optimizer
from muralist.train.stop import Request, Requests
from muralist.train.strategy import build_strategy, compile_each_size
from muralist.train.writer import CheckpointWriter

log = logging.getLogger("muralist")


def train(settings: TrainSettings, name: str) -> int:
    """Train until the last step or a request to stop; returns the exit status."""
    contract.check(settings)
    if not torch.cuda.is_available():  # what a GPU can do is asked of the one that is used
        contract.check_precision(settings, settings.distributed.strategy, torch.device("cpu"))
    run = RunFolder.named(settings.results_dir, name)
    adopt_ranks(os.environ)
    rank, size = rank_and_size()
    start_log(None, rank)  # to the terminal alone until the run's folder is ours
    around = Circumstances(train=settings, run=run.root, starting=True)
    if size == 1:
        refuse_trouble(around)
    data = open_data(settings)  # before anything is written: a mistyped path leaves no empty run behind
    with Heartbeat(run.heartbeats, rank, size, settings.distributed.dist_timeout) as heartbeat:
        try:
            if size > 1:
                _refuse_aloud(around, heartbeat)
            _train_together(settings, data, run, heartbeat)
        except OSError as error:
            raise _told(heartbeat, no_space(error, run.root) if is_full(error) else error) from None
        except torch.cuda.OutOfMemoryError:
            short = UserError(
                "The GPU ran out of memory.",
                "Another program may have taken some of it. What was saved before is whole.",
                "Run the same command to go on; --micro_batch_size with a smaller number needs less memory, same result.",
            )
            raise _told(heartbeat, short) from None
        except RuntimeError as error:
            if size == 1 or not lost_contact(error):
                raise
            raise UserError(
                f"Rank {rank} lost contact with the other processes.",
                heartbeat.diagnosis(),
                "The same command goes on from the last checkpoint.",
            ) from None
    return 0


def _train_together(settings: TrainSettings, data: Data, run: RunFolder, heartbeat: Heartbeat) -> None:
    engine = Engine(settings.distributed.strategy, settings.distributed.dist_timeout, heartbeat)
    try:
        contract.check_precision(settings, engine.strategy, engine.device)
        with ExitStack() as stack:
            if engine.is_main:
                run.create()
                stack.enter_context(run.locked())
                start.claim(run, settings)
                checkpoint.sweep(run.checkpoints)
            engine.wait()
            start_log(run.log, engine.rank)
            requests = Requests(run.save_request)
            stack.enter_context(requests.listening())
            _train(settings, data, engine, run, heartbeat, requests, stack)
            engine.wait()
    except Exception as error:
        if not (isinstance(error, RuntimeError) and engine.size > 1 and lost_contact(error)):
            heartbeat.failed(str(error))  # before the process group is left, where a process may wait for others
        raise
    finally:
        engine.end()


def _refuse_aloud(around: Circumstances, heartbeat: Heartbeat) -> None:
    """Refuse what cannot work where the other processes hear of it, or they would wait for this one."""
    try:
        refuse_trouble(around)
    except UserError as error:
        raise _told(heartbeat, error) from None


def _told(heartbeat: Heartbeat, error: Exception) -> Exception:
    """An error of which the other processes know."""
    heartbeat.failed(str(error))
    return error


def _train(
    settings: TrainSettings,
    data: Data,
    engine: Engine,
    run: RunFolder,
    heartbeat: Heartbeat,
    requests: Requests,
    stack: ExitStack,
) -> None:
    device = engine.device
    if engine.is_main:
        prepare_family(settings)
    engine.wait()
    if settings.data.multireso:
        heartbeat.report("looking at the shapes of pictures")
        data = in_buckets(data, settings, engine, run.shapes)
    heartbeat.report("loading the model")
    family = build_family(settings, data.source.label_names, data.encoded)
    prompts = samples.read_prompts(settings.samples.prompts, family)

    found = start.find_checkpoint(run, settings.checkpoint.resume)
    manifest: dict[str, Any] = found[1] if found else {}
    if found:
        start.check_same_model(manifest["model"], family.describe(), found[0])
        start.check_same_data(manifest["data"], data.facts)
    plan = plan_batch(settings.data, settings.optim, engine.size, manifest.get("total_batch"))
    clock = Clock(data.split.training_size, plan.total, settings.epochs)
    contract.check_length(clock)
    rate = learning_rate(settings.optim, clock)
    first_step = int(manifest.get("step", 0))
    last_step = min(clock.last_step, settings.max_steps or clock.last_step)

    _check_that_all_agree(engine, [first_step, found[0].name if found else "", data.facts, plan.total])
    autocast = autocast_type(settings.mixed, device)
    if autocast is torch.float16 and engine.strategy != "ddp":
        raise UserError(
            f"--use_amp with --strategy {engine.strategy} needs GPUs that know bf16.",
            "These do not, and scaling the loss for fp16 is done for ddp only.",
            "Use --strategy ddp, or leave --use_amp out.",
        )
    contract.check_skipping(settings, engine.strategy)
    skip = settings.optim.non_finite == "skip"
    family.place(device, autocast or torch.float32)
    network = family.network()
    initial = None if found else start.find_initial_weights(settings, settings.results_dir)
    if found:
        network.load_state_dict(checkpoint.read_stored(found[0], "model", network, family), strict=False)
    elif initial:
        family.adopt(network, *initial)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    beside = sum(parameter.numel() for name, parameter in network.named_parameters() if not family.stores(name))
    strategy = build_strategy(engine)
    compiled = device.type == "cuda" and can_compile() if settings.compile == "auto" else settings.compile
    kept = compiled_code.keep() if compiled else None
    if compiled and data.buckets:
        compile_each_size(len(data.buckets.sizes))
    strategy.place(network, compiled)
    optimizer = build_optimizer(network, settings.optim)
    stepper = Stepper(
        family=family,
        network=network,
        optimizer=optimizer,
        strategy=strategy,
        plan=plan,
        rate=rate,
        seed=settings.seed,
        autocast=autocast,
        compiled=compiled,
        max_grad_norm=settings.optim.max_grad_norm,
        skip_non_finite=skip,
        graphs=compiled and device.type == "cuda" and engine.size == 1 and not data.buckets,
        half_lives=(settings.optim.ema1_half_life, settings.optim.ema2_half_life),
        micro=0 if settings.data.micro_batch_size == "auto" else settings.data.micro_batch_size,
    )
    if found:
        stepper.restore(found[0], manifest["loss_scale"])

    on_device = data.bytes_on(device, settings, range(first_step, last_step), plan.total, engine.size)
    peak = matmul_rate(device, stepper.autocast or torch.float32)
    floor = (last_step - first_step) * plan.total * family.flops_per_image() / (peak * engine.size)
    _say_contract(settings, engine, run, found[0] if found else None, first_step,
                  contract.lines(settings, plan, clock, rate, family.summary(), trained, beside,
                                 strategy.memory(trained, beside), strategy.words,
                                 len(data.held_out_indices), floor, data.bucket_lines(plan.total),
                                 on_device))  # fmt: skip
    if initial:
        log.info("starting from the weights of %s", initial[1])
    if engine.is_main and variants.is_hunyuan(settings.model.name) and not has_captions(data):
        log.warning(contract.NO_CAPTIONS)
    if first_step >= last_step:
        log.info(
            "Nothing left to do: the run is at step %d, asked for %d. More --epochs or --max_steps goes on.",
            first_step,
            last_step,
        )
        return

    order = data.order(settings.seed, plan.total)
    numbers = plan.numbers(engine.rank, range(first_step, last_step))
    if on_device:
        pictures = _pictures_on_device(settings, data, engine, heartbeat, requests)
        if pictures is None or engine.largest(0):
            _say_stopped(requests, first_step, saved=False)
            return
        parts = pictures.batches(order, numbers)
    else:
        parts = training_batches(data.source, data.split, order, numbers, settings.data)
    if engine.size > 1 or device.type == "cuda":
        heartbeat.report("compiling" if compiled else "warming up")
        if kept:
            log.info(
                "Compiling the training step: %s",
                f"seconds, if it is among what was compiled before in {kept.folder}; else about a minute."
                if kept.holds_code
                else "about a minute, once.",
            )
        first_images = np.arange(plan.part)
        same = np.full_like(first_images, data.largest)
        stepper.warm_up(next(held_out_batches(data.source, same, first_images, plan.part)))
        if kept and (words := kept.words()):
            log.info("%s", words)
    if found and engine.is_main and found[0].parent.resolve() == run.checkpoints.resolve():
        # A run that is set back stays set back, even if it dies before its next checkpoint.
        write_atomically(run.checkpoints / "latest", found[0].name + "\n")
    monitors = open_monitors(run, settings.log, settings.model_dump(mode="json"), first_step) if engine.is_main else []
    for monitor in monitors:
        stack.callback(monitor.close)
    line = ProgressLine(first_step, last_step, settings.log.every, quiet=not engine.is_main)
    stack.callback(line.close)
    every = min(settings.checkpoint.every, settings.checkpoint.latest_every or settings.checkpoint.every)
    forecast = Forecast(run.forecast if engine.is_main else None, first_step, last_step, every)
    recorder = Recorder(
        engine, clock, monitors, line, settings.log.every, family.tokens_per_image(), family.flops_per_image(), peak,
        stepper.scaler.is_enabled(), forecast, EpochLoss(*manifest.get("epoch_loss", ())), skip,
        SkippedSteps(*manifest.get("skipped_steps", ())),
    )  # fmt: skip
    writer = CheckpointWriter(run.checkpoints, settings.checkpoint, strategy.writers)
    stack.callback(writer.finish)  # whatever ends the run, a checkpoint under way is completed
    # Where all processes write it together, one that waits for the others must not be taken for one at work.
    stack.callback(heartbeat.report, SAVING if strategy.saves_alone else WAITING)
    heartbeat.before_exit = writer.finish
    keeper = Keeper(settings, engine, run, data, family, prompts, stepper, recorder, monitors, writer, heartbeat)
    profile = None
    if settings.log.profile:
        profile = StepProfile(settings.log.profile, range(first_step, last_step), run.profile, engine.rank, device)
        stack.callback(profile.close)
    _loop(settings, engine, requests, stepper, recorder, keeper, parts, range(first_step, last_step), profile)
    engine.wait()
    keeper.show_pictures_of_others()
    if engine.is_main:
        samples.write_sheet(run.samples, prompts)  # once more, now that every rank's last pictures are there


class _Stopped(Exception):
    """Somebody asked for an end while pictures were brought to the device."""


def _pictures_on_device(
    settings: TrainSettings, data: Data, engine: Engine, heartbeat: Heartbeat, requests: Requests
) -> PicturesOnDevice | None:
    """Bring the training pictures to this process's device, with signs of life; None if a stop was asked for meanwhile."""

    def told(count: int) -> None:
        heartbeat.report(f"bringing pictures to the device, {count:,} so far")
        if requests.signal_name is not None:
            raise _Stopped

    before = time.perf_counter()
    try:
        pictures = put_on(
            engine.device, data.source, data.split, settings.model.img_size, settings.data, told, shown=engine.is_main
        )
    except (UserError, _Stopped):
        if requests.signal_name is None:
            raise
        engine.largest(1)  # a signal to the whole job ends loader processes too: it is the signal that counts
        return None
    log.info("%s pictures are on the device after %.1f s.", f"{len(pictures.labels):,}", time.perf_counter() - before)
    return pictures


def _say_stopped(requests: Requests, step: int, saved: bool) -> None:
    what = "saved" if saved else "before the first step, so nothing was to be saved"
    log.info("Stopped by %s at step %d: %s. The same command goes on from here.",
             requests.signal_name or "another process", step, what)  # fmt: skip


def _loop(
    settings: TrainSettings,
    engine: Engine,
    requests: Requests,
    stepper: Stepper,
    recorder: Recorder,
    keeper: Keeper,
    parts: Iterator[Batch],
    steps: range,
    profile: StepProfile | None,
) -> None:
    for step in steps:
        if profile:
            profile.begin(step)
        keeper.heartbeat.report("reading data", step)
        before = time.perf_counter()
        batch, error = _next_batch(parts, stepper.plan.parts, keeper)
        waited = time.perf_counter() - before
        # Between steps everything is whole, and all processes hear of one's request or trouble before any goes on. A signal
        # to the whole job ends loader processes too: then it is the signal that counts.
        asked = requests.look(savable=step > steps.start)
        request = Request(engine.largest(Request.FAIL if error and asked != Request.STOP else asked))
        keeper.show_pictures_of_others()  # they are there: all processes have passed the agreement
        if request != Request.NOTHING and step > steps.start:
            keeper.save(step)
        if request == Request.FAIL:
            # Nobody leaves before what was learned is on disk: a launcher gives those that stay behind half a minute.
            error = keeper.finish_together() or error
            raise error or UserError("Another process ran into trouble.", keeper.heartbeat.diagnosis())
        if request == Request.STOP:
            keeper.finish()
            _say_stopped(requests, step, saved=step > steps.start)
            return
        keeper.heartbeat.report("computing", step)
        result = stepper.step(batch, images=step * stepper.plan.total)
        recorder.add(step + 1, result, waited)
        if profile:
            profile.end(step, recorder.paused)
        if step + 1 == steps.stop or _checkpoint_is_due(settings.checkpoint, recorder.clock, step + 1):
            keeper.save_checkpoint(step + 1)
        else:
            recorder.flush_if_due(step + 1)
    recorder.forecast.conclude()
    keeper.finish()
    log.info("Finished at step %d.", steps.stop)


def _checkpoint_is_due(settings: CheckpointSettings, clock: Clock, step: int) -> bool:
    regular = step % settings.every == 0 or (settings.latest_every and step % settings.latest_every == 0)
    return bool(regular or (settings.at_epoch_end and clock.ends_epoch(step)))


def _next_batch(parts: Iterator[Batch], count: int, keeper: Keeper) -> tuple[list[Batch], UserError | None]:
    """The parts of the next step, or what went wrong with them or, in the background, with the last checkpoint."""
    try:
        keeper.writer.check()
        return list(islice(parts, count)), None
    except UserError as error:
        return [], error


def _check_that_all_agree(engine: Engine, facts: list[Any]) -> None:
    """Refuse to train where processes found different checkpoints or data, as over a file system that lags behind."""
    digest = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    if engine.smallest(digest) != engine.largest(digest):
        raise UserError(
            "The processes do not see the same checkpoint and data.",
            f"Rank {engine.rank} would go on from step {facts[0]} ({facts[1] or 'the start'}) with {facts[2]['samples']:,} "
            "images.",
            "Check that all machines share the results folder and have the same data, then run the same command again.",
        )


def _say_contract(
    settings: TrainSettings, engine: Engine, run: RunFolder, resumed: Path | None, step: int, text: list[str]
) -> None:
    origin = f"resuming from {resumed} at step {step}" if resumed else "starting at step 0"
    for part in (
        *engine.banner().splitlines(),
        f"device     {engine.device_name}",
        f"run        {run.root}, {origin}",
        *text,
    ):
        log.info(part)
