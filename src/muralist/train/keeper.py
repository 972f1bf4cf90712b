"""What a run leaves behind at its checkpoints: held-out loss, checkpoint, pictures."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from muralist import __version__
from muralist.data.loader import Batch, held_out_batches
from muralist.errors import UserError
from muralist.models import variants
from muralist.models.family import Family
from muralist.runfolder import RunFolder
from muralist.settings import TrainSettings
from muralist.train import samples
from muralist.train.data import Data
from muralist.train.distributed import Engine
from muralist.train.heartbeat import SAVING, WAITING, Heartbeat
from muralist.train.monitors import Monitor
from muralist.train.recorder import Recorder
from muralist.train.stepper import Stepper
from muralist.train.writer import CheckpointWriter

log = logging.getLogger("muralist")
VALIDATION_SEED = 0  # not the run's: val/loss is comparable over runs


@dataclass
class Keeper:
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
    writer: CheckpointWriter
    heartbeat: Heartbeat
    saved_step: int = -1
    pictures_of: int | None = None  # the step whose pictures by other processes the monitors have not seen yet

    def save_checkpoint(self, step: int) -> None:
        """What happens at every checkpoint: held-out loss, checkpoint, pictures."""
        with self.recorder.paused():
            loss, error = self.validate()
        self.save(step, {} if loss is None else {"val/loss": loss})
        if error:
            raise self.finish_together() or error
        if loss is not None:
            log.info("step %d  val/loss %.4f", step, loss)
        if self.settings.samples.per_gpu:
            with self.recorder.paused():
                self._write_samples(step)

    def finish(self) -> None:
        """Wait until the checkpoint under way is on disk."""
        self._report_saving()
        self.writer.finish()

    def finish_together(self) -> UserError | None:
        """The same on all processes before any goes on; returns what went wrong with it."""
        error = None
        try:
            self.finish()
        except UserError as caught:
            error = caught
        self.engine.wait()
        return error

    def _report_saving(self) -> None:
        self.heartbeat.report(SAVING if self.stepper.strategy.saves_alone else WAITING)

    def show_pictures_of_others(self) -> None:
        """Hand the other processes' last pictures to the monitors, which only the main process has."""
        if self.pictures_of is not None:
            for name, picture, prompt in samples.pictures_of_others(self.run.samples, self.pictures_of):
                for monitor in self.monitors:
                    monitor.picture(self.pictures_of, name, picture, prompt)
            self.pictures_of = None

    def save(self, step: int, extra: dict[str, float] | None = None) -> None:
        """Metrics first, then the checkpoint: a resumed run finds both or neither."""
        if step == self.saved_step:
            return
        self.recorder.flush(extra)
        self._report_saving()
        with self.recorder.paused():
            for monitor in self.monitors:
                monitor.flush()
            self._submit_checkpoint(step)
            self.saved_step = step

    def _submit_checkpoint(self, step: int) -> None:
        stepper = self.stepper
        snapshot = stepper.strategy.snapshot(self.family, stepper.network, stepper.optimizer, stepper.averages)
        if snapshot is None:
            return
        facts = {
            "images": step * stepper.plan.total,
            "total_batch": stepper.plan.total,
            "model": self.family.describe(),
            "data": self.data.facts,
            "epoch_loss": [self.recorder.epoch_loss.total, self.recorder.epoch_loss.steps],
            "skipped_steps": [self.recorder.skipped.total, self.recorder.skipped.in_a_row],
            "loss_scale": stepper.scaler.state_dict(),
            "versions": {"muralist": __version__, "torch": torch.__version__},
        }
        self.writer.submit(step, snapshot.weights, snapshot.state, facts)

    def _write_samples(self, step: int) -> None:
        stepper = self.stepper
        # Outside what may fail on one process alone: where weights lie in parts, all gather them here.
        network = stepper.strategy.drawing_network(self.family, stepper.network, stepper.averages[0])
        if network is None:
            log.warning("No samples at step %d: the whole network does not fit beside its training state.", step)
            return
        self.heartbeat.report("writing samples")
        self.pictures_of = step if self.engine.is_main and self.engine.size > 1 else None
        if variants.is_hunyuan(self.settings.model.name):
            self._write_hunyuan_samples(step, network)
            return
        samples.write_samples(
            self.run.samples,
            step,
            self.engine.rank,
            self.engine.size,
            self.family,
            network,
            self.prompts,
            self.settings.samples,
            self.stepper.autocast,
            self.monitors,
        )

    def _write_hunyuan_samples(self, step: int, network: nn.Module) -> None:
        from muralist.models.hunyuan_family import HunyuanFamily
        from muralist.train.hunyuan_samples import sample_images_multi_gpu

        assert isinstance(self.family, HunyuanFamily)
        parts, wanted = self.family.parts, self.settings.samples
        sample_images_multi_gpu(
            network,
            self.family.schedule,
            parts.vae,
            parts.bert,
            parts.bert_tokenizer,
            parts.t5,
            parts.t5_tokenizer,
            self.engine.rank,
            self.engine.size,
            Namespace(
                samples_dir=self.run.samples,
                image_size=self.family.size,
                sample_prompts=self.prompts,
                sample_steps=wanted.steps,
                sample_guidance=wanted.guidance,
                sample_seed=wanted.seed,
                sample_solver=wanted.solver,
                samples_per_gpu=wanted.per_gpu,
                autocast=self.stepper.autocast,
                monitors=self.monitors,
                embedded_prompts=parts.remembered,
            ),
            log,
            step,
        )

    @torch.no_grad()
    def validate(self) -> tuple[float | None, UserError | None]:
        """Mean loss over the held-out images with fixed keys, None where nothing is held out; or what all ranks fail of."""
        if self.data.held_out is None:
            return None, None
        stepper, device, count = self.stepper, self.engine.device, len(self.data.held_out_indices)
        # Equally many on every process, the last again where they do not divide: a forward pass may need all processes.
        rows = -(-count // self.engine.size)
        positions = np.minimum(self.engine.rank + self.engine.size * np.arange(rows), count - 1)
        counted = torch.arange(rows) * self.engine.size + self.engine.rank < count
        batches = held_out_batches(self.data.held_out, self.data.held_out_indices, positions, stepper.micro)
        total = torch.zeros((), dtype=torch.float64, device=device)
        stepper.network.eval()
        try:
            for first in range(0, rows, stepper.micro):
                self.heartbeat.report("held-out loss")
                batch, error = _next_or_error(batches)
                if self.engine.largest(error is not None) or batch is None:
                    return None, error or UserError("Another process could not read a held-out image; it says which.")
                losses = stepper.losses(batch.to(device), VALIDATION_SEED)
                total += losses.double()[counted[first : first + stepper.micro].to(device)].sum()
        finally:
            stepper.network.train()
        return float(self.engine.total(total)) / count, None


def _next_or_error(batches: Iterator[Batch]) -> tuple[Batch | None, UserError | None]:
    try:
        return next(batches), None
    except UserError as error:
        return None, error
