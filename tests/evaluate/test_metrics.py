"""Metrics against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muralist.evaluate import metrics
from muralist.evaluate.metrics import (
    Moments,
    cmmd,
    compute_moments,
    frechet_distance,
    inception_score,
    kid,
    mean_estimate,
    neighbor_metrics,
)


def gaussian(count: int, width: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(shift, scale, (count, width)).astype(np.float32)


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.floats(0, 5)] * 4), min_size=1, max_size=8), st.integers(0, 99))
def test_frechet_of_gaussians_with_common_axes(axes: list[tuple[float, float, float, float]], seed: int) -> None:
    """Where covariances commute, the distance is the sum of (m1 - m2)^2 + (s1 - s2)^2 over the axes."""
    mean_1, mean_2, deviation_1, deviation_2 = np.array(axes).T
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(axes), len(axes))))
    one = Moments(turn @ mean_1, turn @ np.diag(deviation_1**2) @ turn.T)
    two = Moments(turn @ mean_2, turn @ np.diag(deviation_2**2) @ turn.T)
    expected = ((mean_1 - mean_2) ** 2).sum() + ((deviation_1 - deviation_2) ** 2).sum()
    assert frechet_distance(one, two).value == pytest.approx(expected, abs=1e-5)


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 999))
def test_frechet_distance_by_rows_equals_that_by_covariances(fakes: int, reals: int, seed: int) -> None:
    """Few rows or many, singular covariances or not."""
    x, y = gaussian(fakes, 6, seed), gaussian(reals, 6, seed + 1, 0.5, 2.0)
    by_rows = frechet_distance(compute_moments(x), compute_moments(y), x, y)
    assert by_rows.value == pytest.approx(frechet_distance(compute_moments(x), compute_moments(y)).value, abs=1e-6)
    assert frechet_distance(compute_moments(x), compute_moments(x), x, x).value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("flat", [0, 3], ids=["full rank", "constant features"])
def test_frechet_distance_equals_its_definition(flat: int) -> None:
    """The trace of (S1 S2)^(1/2) is the sum of the roots of the eigenvalues of S1 S2, which have no axes in common."""
    x, y = gaussian(300, 12, 0) @ gaussian(12, 12, 1), gaussian(200, 12, 2, 0.2) @ gaussian(12, 12, 3)
    x[:, :flat] = y[:, :flat] = 1
    one, two = np.cov(x.astype(np.float64).T), np.cov(y.astype(np.float64).T)
    root = np.sqrt(np.linalg.eigvals(one @ two).real.clip(0)).sum()
    offset = x.astype(np.float64).mean(0) - y.astype(np.float64).mean(0)
    expected = offset @ offset + np.trace(one) + np.trace(two) - 2 * root
    found = frechet_distance(compute_moments(x), compute_moments(y), x, y)
    assert found.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("fakes", "reals"), [(300, 400), (15, 400), (300, 15), (15, 12)])
def test_the_two_sides_of_the_frechet_distance_are_alike(fakes: int, reals: int) -> None:
    """Which side is factored is a matter of arithmetic: swapped sides have swapped influence functions."""
    x, y = gaussian(fakes, 20, 1), gaussian(reals, 20, 2, 0.3, 1.5)
    moments = compute_moments(x), compute_moments(y)
    there, back = frechet_distance(*moments, x, y), frechet_distance(*moments[::-1], y, x)
    assert there.value == pytest.approx(back.value, rel=1e-9)
    for one, other in zip(there.influence_functions, back.influence_functions[::-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_moments_equal_numpy() -> None:
    x = gaussian(5000, 7, 0, 3.0)
    found = compute_moments(x)
    np.testing.assert_allclose(found.mean, x.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [12, 300])
def test_the_influence_function_is_the_derivative(count: int) -> None:
    """Finite differences in one sample's weight, with fewer rows than features and with more."""
    x, y = gaussian(count, 20, 1), gaussian(400, 20, 2, 0.3, 1.5)
    influence = frechet_distance(compute_moments(x), compute_moments(y), x, y).influence_functions[0]
    influence = influence - influence.mean()
    rows, step = x.astype(np.float64), 1e-5
    for index in range(3):
        values = []
        for sign in (1, -1):
            weights = np.full(count, (1 - sign * step) / count)
            weights[index] += sign * step
            mean = weights @ rows
            centred = rows - mean
            covariance = (centred * weights[:, None]).T @ centred * count / (count - 1)
            values.append(frechet_distance(Moments(mean, covariance), compute_moments(y)).value)
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(influence[index], rel=0.02, abs=0.02)


def _first(estimate: metrics.MetricEstimate) -> metrics.MetricEstimate:
    """Only what the first set adds to the scatter."""
    return metrics.MetricEstimate(estimate.value, estimate.influence_functions[:1])


def test_intervals_match_the_spread_of_new_samples() -> None:
    y = gaussian(300, 8, 99, 0.5)
    for measure in (
        lambda x: frechet_distance(compute_moments(x), compute_moments(y), x, None),
        lambda x: _first(kid(x, y, 0)),
        lambda x: mean_estimate(x[:, 0].astype(np.float64)),
        lambda x: inception_score(x, gaussian(5, 8, 98)),
    ):
        drawn = [measure(gaussian(300, 8, seed)) for seed in range(40)]
        scatter = np.std([estimate.value for estimate in drawn])
        low, high = drawn[0].interval(0) or (0, 0)
        assert low < drawn[0].value < high
        assert 0.6 < (high - low) / (2 * 1.96 * scatter) < 1.6


