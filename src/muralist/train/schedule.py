"""Batch plan, epochs, learning rate and EMA decay: pure functions of images seen, so that nothing must be restored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from muralist.core.errors import UserError
from muralist.settings import CheckpointSettings, DataSettings, LrSchedule, OptimSettings

MAX_EMA_FRACTION = 0.05
"""Longest half-life of the EMA, as a fraction of the images seen so far."""


@dataclass(frozen=True)
class BatchPlan:
    """How the images of one optimizer step are divided: total = batch_size x ranks x accumulation_steps."""

    total: int
    ranks: int
    accumulation_steps: int
    batch_size: int

    @property
    def per_rank(self) -> int:
        """Images of one rank in one optimizer step."""
        return self.accumulation_steps * self.batch_size

    def sample_indices(self, rank: int, steps: range) -> Iterator[list[int]]:
        """Yield the sample indices of one rank, batch by batch: rank r has the r-th slice of every global batch."""
        for step in steps:
            start = step * self.total + rank * self.per_rank
            for first in range(start, start + self.per_rank, self.batch_size):
                yield list(range(first, first + self.batch_size))

    def __str__(self) -> str:
        return f"{self.batch_size} per GPU x {self.ranks} GPUs x {self.accumulation_steps} accumulation = {self.total}"


def plan_batch(data: DataSettings, optim: OptimSettings, ranks: int, fixed_total: int | None = None) -> BatchPlan:
    """Plan the batches; `fixed_total` is the total batch of the run being resumed, which never changes."""
    total = fixed_total or data.global_batch_size
    if total is None:
        total = data.batch_size * ranks * optim.gradient_accumulation_steps
    if total % ranks:
        origin, fork = "(--global_batch_size)", ""
        if fixed_total:
            origin, fork = "of this run", ", or continue with another batch in a new run: --resume RUN --run_name NEW"
        raise UserError(
            f"The total batch of {total} {origin} cannot be divided by {ranks} processes.",
            fix=f"Use a number of processes that divides {total}{fork}.",
        )
    per_rank = total // ranks
    accumulation = next(n for n in range(-(-per_rank // data.batch_size), per_rank + 1) if per_rank % n == 0)
    return BatchPlan(total, ranks, accumulation, per_rank // accumulation)


@dataclass(frozen=True)
class TrainingClock:
    """Steps and epochs of a run over `samples` images in batches of `total_batch`."""

    samples: int
    total_batch: int
    epochs: int

    @property
    def last_step(self) -> int:
        """Step at which the last epoch ends."""
        return self.end_of_epoch(self.epochs)

    def end_of_epoch(self, epoch: int) -> int:
        """Last step of an epoch, floor(epoch x samples / total batch): the remainder carries over to the next epoch."""
        return epoch * self.samples // self.total_batch

    def epochs_finished(self, step: int) -> int:
        """Number of epochs that have ended after this step."""
        return ((step + 1) * self.total_batch - 1) // self.samples

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ends after exactly this step."""
        finished = self.epochs_finished(step)
        return finished > 0 and self.end_of_epoch(finished) == step

    def epoch_at(self, step: int) -> float:
        """Passes over the data after this step, as a fraction."""
        return step * self.total_batch / self.samples


