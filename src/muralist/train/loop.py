"""The training loop: set up, say the contract, train, save, sample, leave; state is network, optimizer, averages, images."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muralist import __version__
from muralist.data.cache import cached
from muralist.data.loader import Batch, held_out_batches, training_batches
from muralist.data.sources import Source, open_held_out, open_source
from muralist.data.stream import Split, Stream, split
from muralist.errors import UserError
from muralist.keyed_random import SampleKeys
from muralist.models.family import Family, build_family
from muralist.models.weights import read_weights
from muralist.runfolder import RunFolder
from muralist.scale.flops import matmul_rate
from muralist.settings import TrainSettings
from muralist.train import checkpoint, contract, samples, start
from muralist.train.distributed import Engine
from muralist.train.ema import WeightAverage
from muralist.train.monitors import Monitor, ProgressLine, open_monitors, start_log
from muralist.train.recorder import EpochLoss, Recorder
from muralist.train.schedule import Clock, learning_rate, plan_batch
from muralist.train.stepper import Stepper, autocast_type, build_optimizer
from muralist.train.stop import Request, Requests
from muralist.words import duration

log = logging.getLogger("muralist")
_VALIDATION_SEED = 0  # not the run's: val/loss is comparable over runs


def train(settings: TrainSettings, name: str) -> int:
    """Train until the last step or a request to stop; returns the exit status."""
    contract.check(settings)
    run = RunFolder.named(settings.results_dir, name)
    data = open_data(settings)  # before anything is written: a mistyped path leaves no empty run behind
    engine = Engine()
    try:
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
            _train(settings, data, engine, run, requests, stack)
            engine.wait()
    finally:
        engine.end()
    return 0


@dataclass(frozen=True)
class Data:
    """The images of a run: what is trained on and what is held out."""

    source: Source
    split: Split
    held_out: Source | None
    held_out_indices: np.ndarray


def open_data(settings: TrainSettings) -> Data:
    """Open the source; its own held-out part serves for val/loss if it has one, else a fixed part of it is held out."""
    path, img_size = settings.data.path or "", settings.model.img_size
    source = open_source(path, img_size)
    if settings.model.enable_condition and not source.label_names:
        raise UserError(
            f"--enable_condition needs labels, and {path} has none.",
            fix="Put the images into one sub-folder per class, or leave --enable_condition out.",
        )
    size = min(len(source), settings.data.max_samples or len(source))
    source = cached(source, size, img_size, settings.data.num_workers)
    own = open_held_out(path, img_size) if settings.data.val_fraction > 0 else None
    if own is not None:
        return Data(source, split(size, 0.0), own, split(len(own), 1.0).held_out)
    parts = split(size, settings.data.val_fraction)
    return Data(source, parts, source if len(parts.held_out) else None, parts.held_out)


def _train(
    settings: TrainSettings, data: Data, engine: Engine, run: RunFolder, requests: Requests, stack: ExitStack
) -> None:
    device = engine.device
    family = build_family(settings, data.source.label_names)
    prompts = samples.read_prompts(settings.samples.prompts, family)

    found = start.find_checkpoint(run, settings.checkpoint.resume)
    manifest: dict[str, Any] = found[1] if found else {}
    data_facts = {"fingerprint": data.source.fingerprint(), "samples": data.split.training_size}
    if found:
        start.check_same_data(manifest["data"], data_facts)
    plan = plan_batch(settings.data, settings.optim, engine.size, manifest.get("total_batch"))
    clock = Clock(data.split.training_size, plan.total, settings.epochs)
    contract.check_length(clock)
    rate = learning_rate(settings.optim, clock)
    first_step = int(manifest.get("step", 0))
    last_step = min(clock.last_step, settings.max_steps or clock.last_step)

    network = family.network()
    initial = None if found else start.find_initial_weights(settings, settings.results_dir)
    if found:
        network.load_state_dict(read_weights(found[0], "model"))
    elif initial:
        family.adopt(network, *initial)
    network.to(device)
    optimizer = build_optimizer(network, settings.optim)
    averages = [WeightAverage(network, half) for half in (settings.optim.ema1_half_life, settings.optim.ema2_half_life)]
    stepper = Stepper(
        family=family,
        network=network,
        optimizer=optimizer,
        averages=averages,
        engine=engine,
        plan=plan,
        rate=rate,
        seed=settings.seed,
        autocast=autocast_type(settings.use_amp, device),
        compiled=device.type == "cuda" if settings.compile == "auto" else settings.compile,
        max_grad_norm=settings.optim.max_grad_norm,
        micro=0 if settings.data.micro_batch_size == "auto" else settings.data.micro_batch_size,
    )
    state = checkpoint.optimizer_tensors(network, optimizer)
    if found:
        checkpoint.read_state(found[0], state)
        averages[0].load(read_weights(found[0], "ema1"))
        averages[1].load(read_weights(found[0], "ema2"))
        stepper.scaler.load_state_dict(manifest["loss_scale"])

    parameters = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    peak = matmul_rate(device, stepper.autocast or torch.float32)
    floor = (last_step - first_step) * plan.total * family.flops_per_image() / (peak * engine.size)
    _say_contract(settings, engine, run, found[0] if found else None, first_step,
                  contract.lines(settings, plan, clock, rate, parameters, len(data.held_out_indices), floor))  # fmt: skip
    if initial:
        log.info("starting from the weights of %s", initial[1])
    if first_step >= last_step:
        log.info("Nothing left to do: the run is at step %d of %d. A larger --epochs goes on.", first_step, last_step)
        return

    if engine.size > 1 or device.type == "cuda":
        first_images = np.arange(plan.part)
        stepper.warm_up(next(held_out_batches(data.source, np.zeros_like(first_images), first_images, plan.part)))
    monitors = open_monitors(run, settings.log, settings.model_dump(mode="json"), first_step) if engine.is_main else []
    for monitor in monitors:
        stack.callback(monitor.close)
    line = ProgressLine(first_step, last_step, settings.log.every, quiet=not engine.is_main)
    stack.callback(line.close)
    recorder = Recorder(
        engine, clock, monitors, line, settings.log.every, family.tokens_per_image(), family.flops_per_image(), peak,
        EpochLoss(*manifest.get("epoch_loss", ())),
    )  # fmt: skip
    keeper = _Keeper(settings, engine, run, data, family, prompts, stepper, recorder, monitors, data_facts)
    parts = training_batches(
        data.source,
        data.split,
        Stream(settings.seed, data.split.training_size),
        plan.numbers(engine.rank, range(first_step, last_step)),
        settings.data,
    )
    _loop(settings, engine, requests, stepper, recorder, keeper, parts, range(first_step, last_step))
    engine.wait()
    if engine.is_main:
        samples.write_sheet(run.samples, prompts)  # once more, now that every rank's last pictures are there


def _loop(
    settings: TrainSettings,
    engine: Engine,
    requests: Requests,
    stepper: Stepper,
    recorder: Recorder,
    keeper: _Keeper,
    parts: Iterator[Batch],
    steps: range,
) -> None:
    for step in steps:
        before = time.perf_counter()
        batch, error = _next_batch(parts, stepper.plan.parts)
        waited = time.perf_counter() - before
        # Between steps everything is whole, and all processes hear of one's request or trouble before any goes on.
        request = Request(engine.largest(Request.FAIL if error else requests.look()))
        if request != Request.NOTHING and step > steps.start:
            keeper.save(step)
        if request == Request.FAIL:
            raise error or UserError("Another process could not read its data.", "Its own message says what and why.")
        if request == Request.STOP:
            log.info("Stopped by %s at step %d: saved. The same command goes on from here.",
                     requests.signal_name or "another process", step)  # fmt: skip
            return
        result = stepper.step(batch, images=step * stepper.plan.total)
        recorder.add(step + 1, result, waited)
        if step + 1 == steps.stop or (step + 1) % settings.checkpoint.every == 0:
            keeper.checkpoint_and_samples(step + 1)
        else:
            recorder.flush_if_due(step + 1)
    log.info("Finished at step %d.", steps.stop)


def _next_batch(parts: Iterator[Batch], count: int) -> tuple[list[Batch], UserError | None]:
    try:
        return list(islice(parts, count)), None
    except UserError as error:
        return [], error


@dataclass
class _Keeper:
    """Writes what a run leaves behind: checkpoints, held-out loss, samples."""

    settings: TrainSettings
    engine: Engine
    run: RunFolder
    data: Data
    family: Family
    prompts: list[str]
    stepper: Stepper
    recorder: Recorder
    monitors: list[Monitor]
    data_facts: dict[str, Any]
    saved_step: int = -1

    def checkpoint_and_samples(self, step: int) -> None:
        """What happens at every checkpoint: held-out loss, checkpoint, pictures."""
        with self.recorder.paused():
            loss = self.validate()
        self.save(step, {} if loss is None else {"val/loss": loss})
        if loss is not None:
            log.info("step %d  val/loss %.4f", step, loss)
        if self.settings.samples.per_gpu:
            with self.recorder.paused():
                self._write_samples(step)

    def save(self, step: int, extra: dict[str, float] | None = None) -> None:
        """Metrics first, then the checkpoint: a resumed run finds both or neither."""
        if step == self.saved_step:
            return
        self.recorder.flush(extra)
        with self.recorder.paused():
            for monitor in self.monitors:
                monitor.flush()
            if self.engine.is_main:
                self._write_checkpoint(step)
            self.saved_step = step
            self.engine.wait()

    def _write_checkpoint(self, step: int) -> None:
        started, stepper = time.perf_counter(), self.stepper
        weights = {"model": stepper.network.state_dict()}
        weights |= {f"ema{i}": average.state(stepper.network) for i, average in enumerate(stepper.averages, start=1)}
        facts = {
            "images": step * stepper.plan.total,
            "total_batch": stepper.plan.total,
            "model": self.family.describe(),
            "data": self.data_facts,
            "epoch_loss": [self.recorder.epoch_loss.total, self.recorder.epoch_loss.steps],
            "loss_scale": stepper.scaler.state_dict(),
            "versions": {"muralist": __version__, "torch": torch.__version__},
        }
        state = checkpoint.optimizer_tensors(stepper.network, stepper.optimizer)
        path = checkpoint.write(self.run.checkpoints, step, weights, state, facts)
        keep = self.settings.checkpoint
        checkpoint.prune(self.run.checkpoints, keep.keep_last, keep.keep_every)
        log.info("Saved checkpoint to %s (%s)", path, duration(time.perf_counter() - started))

    def _write_samples(self, step: int) -> None:
        samples.write_samples(
            self.run.samples,
            step,
            self.engine.rank,
            self.engine.size,
            self.family,
            self.stepper.network,
            self.stepper.averages[0],
            self.prompts,
            self.settings.samples,
            self.stepper.autocast,
            self.monitors,
        )

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss over the held-out images with fixed keys, or None where nothing is held out."""
        if self.data.held_out is None:
            return None
        stepper, device = self.stepper, self.engine.device
        positions = np.arange(self.engine.rank, len(self.data.held_out_indices), self.engine.size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        stepper.network.eval()
        for batch in held_out_batches(self.data.held_out, self.data.held_out_indices, positions, stepper.micro):
            batch = batch.to(device)
            keys = SampleKeys(_VALIDATION_SEED, batch.numbers)
            with torch.autocast(device.type, stepper.autocast, enabled=stepper.autocast is not None):
                total += self.family.loss(stepper.network, self.family.encode(batch, keys), keys).double().sum()
        stepper.network.train()
        return float(self.engine.total(total)) / len(self.data.held_out_indices)


def _say_contract(
    settings: TrainSettings, engine: Engine, run: RunFolder, resumed: Path | None, step: int, text: list[str]
) -> None:
    origin = f"resuming from {resumed} at step {step}" if resumed else "starting at step 0"
    for part in (*engine.banner().splitlines(), f"run        {run.root}, {origin}", *text):
        log.info(part)
