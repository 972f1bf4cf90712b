"""The trainer: set-up, loop and checkpoints of a run, whose state is network, optimizer, EMA and images seen."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from muralist import __version__
from muralist.core import compile_cache
from muralist.core.errors import UserError
from muralist.core.hardware import can_compile
from muralist.core.run_dir import RunDir, atomic_write, disk_write_error, is_disk_full, open_no_follow
from muralist.core.slurm import set_rank_environment
from muralist.data.loader import Batch, BrokenImage, held_out_batches, load_to_device, training_batches
from muralist.models.spec import build_spec, find_family
from muralist.settings import TrainSettings
from muralist.train import resume, samples
from muralist.train.checkpoint import CheckpointWriter, read_saved_weights, remove_leftovers
from muralist.train.dataset import NO_CAPTIONS, TrainingData, has_captions, open_data, some_captions, with_buckets
from muralist.train.distributed import World, is_lost_peer
from muralist.train.loggers import ProgressLogger, open_loggers, start_log
from muralist.train.metrics import Forecast, MetricsRecorder, StepProfiler, matmul_rate
from muralist.train.parallel import build_strategy, compile_each_size
from muralist.train.preflight import check_length, check_settings, check_strategy, run_summary
from muralist.train.schedule import LearningRate, TrainingClock, checkpoint_steps, learning_rate, plan_batch
from muralist.train.step import TrainState, autocast_dtype, held_out_loss
from muralist.train.watchdog import RESUME_HINT, SAVING, WAITING, Watchdog

log = logging.getLogger("muralist")
_SAVE_FILE_INTERVAL = 0.2  # seconds between looks for the file that requests a checkpoint


class Request(IntEnum):
    """A request to the running training; the larger, the more urgent."""

    NOTHING, SAVE, STOP, FAIL = range(4)


class Trainer:
    """One run in one process of its world."""

    def __init__(
        self,
        settings: TrainSettings,
        data: TrainingData,
        run: RunDir,
        world: World,
        watchdog: Watchdog,
        signals: SignalHandler,
    ) -> None:
        """Build the model, find the checkpoint to resume from, and build the state."""
        self.settings, self.run, self.world, self.watchdog, self.signals = settings, run, world, watchdog, signals
        if world.is_main:
            find_family(settings.model.name).prepare(settings)
        world.barrier()
        if settings.data.multireso:
            watchdog.report("measuring images")
            data = with_buckets(data, settings, world, run.shapes)
        watchdog.report("loading the model")
        self.data, self.spec = data, build_spec(settings, data.source.label_names, data.latents)
        self.prompts = samples.read_prompts(settings.samples.prompts, self.spec, lambda: some_captions(data))

        self.checkpoint = resume.find_checkpoint(run, settings.checkpoint, self.spec.describe(), data.facts)
        manifest = self.checkpoint.manifest if self.checkpoint else {}
        forked = self.checkpoint is not None and not resume.is_own(run, self.checkpoint)
        fixed_total = None if forked else manifest.get("total_batch")  # a fork is a new run, with a batch of its own
        self.plan = plan_batch(settings.data, settings.optim, world.size, fixed_total)
        self.clock = TrainingClock(data.split.training_size, self.plan.total, settings.epochs)
        check_length(self.clock)
        last_step = min(self.clock.last_step, settings.max_steps or self.clock.last_step)
        # Images seen are what a fork takes over; those of an incomplete batch are seen again.
        self.batch_before = manifest.get("total_batch", self.plan.total)
        self.images_before = self.checkpoint.step * self.batch_before if self.checkpoint else 0
        self.steps = range(self.images_before // self.plan.total, last_step)
        self.checkpoint_steps = checkpoint_steps(settings.checkpoint, self.clock, last_step)
        # Version 0.1 ended the cosine with the epochs, whatever max_steps was: its runs go on like that.
        self.decays_with_epochs = bool(manifest) and not forked and "lr_decay_steps" not in manifest
        rate = learning_rate(settings.optim, self.clock, None if self.decays_with_epochs else last_step)
        resume.check_ranks_agree(world, self.checkpoint, data.facts, self.plan.total)

        self.state = self._build_state(rate)
        self.saved_step = -1
        self.skips_broken = settings.data.on_broken == "skip"
        self.gpu_bytes = data.bytes_on(world.device, settings, self.steps, self.plan.total, world.size)
        self.peak_flops = matmul_rate(world.device, self.state.autocast or torch.float32)
        self._log_summary()

    def train(self) -> int:
        """Train until the last step, or a request to stop; returns the signal that stopped the run, or 0."""
        if not self.steps:
            done = f"the run is at step {self.steps.start} of {self.steps.stop}"
            log.info("Nothing left to do: %s. %s", done, self._how_to_continue())
            return 0
        batches = self._open_batches()
        if batches is None:
            return self._stopped(self.steps.start)
        self._warm_up()
        with ExitStack() as stack:
            self._open_outputs(stack)
            for step in self.steps:
                self.profiler.begin(step)
                step_batches, waited, error = self._next_batches(batches, step)
                request = self._agree_on_request(step, error)
                if request != Request.NOTHING and step > self.steps.start:
                    self.save(step)
                if request == Request.FAIL:
                    self._fail(error)
                if request == Request.STOP:
                    self._finish_saving()
                    return self._stopped(step)
                self.watchdog.report("computing", step)
                result = self.state.step(step_batches)
                self.recorder.add(step + 1, result, waited)
                self.profiler.end(step, self.recorder.paused)
                if step + 1 in self.checkpoint_steps:
                    self.validate_save_sample(step + 1)
                else:
                    self.recorder.flush_if_due(step + 1)
            self.recorder.forecast.conclude()
            self._finish_saving()
            log.info("Finished at step %d.", self.steps.stop)
            if self.skips_broken and self.world.is_main and self.run.broken.exists():
                count = len(self.run.broken.read_text(encoding="utf-8").splitlines())
                log.warning("Skipped broken images: %d, listed in %s.", count, self.run.broken)
        return 0

    def validate_save_sample(self, step: int) -> None:
        """Compute the held-out loss, write a checkpoint, generate samples."""
        with self.recorder.paused():
            list_broken = self._list_broken if self.skips_broken else None
            loss, error = held_out_loss(self.state, self.data, self.watchdog, list_broken)
        self.save(step, {} if loss is None else {"val/loss": loss})
        if error:
            self._fail(error)
        if loss is not None:
            log.info("step %d  val/loss %.4f", step, loss)
        if self.settings.samples.per_gpu:
            with self.recorder.paused():
                self._write_samples(step)

    def save(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Write metrics, then a checkpoint in the background: a resumed run finds both or neither."""
        if step == self.saved_step:
            return
        self.recorder.flush(metrics)
        self._report_saving()
        with self.recorder.paused():
            for logger in self.loggers:
                logger.flush()
            if snapshot := self.state.strategy.snapshot(self.state):
                manifest = {
                    "images": self.state.images,
                    "total_batch": self.plan.total,
                    "model": self.spec.describe(),
                    "data": self.data.facts,
                    **self.recorder.state_dict(),
                    "loss_scale": self.state.scaler.state_dict(),
                    **({} if self.decays_with_epochs else {"lr_decay_steps": self.state.rate.decay_steps}),
                    **({} if (optimizer := self.settings.optim.optimizer) == "adamw" else {"optimizer": optimizer}),
                    "versions": {"muralist": __version__, "torch": torch.__version__},
                }
                self.writer.submit(step, snapshot.weights, snapshot.state, manifest)
            self.saved_step = step

    def _write_samples(self, step: int) -> None:
        # A collective where weights are sharded: it must not fail on one rank.
        network = self.state.strategy.inference_network(self.state)
        if network is None:
            log.warning("No samples at step %d: the full network does not fit beside its training state.", step)
            return
        self.watchdog.report("writing samples")
        folder, world = self.run.samples, self.world
        samples.write_samples(
            folder, step, world.rank, world.size, self.spec, network, self.prompts, self.settings.samples,
            self.state.autocast, self.loggers, at_once=self.state.micro_batch,
        )  # fmt: skip
        if world.size > 1:
            world.barrier()  # then the samples of all ranks are complete
            if world.is_main:
                self.watchdog.report("writing samples")
                samples.collect_samples(folder, step, self.prompts, self.loggers)

    def _next_batches(self, batches: Iterator[Batch], step: int) -> tuple[list[Batch], float, UserError | None]:
        """This rank's batches of a step and the seconds it waited for them, or why there are none.

        The reason is the error of reading them or of writing the last checkpoint.
        """
        self.watchdog.report("reading data", step)
        started, found, reason = time.perf_counter(), list[Batch](), None
        try:
            self.writer.check()
            found = list(islice(batches, self.plan.accumulation_steps))
            for batch in found:
                self._list_broken(batch.broken)
        except UserError as error:
            reason = error
        return found, time.perf_counter() - started, reason

    def _list_broken(self, broken: Sequence[BrokenImage]) -> None:
        """Write broken images that were skipped into the run's list, each once, whichever rank or start found it."""
        for image in broken:
            line = " ".join(f"{image.name}: {image.reason}".split())
            line = line.encode(errors="backslashreplace").decode()  # a file name need not be UTF-8
            listed = self.run.broken.read_text(encoding="utf-8").splitlines() if self.run.broken.exists() else []
            if line not in listed:
                with open_no_follow(self.run.broken, "a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
                log.warning("Skipped a broken image, %d so far: %s", len(listed) + 1, line)

    def _agree_on_request(self, step: int, error: UserError | None) -> Request:
        """Agree with all ranks, between steps, on one rank's request or error."""
        request = self.signals.poll(savable=step > self.steps.start)
        # A signal to the whole job also ends loader processes: then the signal counts, not the error.
        return Request(self.world.all_reduce_max(Request.FAIL if error and request != Request.STOP else request))

    def _finish_saving(self) -> None:
        self._report_saving()
        self.writer.finish()

    def _report_saving(self) -> None:
        # A process that needs the others for a checkpoint must not be taken for one that works by itself.
        self.watchdog.report(SAVING if self.state.strategy.main_saves_alone else WAITING)

    def _fail(self, error: UserError | None) -> NoReturn:
        """Raise once all ranks have finished saving: a launcher gives those that remain half a minute."""
        try:
            self._finish_saving()
        except UserError as caught:
            error = caught
        self.world.barrier()
        raise error or UserError("Another process failed.", self.watchdog.diagnosis())

    def _build_state(self, rate: LearningRate) -> TrainState:
        settings, spec, device = self.settings, self.spec, self.world.device
        autocast = autocast_dtype(settings, device)
        spec.to_device(device, autocast or torch.float32)
        if self.data.buckets:
            spec.prepare_sizes(self.data.buckets.sizes)
        chosen = samples.samples_of_rank(self.prompts, settings.samples, self.world.rank, self.world.size)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):  # as samples are made
            spec.prepare_prompts([self.prompts[i % len(self.prompts)] for i in chosen], settings.samples)
        network = spec.network()
        if self.checkpoint:
            weights = read_saved_weights(self.checkpoint.path, "model", network, spec)
            network.load_state_dict(weights, strict=False)
        elif initial := resume.find_initial_weights(settings):
            spec.init_from(network, *initial)
            log.info("starting from the weights of %s", initial[1])
        compiled = settings.compile
        if compiled == "auto":
            compiled = device.type == "cuda" and can_compile() and spec.compiles_by_default
        self.compile_cache = compile_cache.use_compile_cache() if compiled else None
        if compiled and self.data.buckets:
            compile_each_size(len(self.data.buckets.sizes))
        cuda_graphs = compiled and device.type == "cuda" and self.world.size == 1 and not self.data.buckets
        strategy = build_strategy(self.world)
        state = TrainState(settings, spec, network, strategy, self.plan, rate, autocast, compiled, cuda_graphs)
        if self.checkpoint:
            state.restore(self.checkpoint, self.steps.start * self.plan.total)
        return state

    def _log_summary(self) -> None:
        world, origin = self.world, f"resuming from {self.checkpoint.path}" if self.checkpoint else "starting"
        flops = len(self.steps) * self.plan.total * self.spec.flops_per_image()
        seconds = flops / (self.peak_flops * world.size)
        for line in (
            *world.banner().splitlines(),
            f"device     {world.device_name}",
            f"run        {self.run.root}, {origin} at step {self.steps.start}{self._changed_batch()}",
            *run_summary(self.settings, self.state, self.clock, self.data, self.gpu_bytes, seconds),
        ):
            log.info(line)
        if world.is_main and find_family(self.settings.model.name).uses_captions and not has_captions(self.data):
            log.warning(NO_CAPTIONS)
        if self.checkpoint and self.steps.start == 0:
            log.warning(
                "%d images seen are fewer than a batch of %d: this run keeps weights and optimizer, and starts at step 0, "
                "where the EMAs are set to the weights.",
                self.images_before, self.plan.total,
            )  # fmt: skip

    def _changed_batch(self) -> str:
        """What another total batch means for a fork, for the run summary."""
        if self.batch_before == self.plan.total:
            return ""
        again = self.images_before - self.steps.start * self.plan.total
        seen_again = f", the last {again:,} of which are seen again" if again else ""
        return f": {self.images_before:,} images in batches of {self.batch_before} until now{seen_again}"

    def _open_batches(self) -> Iterator[Batch] | None:
        """Start reading this rank's batches; None if a stop was requested while images were loaded to the GPU."""
        data, settings = self.data, self.settings
        order = data.order(settings.seed, self.plan.total)
        sample_indices = self.plan.sample_indices(self.world.rank, self.steps)
        if not self.gpu_bytes:
            return training_batches(data.source, data.split, order, sample_indices, settings.data)
        started, stopped, images = time.perf_counter(), False, None

        def report(count: int) -> None:
            self.watchdog.report(f"loading images to the device, {count:,} so far")
            if self.signals.signal_name is not None:
                raise InterruptedError

        device, size, shown = self.world.device, settings.model.img_size, self.world.is_main
        try:
            images = load_to_device(device, data.source, data.split, size, settings.data, report, shown)
        except (UserError, InterruptedError):
            if self.signals.signal_name is None:
                raise
            stopped = True  # also on an error: a signal to the whole job ends loader processes too
        if self.world.all_reduce_max(stopped) or images is None:
            return None
        self._list_broken(images.broken)
        log.info(f"{len(images.labels):,} images are on the device after {time.perf_counter() - started:.1f} s.")
        return images.batches(order, sample_indices)

    def _warm_up(self) -> None:
        if self.world.size == 1 and self.world.device.type != "cuda":
            return
        self.watchdog.report("compiling" if self.state.compiled else "warming up")
        if cache := self.compile_cache:
            cached = f"seconds if {cache.folder} has the code, else about a minute"
            log.info("Compiling the training step: %s.", cached if cache.is_warm else "about a minute, once")
        self.state.warm_up(self._warm_up_batch(), held_out=self.data.held_out is not None)
        if self.compile_cache and (report := self.compile_cache.summary()):
            log.info("%s", report)

    def _warm_up_batch(self) -> Batch:
        """Copies of one image of the largest size, or of the next one if it is broken and is to be skipped."""
        count, size = self.plan.batch_size, len(self.data.source)
        candidates = (self.data.largest + np.arange(size if self.skips_broken else 1)) % size
        first = next(held_out_batches(self.data.source, candidates, np.zeros(1, np.int64), 1, self.skips_broken))
        broken = len(first.broken)
        return next(held_out_batches(self.data.source, candidates[broken:][:1].repeat(count), np.arange(count), count))

    def _open_outputs(self, stack: ExitStack) -> None:
        """Open loggers, recorder, checkpoint writer and profiler; the stack closes them whatever ends the run."""
        settings, world, run, steps, checkpoint = self.settings, self.world, self.run, self.steps, self.checkpoint
        if checkpoint and world.is_main and resume.is_own(run, checkpoint):
            # A run that was resumed from an earlier checkpoint stays there, even if it dies before the next one.
            atomic_write(run.checkpoints / "latest", checkpoint.path.name + "\n")
        hardware = {"world_size": world.size, "device": world.device_name}
        self.loggers = open_loggers(run, settings, steps.start, hardware) if world.is_main else []
        for logger in self.loggers:
            stack.callback(logger.close)
        progress = ProgressLogger(steps.start, steps.stop, settings.log.every, quiet=not world.is_main)
        stack.callback(progress.close)
        forecast = Forecast(run.forecast if world.is_main else None, steps, self.checkpoint_steps)
        self.recorder = MetricsRecorder(
            self.state, self.clock, self.loggers, progress, forecast, settings.log.every, self.peak_flops
        )
        # The losses of an epoch that began with another batch do not add up.
        same_batch = self.batch_before == self.plan.total
        self.recorder.load_state_dict(checkpoint.manifest if checkpoint and same_batch else {})
        self.writer = CheckpointWriter(run.checkpoints, settings.checkpoint, self.state.strategy.checkpoint_mesh)
        stack.callback(self._finish_saving)
        self.watchdog.before_exit = self.writer.finish
        self.profiler = StepProfiler(settings.log.profile or 0, steps, run.profile, world.rank, world.device)
        stack.callback(self.profiler.close)

    def _how_to_continue(self) -> str:
        if self.state.rate.decay_steps and self.settings.optim.lr_decay_steps is None and not self.decays_with_epochs:
            return f"Its learning rate has ended: continue in a new run, --resume {self.run.root} --run_name NEW."
        return "Raise --epochs or --max_steps to continue."

    def _stopped(self, step: int) -> int:
        """Log that the run was stopped, and return the signal, on which all ranks agree: they exit alike."""
        what = "saved" if step > self.steps.start else "before the first step, so nothing was saved"
        name = self.signals.signal_name
        log.info("Stopped by %s at step %d: %s. Run the same command to resume.", name or "another process", step, what)
        return self.world.all_reduce_max(signal.Signals[name] if name else 0)