def checkpoint_steps(settings: CheckpointSettings, clock: TrainingClock, last_step: int) -> set[int]:
    """Steps that end with a checkpoint: every so many, at the end of an epoch if asked for, and the last one."""
    intervals = (settings.every, settings.latest_every or settings.every)
    due = {step for interval in intervals for step in range(interval, last_step + 1, interval)} | {last_step}
    if settings.at_epoch_end:
        due |= {clock.end_of_epoch(epoch) for epoch in range(1, clock.epochs_finished(last_step) + 1)}
    return due


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then constant, cosine, or constant with a linear decay: a function of images seen before the step."""

    peak: float
    minimum: float
    warmup_images: int
    total_images: int
    step_images: int
    schedule: LrSchedule
    decay_fraction: float  # of wsd
    reason: str

    @property
    def decay_steps(self) -> int | None:
        """The step at which the rate reaches its minimum; None for a constant rate."""
        return None if self.schedule == "constant" else self.total_images // self.step_images

    @property
    def decay_start(self) -> float:
        """Images after which the rate of wsd falls."""
        return max(self.warmup_images, self.total_images * (1 - self.decay_fraction))

    def at(self, images: int) -> float:
        """The learning rate of the step that starts after `images` images."""
        if images < self.warmup_images:
            return self.peak * (images + self.step_images) / (self.warmup_images + self.step_images)
        start = self.decay_start if self.schedule == "wsd" else self.warmup_images
        if self.schedule == "constant" or (self.schedule == "wsd" and images <= start):
            return self.peak
        progress = min(1.0, (images - start) / max(1, self.total_images - start))
        left = 1 - progress if self.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.minimum + (self.peak - self.minimum) * left


def _factor(rule: str, ratio: float) -> float:
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def rates_by_gpus(rate: LearningRate, rule: str, plan: BatchPlan) -> str:
    """List the learning rates that the rule gives on other numbers of GPUs with the same batch on each."""
    peaks = {count: rate.peak * _factor(rule, count / plan.ranks) for count in (1, 2, 4, 8)}
    return ", ".join(f"{peak:.3g} on {count} (batch {count * plan.per_rank})" for count, peak in peaks.items())


def learning_rate(optim: OptimSettings, clock: TrainingClock, last_step: int | None = None) -> LearningRate:
    """Build the schedule of a run, with a reason for its peak; it ends with the epochs, or before, at `last_step`."""
    base, rule, base_batch = optim.learning_rate, optim.lr_rule, optim.lr_base_batch
    if optim.blr is not None:
        base, rule, base_batch = optim.blr, "linear", 256
    factor = _factor(rule, clock.total_batch / base_batch)
    scaling = f"{base:g} x {factor:g}, {rule} rule, base batch {base_batch}"
    reason = "as given, no scaling" if rule == "none" else scaling
    peak = base * factor
    schedule = optim.lr_schedule
    if optim.lr_decay_steps and schedule == "constant":
        raise UserError(
            f"--lr_decay_steps {optim.lr_decay_steps} has no effect under a constant learning rate.",
            fix="Add --lr_schedule cosine or wsd, or leave --lr_decay_steps out.",
        )
    if optim.lr_decay_steps and optim.lr_decay_steps <= optim.warmup_steps:
        raise UserError(
            f"--lr_decay_steps {optim.lr_decay_steps} is not after the warm-up of {optim.warmup_steps} steps.",
            fix=f"The schedule {schedule} begins after the warm-up: raise --lr_decay_steps, or lower --warmup_steps.",
        )
    if schedule != "constant" and optim.min_lr > peak:
        raise UserError(
            f"--min_lr {optim.min_lr:g} is above the learning rate of {peak:g} ({reason}).",
            fix=f"The schedule {schedule} falls from the learning rate to min_lr: lower --min_lr.",
        )
    batch = clock.total_batch
    total, warmup = (optim.lr_decay_steps or last_step or clock.last_step) * batch, optim.warmup_steps * batch
    return LearningRate(peak, optim.min_lr, warmup, total, batch, schedule, optim.lr_decay_fraction, reason)


def ema_half_lives(optim: OptimSettings, total_batch: int) -> tuple[float, float]:
    """Half-lives of both EMAs in images; --ema_decay is that of the first one per step of `total_batch` images."""
    first = optim.ema1_half_life
    if optim.ema_decay is not None:
        first = total_batch * math.log(0.5) / math.log(optim.ema_decay)
    return first, optim.ema2_half_life


def ema_decay(images: int, step_images: int, half_life: float) -> float:
    """Decay of the step that starts after `images` images; 0 in the first step: the EMA starts as the weights."""
    half_life = min(half_life, MAX_EMA_FRACTION * images)
    return 0.5 ** (step_images / half_life) if half_life > 0 else 0.0
