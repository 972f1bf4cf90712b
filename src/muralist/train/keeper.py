"""What a run leaves behind at its checkpoints: held-out loss, checkpoint, pictures."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from muralist import __version__
from muralist.data.loader import held_out_batches
from muralist.errors import UserError
from muralist.keyed_random import SampleKeys
from muralist.models.family import Family
from muralist.runfolder import RunFolder
from muralist.settings import TrainSettings
from muralist.train import checkpoint, samples
from muralist.train.data import Data
from muralist.train.distributed import Engine
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
    saved_step: int = -1

    def checkpoint_and_samples(self, step: int) -> None:
        """What happens at every checkpoint: held-out loss, checkpoint, pictures."""
        with self.recorder.paused():
            loss, error = self.validate()
        self.save(step, {} if loss is None else {"val/loss": loss})
        if error:
            self.writer.finish()
            raise error
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
                self._submit_checkpoint(step)
            self.saved_step = step

    def _submit_checkpoint(self, step: int) -> None:
        stepper = self.stepper
        weights = {"model": stepper.network.state_dict()}
        weights |= {f"ema{i}": average.state(stepper.network) for i, average in enumerate(stepper.averages, start=1)}
        facts = {
            "images": step * stepper.plan.total,
            "total_batch": stepper.plan.total,
            "model": self.family.describe(),
            "data": self.data.facts,
            "epoch_loss": [self.recorder.epoch_loss.total, self.recorder.epoch_loss.steps],
            "loss_scale": stepper.scaler.state_dict(),
            "versions": {"muralist": __version__, "torch": torch.__version__},
        }
        state = checkpoint.optimizer_tensors(stepper.network, stepper.optimizer)
        self.writer.submit(step, weights, state, facts)

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
    def validate(self) -> tuple[float | None, UserError | None]:
        """Mean loss over the held-out images with fixed keys, None where nothing is held out; or what all ranks fail of."""
        if self.data.held_out is None:
            return None, None
        stepper, device = self.stepper, self.engine.device
        positions = np.arange(self.engine.rank, len(self.data.held_out_indices), self.engine.size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        error: UserError | None = None
        stepper.network.eval()
        try:
            for batch in held_out_batches(self.data.held_out, self.data.held_out_indices, positions, stepper.micro):
                batch = batch.to(device)
                keys = SampleKeys(VALIDATION_SEED, batch.numbers)
                with torch.autocast(device.type, stepper.autocast, enabled=stepper.autocast is not None):
                    total += self.family.loss(stepper.network, self.family.encode(batch, keys), keys).double().sum()
        except UserError as caught:
            error = caught
        stepper.network.train()
        if self.engine.largest(error is not None):
            return None, error or UserError("Another process could not read a held-out image.")
        return float(self.engine.total(total)) / len(self.data.held_out_indices), None