class TrainedRun(NamedTuple):
    """A run that training has left: at its last step, or stopped by a signal with its state saved."""

    folder: RunDir
    stop_signal: int
    """The signal that stopped it; 0 at the last step."""

    @property
    def exit_status(self) -> int:
        """128 plus the signal, as a shell reports it; 0 after SIGUSR1, after which SLURM requeues the job."""
        return 128 + self.stop_signal if self.stop_signal not in (0, signal.SIGUSR1) else 0


def train(
    settings: TrainSettings, name: str, preflight: Callable[[TrainSettings, Path], None] | None = None
) -> TrainedRun:
    """Train until the last step or a request to stop.

    `preflight` raises a UserError if the run in a folder cannot work on this machine (GPUs, disk, memory, network).
    """
    check_settings(settings)
    if not torch.cuda.is_available():  # else it is checked for the GPU of this process, which is not known yet
        check_strategy(settings, settings.distributed.strategy, torch.device("cpu"))
    run = RunDir.named(settings.results_dir, name)
    set_rank_environment(os.environ)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    start_log(None, rank)  # to the terminal only, until this process has the run's lock
    if size == 1 and preflight:
        preflight(settings, run.root)
    data = open_data(settings)  # before anything is written: a mistyped path leaves no empty run behind
    with ExitStack() as stack:
        if settings.dry_run:
            settings = _redirect_writes(settings, run, Path(stack.enter_context(TemporaryDirectory())))
        return TrainedRun(run, _watched(settings, data, run, rank, size, preflight))


