"""The objective's algebra, for all nine pairs of prediction and loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muralist.core.rng import SampleKeys
from muralist.diffusion import flow

KINDS = ("x", "v", "eps")
times = st.floats(0.0, 1.0, width=32)


def convert(kind: str, space: str, output: torch.Tensor, z: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """The conversions of the paper with bounded divisors, written out."""
    t = time.view(-1, 1, 1, 1)
    early, late = t.clamp_min(flow.T_EPS), (1 - t).clamp_min(flow.T_EPS)
    return {
        ("x", "x"): output, ("x", "v"): (output - z) / late, ("x", "eps"): (z - t * output) / late,
        ("v", "x"): z + (1 - t) * output, ("v", "v"): output, ("v", "eps"): z - t * output,
        ("eps", "x"): (z - (1 - t) * output) / early, ("eps", "v"): (z - output) / early, ("eps", "eps"): output,
    }[kind, space]  # fmt: skip


def triple(seed: int, t: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, e = torch.randn(2, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
    time = torch.full((3,), t, dtype=torch.float64)
    return x, e, time, flow.interpolate(x, e, time)


@given(st.integers(0, 1000), times)
def test_path_runs_straight_from_noise_to_data(seed, t):
    x, e, time, z = triple(seed, t)
    torch.testing.assert_close(z, e + t * (x - e))
    assert torch.equal(flow.interpolate(x, e, torch.zeros_like(time)), e)
    assert torch.equal(flow.interpolate(x, e, torch.ones_like(time)), x)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), t=st.floats(0.05, 0.95))
def test_the_velocity_is_recovered_from_every_prediction(kind, seed, t):
    x, e, time, z = triple(seed, t)
    truth = {"x": x, "v": x - e, "eps": e}
    torch.testing.assert_close(flow.to_v(kind, truth[kind], z, time), truth["v"], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("space", KINDS)
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), t=times)
def test_loss_is_the_squared_error_of_converted_prediction_and_target(kind, space, seed, t):
    x, e, time, z = triple(seed, t)
    output = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    truth = {"x": x, "v": x - e, "eps": e}[kind]
    error = convert(kind, space, output, z, time) - convert(kind, space, truth, z, time)
    explicit = error.square().mean(dim=(1, 2, 3))
    loss = flow.loss(kind, space, output, x, e, time)
    assert loss.shape == (3,)
    torch.testing.assert_close(loss, explicit, atol=1e-6, rtol=1e-5)
    assert (flow.loss(kind, space, truth, x, e, time) < 1e-12).all()


def test_default_bound_stops_the_weight_at_400():
    x, e, one = torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1)
    assert flow.loss("x", "v", x + 1, x, e, one).item() == pytest.approx(400)
    assert flow.loss("x", "v", x + 1, x, e, one * 0.5).item() == pytest.approx(4)
    assert flow.loss("x", "v", x + 1, x, e, one, t_eps=0.1).item() == pytest.approx(100)


def test_half_precision_output_gives_a_float32_loss():
    x, e, t = torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4), torch.tensor([0.2, 0.8])
    assert flow.loss("x", "v", x.bfloat16(), x, e, t).dtype == torch.float32


def test_times_are_logit_normal():
    t = flow.sample_time(SampleKeys(0, torch.arange(40_000)))
    logits = torch.logit(t.double())
    assert logits.mean().item() == pytest.approx(-0.8, abs=0.02)
    assert logits.std().item() == pytest.approx(0.8, abs=0.02)
    assert t.median().item() == pytest.approx(0.310, abs=0.005)
    shifted = torch.logit(flow.sample_time(SampleKeys(0, torch.arange(1000)), mean=1.0, std=0.0).double())
    torch.testing.assert_close(shifted, torch.ones(1000, dtype=torch.float64), atol=1e-6, rtol=0)


def test_noise_is_normal_scaled_and_seeded_per_sample():
    noise = flow.sample_noise(SampleKeys(0, torch.arange(64)), (3, 16, 16), scale=2.0)
    assert noise.shape == (64, 3, 16, 16)
    assert noise.mean().item() == pytest.approx(0, abs=0.03)
    assert noise.std().item() == pytest.approx(2, abs=0.03)
    assert torch.equal(flow.sample_noise(SampleKeys(0, torch.tensor([9, 5])), (3, 16, 16), 2.0), noise[[9, 5]])
    assert not torch.equal(flow.sample_noise(SampleKeys(1, torch.tensor([9])), (3, 16, 16), 2.0)[0], noise[9])


def test_labels_drop_at_the_stated_rate_and_by_sample():
    labels = torch.arange(20_000) % 10
    keys = SampleKeys(4, torch.arange(20_000))
    dropped = flow.drop_labels(labels, keys, 0.1, null_label=10)
    gone = dropped == 10
    assert gone.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(dropped[~gone], labels[~gone])
    assert dropped.dtype == labels.dtype
    half = SampleKeys(4, torch.arange(10_000, 20_000))
    assert torch.equal(flow.drop_labels(labels[10_000:], half, 0.1, 10), dropped[10_000:])
    assert torch.equal(flow.drop_labels(labels, keys, 0.0, 10), labels)
    assert (flow.drop_labels(labels, keys, 1.0, 10) == 10).all()


def test_the_draws_of_one_sample_are_independent():
    keys = SampleKeys(0, torch.arange(20_000))
    time = torch.logit(flow.sample_time(keys).double())
    noise = flow.sample_noise(keys, (1,))[:, 0].double()
    drop = (flow.drop_labels(torch.zeros(20_000, dtype=torch.long), keys, 0.5, 1)).double()
    correlation = torch.corrcoef(torch.stack((time, noise, drop)))
    assert (correlation - torch.eye(3)).abs().max() < 0.03
