"""Batches, epochs, learning rate and EMA decay as functions of images seen."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data.sampler import ShuffledOrder
from muralist.settings import CheckpointSettings, DataSettings, OptimSettings
from muralist.train.preflight import check_length
from muralist.train.schedule import (
    BatchPlan,
    LearningRate,
    TrainingClock,
    checkpoint_steps,
    ema_decay,
    ema_half_lives,
    learning_rate,
    plan_batch,
    rates_by_gpus,
)

samples = st.integers(1, 3000)
batches = st.integers(1, 400)


def rate(total_batch: int, samples: int = 29_500, epochs: int = 10, **optim: object) -> LearningRate:
    return learning_rate(OptimSettings(**optim), TrainingClock(samples, total_batch, epochs))  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "total", "steps"), [(1, 4, 7375), (2, 8, 3687), (4, 16, 1843), (8, 32, 921)])
def test_steps_per_epoch(gpus: int, total: int, steps: int) -> None:
    plan = plan_batch(DataSettings(batch_size=4), OptimSettings(), gpus)
    assert (plan.total, plan.batch_size, plan.accumulation_steps) == (total, 4, 1)
    assert TrainingClock(29_500, plan.total, 1).last_step == steps


@given(st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 8), st.integers(0, 10**6))
def test_the_ranks_share_each_global_batch(batch: int, ranks: int, accumulation: int, step: int) -> None:
    optim = OptimSettings(gradient_accumulation_steps=accumulation)
    plan = plan_batch(DataSettings(batch_size=batch), optim, ranks)
    assert plan == BatchPlan(batch * ranks * accumulation, ranks, accumulation, batch)
    assert str(plan) == f"{batch} per GPU x {ranks} GPUs x {accumulation} accumulation = {plan.total}"
    per_rank = [list(plan.sample_indices(rank, range(step, step + 2))) for rank in range(ranks)]
    assert all(len(parts) == 2 * accumulation and {len(part) for part in parts} == {batch} for parts in per_rank)
    for turn in range(2):
        of_step = [parts[turn * accumulation : (turn + 1) * accumulation] for parts in per_rank]
        numbers = list(itertools.chain.from_iterable(itertools.chain.from_iterable(of_step)))
        assert numbers == list(range((step + turn) * plan.total, (step + turn + 1) * plan.total))


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, 16))
def test_resumed_run_keeps_its_total_batch_on_any_dividing_ranks(batch: int, total: int, ranks: int) -> None:
    data, optim = DataSettings(batch_size=batch), OptimSettings()
    if total % ranks:
        with pytest.raises(
            UserError, match=rf"{total} of this run cannot be divided by {ranks} processes.*--resume RUN"
        ):
            plan_batch(data, optim, ranks, fixed_total=total)
        return
    plan = plan_batch(data, optim, ranks, fixed_total=total)
    assert plan.total == total == plan.ranks * plan.accumulation_steps * plan.batch_size
    assert plan.batch_size <= batch
    # As few parts as memory allows: no larger divisor of the share fits.
    assert not [part for part in range(plan.batch_size + 1, batch + 1) if plan.per_rank % part == 0]


def test_resuming_on_fewer_and_more_gpus() -> None:
    data, optim = DataSettings(batch_size=4), OptimSettings()
    started = plan_batch(data, optim, 2)
    assert plan_batch(data, optim, 1, started.total) == BatchPlan(8, 1, 2, 4)
    assert plan_batch(data, optim, 4, started.total) == BatchPlan(8, 4, 1, 2)
    with pytest.raises(UserError, match="Use a number of processes that divides 8"):
        plan_batch(data, optim, 3, started.total)
    with pytest.raises(UserError, match=r"10 \(--global_batch_size\) cannot be divided by 4"):
        plan_batch(DataSettings(global_batch_size=10), optim, 4)


@given(samples, batches, st.integers(1, 60))
def test_epochs_end_at_the_floor_of_samples_over_batch(samples: int, batch: int, epochs: int) -> None:
    clock = TrainingClock(samples, batch, epochs)
    ends = [clock.end_of_epoch(epoch) for epoch in range(1, epochs + 1)]
    assert ends == [epoch * samples // batch for epoch in range(1, epochs + 1)]
    assert clock.last_step == ends[-1]
    for step in range(1, min(clock.last_step, 500) + 1):
        finished = clock.epochs_finished(step)
        assert clock.end_of_epoch(finished) <= step < clock.end_of_epoch(finished + 1)
        if step < clock.last_step:
            assert clock.ends_epoch(step) == (step in ends)
        assert clock.epoch_at(step) == pytest.approx(step * batch / samples)
    if clock.last_step:
        assert clock.ends_epoch(clock.last_step)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4), st.integers(0, 2**63 - 1))
def test_no_image_is_skipped_or_seen_twice_in_an_epoch(samples: int, batch: int, epochs: int, seed: int) -> None:
    clock = TrainingClock(samples, batch, epochs)
    plan = plan_batch(DataSettings(batch_size=batch), OptimSettings(), 1)
    numbers = np.array(list(itertools.chain(*plan.sample_indices(0, range(clock.last_step)))), dtype=np.int64)
    assert len(numbers) > epochs * samples - batch  # less than a batch is left over at the very end
    positions = ShuffledOrder(seed, samples).positions(numbers)
    for epoch in range(len(numbers) // samples):
        assert sorted(positions[epoch * samples : (epoch + 1) * samples].tolist()) == list(range(samples))


def test_run_without_a_step_is_refused() -> None:
    check_length(TrainingClock(10, 10, 1))
    with pytest.raises(UserError, match="2 epochs of 10 images are less than one batch of 21"):
        check_length(TrainingClock(10, 21, 2))


def test_rules_and_base_rates() -> None:
    assert rate(1024, blr=5e-5).peak == pytest.approx(2e-4, rel=1e-12)  # the official recipe
    assert rate(1024, blr=5e-5, learning_rate=7.0, lr_rule="sqrt", lr_base_batch=3).peak == pytest.approx(2e-4)
    assert rate(1024).peak == 2e-4
    assert rate(1024, learning_rate=1e-3, lr_rule="sqrt", lr_base_batch=256).peak == pytest.approx(2e-3, rel=1e-12)
    assert rate(4, learning_rate=1e-3).reason == "as given, no scaling"


@given(batches, st.integers(0, 50), st.sampled_from(["constant", "cosine", "wsd"]), st.integers(1, 100))
def test_warm_up_rises_and_the_schedule_falls(batch: int, warmup: int, schedule: str, epochs: int) -> None:
    clock = TrainingClock(3000, batch, epochs)
    assume(clock.last_step > warmup + 2)
    optim = OptimSettings(learning_rate=1e-3, min_lr=1e-5, warmup_steps=warmup, lr_schedule=schedule)  # type: ignore[arg-type]
    curve = learning_rate(optim, clock)
    steps = [*range(min(clock.last_step, 300)), clock.last_step - 1]
    rates = [curve.at(step * batch) for step in steps]
    assert all(0 < value <= 1e-3 for value in rates)
    climb = rates[: min(warmup, 300) + 1]
    assert all(before < after for before, after in itertools.pairwise(climb))
    if warmup < 300:
        assert climb[-1] == pytest.approx(1e-3)
        rest = rates[warmup:]
        if schedule == "constant":
            assert set(rest) == {1e-3}
        else:
            assert all(before >= after for before, after in itertools.pairwise(rest))
    if schedule != "constant":
        assert curve.at(clock.last_step * batch) == pytest.approx(1e-5)
        assert curve.at(10 * clock.last_step * batch) == pytest.approx(1e-5)
    if schedule == "cosine":
        middle = (warmup * batch + clock.last_step * batch) // 2
        assert curve.at(middle) == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-2, abs=1e-5)


def test_wsd_is_constant_until_its_last_part_falls_linearly() -> None:
    common = {"learning_rate": 1e-3, "min_lr": 1e-4, "lr_schedule": "wsd", "samples": 800, "epochs": 1}  # 100 steps
    curve = rate(8, warmup_steps=10, lr_decay_fraction=0.4, **common)  # type: ignore[arg-type]
    rates = [curve.at(8 * step) for step in range(101)]
    assert all(before < after for before, after in itertools.pairwise(rates[:11]))
    assert set(rates[10:61]) == {1e-3}
    assert rates[60:] == pytest.approx(np.linspace(1e-3, 1e-4, 41))
    late = rate(8, warmup_steps=50, lr_decay_fraction=1.0, **common)  # type: ignore[arg-type]
    assert [late.at(8 * step) for step in (50, 75, 100)] == pytest.approx([1e-3, 5.5e-4, 1e-4]), (
        "not before warm-up ends"
    )
    elsewhere = rate(8, warmup_steps=10, lr_decay_fraction=0.5, lr_decay_steps=40, **common)  # type: ignore[arg-type]
    assert [elsewhere.at(8 * step) for step in (20, 30, 40, 99)] == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])
    assert (curve.decay_steps, elsewhere.decay_steps, rate(8).decay_steps) == (100, 40, None)


@given(st.integers(0, 64_000), st.sampled_from(["cosine", "wsd"]))
def test_learning_rate_depends_on_images_not_on_the_batch(images: int, schedule: str) -> None:
    common = {"learning_rate": 1e-3, "lr_schedule": schedule, "min_lr": 1e-6, "samples": 6400, "epochs": 10}
    curves = [rate(batch, warmup_steps=3200 // batch, **common) for batch in (8, 32, 64)]  # type: ignore[arg-type]
    values = [curve.at(images) for curve in curves]
    if images >= 3200:
        assert values == pytest.approx([values[0]] * 3, rel=1e-12)
    else:  # the first step has a rate above nothing, so a warm-up in larger steps is ahead by less than one step
        assert all(abs(value - values[0]) <= 1e-3 * 64 / 3200 for value in values)


def test_min_lr_above_the_learning_rate_is_refused() -> None:
    with pytest.raises(UserError, match=r"--min_lr 0\.001 is above the learning rate of 0\.0002"):
        rate(64, min_lr=1e-3, lr_schedule="cosine")
    with pytest.raises(UserError, match=r"above the learning rate of 5e-06"):
        rate(4, learning_rate=3.2e-4, lr_rule="linear", min_lr=1e-5, lr_schedule="cosine")
    with pytest.raises(UserError, match="The schedule wsd falls from the learning rate to min_lr"):
        rate(64, min_lr=1e-3, lr_schedule="wsd")
    assert rate(1024, blr=1e-3, min_lr=1e-3, lr_schedule="cosine").minimum == 1e-3  # below 4e-3
    assert rate(64, min_lr=1e-3).peak == 2e-4  # nothing falls to it


DEFAULTS = OptimSettings()


def test_default_ema_decays_are_the_official_ones_at_batch_1024() -> None:
    assert ema_decay(10**9, 1024, DEFAULTS.ema1_half_life) == pytest.approx(0.9999, abs=1e-7)
    assert ema_decay(10**9, 1024, DEFAULTS.ema2_half_life) == pytest.approx(0.9996, abs=1e-7)


def test_ema_decay_is_per_step_at_the_runs_total_batch() -> None:
    for batch in (8, 1024):
        first, second = ema_half_lives(OptimSettings(ema_decay=0.999), batch)
        assert ema_decay(10**9, batch, first) == pytest.approx(0.999, rel=1e-12)
        assert second == DEFAULTS.ema2_half_life
    assert ema_half_lives(DEFAULTS, 8) == (DEFAULTS.ema1_half_life, DEFAULTS.ema2_half_life)


@given(st.integers(1, 10**5), st.integers(1, 200))
def test_half_is_left_after_a_half_life_of_any_step_sizes(step_images: int, steps: int) -> None:
    far = 10**9
    decay = ema_decay(far, step_images, half_life=step_images * steps)
    assert decay**steps == pytest.approx(0.5, rel=1e-9)


@given(st.integers(2 * 10**8, 10**12), st.integers(1, 2048), st.integers(1, 2048))
def test_two_small_steps_decay_as_one_large_step(images: int, first: int, second: int) -> None:
    half_life = DEFAULTS.ema1_half_life
    split = ema_decay(images, first, half_life) * ema_decay(images + first, second, half_life)
    assert split == pytest.approx(ema_decay(images, first + second, half_life), rel=1e-12)


@given(st.integers(1, 10**7), st.integers(1, 1024))
def test_ema_half_life_is_limited_by_images_seen(images: int, batch: int) -> None:
    assert ema_decay(0, batch, 1e6) == 0.0
    decay = ema_decay(images, batch, DEFAULTS.ema1_half_life)
    half_life = batch * math.log(0.5) / math.log(decay) if decay > 0 else 0
    assert half_life <= 0.05 * images * (1 + 1e-6)
    assert ema_decay(images + 1, batch, DEFAULTS.ema1_half_life) >= decay


def test_table_of_learning_rates_by_gpus() -> None:
    optim = OptimSettings(learning_rate=1.25e-6, lr_rule="linear", lr_base_batch=4)
    for ranks, peak in ((1, 1.25e-6), (2, 2.5e-6), (4, 5.0e-6)):
        plan = plan_batch(DataSettings(batch_size=4), optim, ranks)
        rate = learning_rate(optim, TrainingClock(29_500, plan.total, 1))
        assert rate.peak == pytest.approx(peak, rel=1e-12) and rate.at(10**7) == rate.peak
        told = rates_by_gpus(rate, "linear", plan)
        assert told == "1.25e-06 on 1 (batch 4), 2.5e-06 on 2 (batch 8), 5e-06 on 4 (batch 16), 1e-05 on 8 (batch 32)"
    assert "1.25e-06 x 4, linear rule, base batch 4" in rate.reason


def test_checkpoints_are_due_at_intervals_epoch_ends_and_the_last_step() -> None:
    clock = TrainingClock(samples=70, total_batch=10, epochs=3)  # epochs of seven steps
    due = functools.partial(checkpoint_steps, clock=clock, last_step=18)
    assert due(CheckpointSettings(every=5)) == {5, 10, 15, 18}
    assert due(CheckpointSettings(every=8, latest_every=6)) == {6, 8, 12, 16, 18}
    assert due(CheckpointSettings(every=10, at_epoch_end=True)) == {7, 10, 14, 18}
    for samples, total in ((64, 10), (5, 16)):  # an epoch that ends within a step, and one shorter than a step
        clock = TrainingClock(samples, total, epochs=9)
        steps = range(1, clock.last_step + 1)
        ends = checkpoint_steps(CheckpointSettings(every=1000, at_epoch_end=True), clock, clock.last_step)
        assert ends - {0} == {step for step in steps if clock.ends_epoch(step)}