def _redirect_writes(settings: TrainSettings, run: RunDir, scratch: Path) -> TrainSettings:
    """Let a dry run write what it must, such as heartbeats, into a temporary folder."""
    run.heartbeats = scratch
    run.shapes = run.shapes if run.shapes.exists() else scratch / run.shapes.name
    family = find_family(settings.model.name)
    if (folder := family.folder(settings)) is None or folder.exists():
        return settings
    elsewhere = settings.model_copy(update={"results_dir": str(scratch)})
    family.prepare(elsewhere)
    path = {"path": str(family.folder(elsewhere))}
    return settings.model_copy(update={"model": settings.model.model_copy(update=path)})


def _watched(
    settings: TrainSettings,
    data: TrainingData,
    run: RunDir,
    rank: int,
    size: int,
    preflight: Callable[[TrainSettings, Path], None] | None,
) -> int:
    """Train, and return the signal that stopped the run, or 0."""
    with Watchdog(run.heartbeats, rank, size, settings.distributed.dist_timeout) as watchdog:
        try:
            if size > 1 and preflight:  # here the other processes are told of an error
                preflight(settings, run.root)
            return _train_in_world(settings, data, run, watchdog)
        except RuntimeError as error:
            if size == 1 or not is_lost_peer(error):
                raise
            what = f"Rank {rank} lost contact with the other processes."
            raise UserError(what, watchdog.diagnosis(), RESUME_HINT) from None