def test_the_interval_of_a_share_of_none_or_all_is_exact() -> None:
    """Clopper-Pearson: the share whose 10 draws are all successes in 2.5% of all cases."""
    low, high = mean_estimate(np.ones(10), is_share=True).interval(0) or (0, 0)
    assert high == 1 and low**10 == pytest.approx(0.025)
    assert mean_estimate(np.zeros(10), is_share=True).interval(0) == (0.0, pytest.approx(1 - low))
    some = np.r_[1.0, np.zeros(9)]
    ends = mean_estimate(some, is_share=True).interval(0) or (1, 0)
    assert ends == mean_estimate(some).interval(0) and str(ends[0]) == "0.0", "not -0.0"


def test_kid_by_hand_and_unbiased() -> None:
    x, y = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 1.0], [2.0, 0.0]])
    kernel = lambda a, b: (a @ b / 2 + 1) ** 3  # noqa: E731
    across = np.mean([kernel(a, b) for a in x for b in y])
    assert kid(x, y, 0).value == pytest.approx(kernel(x[0], x[1]) + kernel(y[0], y[1]) - 2 * across)
    values = [kid(gaussian(40, 5, 2 * seed), gaussian(40, 5, 2 * seed + 1), 0).value for seed in range(200)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(200)
    x, y = gaussian(150, 5, 0), gaussian(120, 5, 1, 0.5)
    assert kid(x, y, 3).value == kid(x, y, 3).value != kid(x, y, 4).value


def test_neighbor_metrics_on_a_line() -> None:
    real = np.arange(10, dtype=np.float32)[:, None]
    inside = real[2:8] + 0.1
    found, counts = neighbor_metrics(inside, real, 0)
    assert (found["precision"].value, found["coverage"].value, counts) == (1.0, 1.0, (6, 10))
    # 5th neighbors of 0..9 lie 5 4 3 3 3 3 3 3 4 5 away; of the fakes, balls of the reals hold these.
    radii = np.array([5, 4, 3, 3, 3, 3, 3, 3, 4, 5])
    balls = (np.abs(inside - real.T) <= radii).sum(1) / 5
    assert found["density"].value == pytest.approx(balls.mean())
    far, _ = neighbor_metrics(real + 100, real, 0)
    assert {name: estimate.value for name, estimate in far.items()} == dict.fromkeys(found, 0)
    one_place, _ = neighbor_metrics(np.full((10, 1), 4.0, np.float32), real, 0)
    assert (one_place["precision"].value, one_place["recall"].value) == (1.0, 0.1)  # one mode: good, but only one


def test_cmmd_by_hand() -> None:
    x = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    y = np.array([[-1.0, 0.0], [0.0, 1.0]], np.float32)
    near, far = np.exp(-2 / 200), np.exp(-4 / 200)
    expected = 1000 * (2 * (1 + near) / 2 - 2 * (far + near + near + 1) / 4)
    assert cmmd(x, y).value == pytest.approx(expected)
    assert cmmd(x, x).value == pytest.approx(0, abs=1e-9)


def test_inception_score_by_hand() -> None:
    """Salimans' definition, one image and one class at a time, in torch-fidelity's parts."""
    features, classifier = gaussian(43, 6, 0), gaussian(9, 6, 1)
    order = np.random.RandomState(2020).permutation(43)
    scores = []
    for part in range(10):
        chosen = order[part * 43 // 10 : (part + 1) * 43 // 10]
        shares = []
        for index in chosen:
            powers = [float(np.exp(np.dot(row.astype(float), features[index].astype(float)))) for row in classifier]
            shares.append([power / sum(powers) for power in powers])
        whole = [sum(share[k] for share in shares) / len(shares) for k in range(9)]
        divergences = [sum(p * np.log(p / q) for p, q in zip(share, whole, strict=True)) for share in shares]
        scores.append(np.exp(sum(divergences) / len(divergences)))
    found = inception_score(features, classifier)
    assert found.value == pytest.approx(np.mean(scores), rel=1e-12)
    # Ten classes, of each of which it is sure, equally often in every part: 10. Always the same class: 1.
    sure = np.eye(10, dtype=np.float32)
    parts = np.empty(100, int)
    parts[np.random.RandomState(2020).permutation(100)] = np.tile(np.arange(10), 10)
    assert inception_score(1000 * sure[parts], sure).value == pytest.approx(10)
    assert inception_score(np.repeat(1000 * sure[:1], 20, 0), sure).value == pytest.approx(1)


def test_clip_scores_are_cosines_not_below_zero() -> None:
    images = np.array([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]], np.float32)
    texts = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], np.float32)
    assert metrics.clip_scores(images, texts) == pytest.approx([100, 60, 0], abs=1e-4)
    assert mean_estimate(np.zeros(3)).interval(0) is None, "three equal values show no spread"
    assert frechet_distance(compute_moments(images), compute_moments(texts)).interval(0) is None