def _train_in_world(settings: TrainSettings, data: TrainingData, run: RunDir, watchdog: Watchdog) -> int:
    distributed = settings.distributed
    world = World(distributed.strategy, distributed.dist_timeout, watchdog, distributed.dist_backend)
    try:
        check_strategy(settings, world.strategy, world.device)
        signals = SignalHandler(run.save_request)
        if settings.dry_run:
            resume.check_same_settings(run, settings)
            Trainer(settings, data, run, world, watchdog, signals)  # which logs the summary
            log.info("Dry run: nothing was trained or written.")
            return 0
        with ExitStack() as stack:
            if world.is_main:
                run.create()
                stack.enter_context(run.locked())
                resume.claim(run, settings)
                remove_leftovers(run.checkpoints)
            world.barrier()
            start_log(run.log, world.rank)
            stack.enter_context(signals.installed())
            stop_signal = Trainer(settings, data, run, world, watchdog, signals).train()
            world.barrier()
            return stop_signal
    except Exception as error:
        explained = _explain(error, run)
        if world.size == 1 or not is_lost_peer(error):
            watchdog.failed(str(explained))  # before the group is destroyed, which may wait for other processes
        if explained is error:
            raise
        raise explained from None
    finally:
        world.close()


def _explain(error: Exception, run: RunDir) -> Exception:
    """Turn a full disk or a full GPU into a UserError."""
    if isinstance(error, OSError) and is_disk_full(error):
        return disk_write_error(error, run.root)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return UserError(
            "CUDA out of memory.",
            "Another program may use part of the GPU's memory. The last checkpoint is intact.",
            "Run the same command to resume; a smaller --micro_batch_size needs less memory, with the same result.",
        )
    return error


class SignalHandler:
    """Collects signals and the file that requests a checkpoint; the loop polls it between steps."""

    def __init__(self, save_file: Path) -> None:
        self.save_file = save_file
        self.signal_name: str | None = None
        self._next_poll = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take SIGTERM, SIGINT and SIGUSR1 (SLURM, before a time limit) as requests to stop; a second SIGINT ends.

        Only the main thread may have handlers: in another one, signals are left to the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        # The first one counts: a job that SLURM warned by SIGUSR1 is requeued, also if SIGTERM follows at the time limit.
        self.signal_name = self.signal_name or signal.Signals(number).name

    def poll(self, savable: bool) -> Request:
        """Return the most urgent request; the save file is looked for five times a second, and removed."""
        if self.signal_name is not None:
            return Request.STOP
        if savable and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + _SAVE_FILE_INTERVAL
            with suppress(FileNotFoundError):
                self.save_file.unlink()
                return Request.SAVE
        return Request.NOTHING
