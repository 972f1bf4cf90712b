"""The numbers: functions of features, all in float64.

Each returns its value and, for the interval around it, the influence of every sample: by how much the value moves, to first
order, when that sample weighs more. A bootstrap of the influences gives the interval. (Resampled sets would not: pictures
that occur twice lower the rank of a covariance, and every FID of a resampled set lies above the FID itself.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2048  # rows at once; sums are taken chunk by chunk, in order
_SUBSETS, _SUBSET_SIZE = 100, 1000
_MOST_NEIGHBOURS = 10_000
_CMMD_BANDWIDTH, _CMMD_SCALE = 10.0, 1000.0
RESAMPLES = 1000
SPLITS = 10
_SPLITS_KEY = 2020  # torch-fidelity's


@dataclass(frozen=True)
class Estimate:
    """A value, and the influence of each sample of each set that it was estimated from."""

    value: float
    influences: tuple[np.ndarray, ...] = ()

    def interval(self, seed: int) -> tuple[float, float] | None:
        """95%: percentiles of a bootstrap over the influences; None where nothing is known of the samples."""
        if not self.influences:
            return None
        generator = np.random.Generator(np.random.Philox(key=seed))
        moved = np.zeros(RESAMPLES)
        for influence in self.influences:
            centred = influence - influence.mean()
            for index in range(RESAMPLES):
                moved[index] += centred[generator.integers(len(centred), size=len(centred))].mean()
        low, high = np.percentile(moved, (2.5, 97.5))
        # Rounded where the arithmetic itself is: an end that is 0 would come out as 1e-19.
        return round(self.value + float(low), 12), round(self.value + float(high), 12)


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of features, which is all that FID needs."""

    mean: np.ndarray
    covariance: np.ndarray


def moments(features: np.ndarray) -> Moments:
    """Mean and unbiased covariance, in two passes."""
    mean = sum((chunk.sum(0) for chunk in _chunks(features)), np.zeros(features.shape[1])) / len(features)
    scatter = np.zeros((features.shape[1], features.shape[1]))
    for chunk in _chunks(features):
        centred = chunk - mean
        scatter += centred.T @ centred
    return Moments(mean, scatter / (len(features) - 1))


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), _CHUNK):
        yield rows[start : start + _CHUNK].astype(np.float64)


def frechet(
    fake: Moments, real: Moments, fake_rows: np.ndarray | None = None, real_rows: np.ndarray | None = None
) -> Estimate:
    """Frechet distance of two Gaussians: |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    With A^T A = S for each side, the last trace is the sum of the singular values of A1 A2^T: those are real and not
    negative, whatever the ranks. Where the rows are given, A is the rows themselves if they are fewer than their numbers.
    """
    one, two = _factor(fake, fake_rows), _factor(real, real_rows)
    product = one @ two.T
    trace = float(torch.linalg.svdvals(torch.from_numpy(product)).sum())
    apart = fake.mean - real.mean
    value = float(apart @ apart + np.trace(fake.covariance) + np.trace(real.covariance) - 2 * trace)
    influences = []
    if fake_rows is not None:
        influences.append(_frechet_influence(fake_rows, fake, one, product, apart))
    if real_rows is not None:
        influences.append(_frechet_influence(real_rows, real, two, product.T, -apart))
    return Estimate(value, tuple(influences))


def _factor(side: Moments, rows: np.ndarray | None) -> np.ndarray:
    if rows is not None and len(rows) <= rows.shape[1]:
        return (rows.astype(np.float64) - side.mean) / np.sqrt(len(rows) - 1)
    return _root(side.covariance)


def _root(matrix: np.ndarray) -> np.ndarray:
    """Symmetric square root by eigenvalues; those that rounding made negative are zero."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


def _frechet_influence(
    rows: np.ndarray, side: Moments, factor: np.ndarray, product: np.ndarray, apart: np.ndarray
) -> np.ndarray:
    """2 (m1 - m2)(x - m1) + |x - m1|^2 - (x - m1)^T M (x - m1), where M carries one Gaussian to the other."""
    middle = _root(product @ product.T)  # factor M factor^T
    if len(rows) <= rows.shape[1]:
        moved = np.diag(middle) * (len(rows) - 1)
        back = None
    else:
        inverse = np.linalg.pinv(factor, rcond=1e-7, hermitian=True)
        back = inverse @ middle @ inverse
        moved = np.zeros(len(rows))
    influence = np.empty(len(rows))
    start = 0
    for chunk in _chunks(rows):
        centred = chunk - side.mean
        part = slice(start, start + len(chunk))
        if back is not None:
            moved[part] = np.einsum("nd,nd->n", centred @ back, centred)
        spread = np.einsum("nd,nd->n", centred, centred) - moved[part]
        influence[part] = 2 * centred @ apart + spread * len(rows) / (len(rows) - 1)
        start += len(chunk)
    return influence


def kid(fake: np.ndarray, real: np.ndarray, seed: int, device: str = "cpu") -> Estimate:
    """Kernel distance: the unbiased squared MMD with the kernel (x y / d + 1)^3, the mean of 100 subsets of 1,000.

    Where a set has no more than 1,000 samples, subsets of the smaller set's size are drawn from the larger; two such
    sets of one size are compared whole, once.
    """
    size = min(_SUBSET_SIZE, len(fake), len(real))
    subsets = 1 if size == len(fake) == len(real) else _SUBSETS
    values = []
    influences: tuple[np.ndarray, ...] = ()
    for subset in range(subsets):
        generator = np.random.Generator(np.random.Philox(key=(seed << 32) + subset))
        chosen = (rows[np.sort(generator.permutation(len(rows))[:size])] for rows in (fake, real))
        x, y = (torch.from_numpy(rows.astype(np.float64)).to(device) for rows in chosen)
        within_x, within_y, across = _cubic(x, x).fill_diagonal_(0), _cubic(y, y).fill_diagonal_(0), _cubic(x, y)
        values.append(float((within_x.sum() + within_y.sum()) / (size * (size - 1)) - 2 * across.mean()))
        if subset == 0:
            toward_x = 2 * (within_x.sum(1) / (size - 1) - across.mean(1)).cpu().numpy()
            toward_y = 2 * (within_y.sum(1) / (size - 1) - across.mean(0)).cpu().numpy()
            influences = (_for_more(toward_x, len(fake)), _for_more(toward_y, len(real)))
    return Estimate(float(np.mean(values)), influences)


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    base = x @ y.T / x.shape[1] + 1
    return base * base * base


def _for_more(influence: np.ndarray, count: int) -> np.ndarray:
    """Influences of a subset, shrunk so that their mean varies as that of all `count` samples does."""
    centred = influence - influence.mean()
    return centred * np.sqrt(len(influence) / count)


@dataclass(frozen=True)
class Neighbourhood:
    """How two sets lie among each other's nearest neighbours."""

    precision: Estimate
    recall: Estimate
    density: Estimate
    coverage: Estimate
    used: tuple[int, int]


def neighbourhood(fake: np.ndarray, real: np.ndarray, seed: int, device: str = "cpu") -> Neighbourhood:
    """Precision and recall with k = 3 (Kynkaanniemi et al. 2019), density and coverage with k = 5 (Naeem et al. 2020).

    Of sets beyond 10,000 samples, that many are drawn.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    x, y = (_at_most(rows, generator, device) for rows in (fake, real))
    three_x, _ = _radii(x)
    three_y, five_y = _radii(y)
    inside_real = torch.zeros(len(x), dtype=torch.bool, device=device)
    inside_fake = torch.zeros(len(y), dtype=torch.bool, device=device)
    balls = torch.zeros(len(x), dtype=torch.float64, device=device)
    nearest_fake = torch.full((len(y),), torch.inf, dtype=torch.float64, device=device)
    for start in range(0, len(x), _CHUNK):
        part = slice(start, start + _CHUNK)
        distances = _distances(x[part], y)
        inside_real[part] = (distances <= three_y).any(1)
        inside_fake |= (distances <= three_x[part, None]).any(0)
        balls[part] = (distances <= five_y).sum(1).double() / 5
        nearest_fake = torch.minimum(nearest_fake, distances.amin(0))
    covered = nearest_fake <= five_y
    return Neighbourhood(_mean(inside_real), _mean(inside_fake), _mean(balls), _mean(covered), (len(x), len(y)))


def _at_most(rows: np.ndarray, generator: np.random.Generator, device: str) -> Tensor:
    if len(rows) > _MOST_NEIGHBOURS:
        rows = rows[np.sort(generator.permutation(len(rows))[:_MOST_NEIGHBOURS])]
    return torch.from_numpy(rows.astype(np.float64)).to(device)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared; a little below zero where rounding makes it so, which must not hide that two samples are the same."""
    return ((x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T).clamp_min_(0)


def _radii(x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance of each sample to its third and its fifth neighbour, itself not counted."""
    found = []
    for start in range(0, len(x), _CHUNK):
        distances = _distances(x[start : start + _CHUNK], x)
        distances[torch.arange(len(distances)), torch.arange(start, start + len(distances))] = -1
        found.append(distances.topk(min(6, len(x)), largest=False).values)
    nearest = torch.cat(found)
    last = nearest.shape[1] - 1
    return nearest[:, min(3, last)], nearest[:, min(5, last)]


def _mean(values: Tensor) -> Estimate:
    return mean_of(values.double().cpu().numpy())


def mean_of(values: np.ndarray) -> Estimate:
    """A mean, each sample of which is its own influence."""
    return Estimate(float(values.mean()), (values,))


def cmmd(fake: np.ndarray, real: np.ndarray, device: str = "cpu") -> Estimate:
    """1,000 times the squared MMD of CLIP embeddings of length 1, with a Gaussian kernel of width 10 (Jayasumana et al.).

    As in the published code, a sample's similarity to itself counts.
    """
    x, y = (torch.from_numpy(rows.astype(np.float64)).to(device) for rows in (fake, real))
    x_to_x, x_to_y, y_to_y, y_to_x = (_similarity(one, other) for one, other in ((x, x), (x, y), (y, y), (y, x)))
    value = x_to_x.mean() + y_to_y.mean() - 2 * x_to_y.mean()
    influences = (2 * _CMMD_SCALE * (x_to_x - x_to_y), 2 * _CMMD_SCALE * (y_to_y - y_to_x))
    return Estimate(float(_CMMD_SCALE * value), influences)


def _similarity(x: Tensor, y: Tensor) -> np.ndarray:
    """Mean kernel of each x with all y."""
    gamma = 1 / (2 * _CMMD_BANDWIDTH**2)
    found = [torch.exp(-gamma * _distances(x[start : start + _CHUNK], y)).mean(1) for start in range(0, len(x), _CHUNK)]
    return torch.cat(found).cpu().numpy()


def inception_score(features: np.ndarray, classifier: np.ndarray) -> Estimate:
    """exp E KL(p(class | x) || p(class)), the mean of 10 parts of the shuffled samples (Salimans et al. 2016).

    As torch-fidelity does it: logits without the classifier's bias, and its order of shuffling. What a sample adds to the
    logarithm is its own KL: p(class) moves as well, but the KL is at its least there.
    """
    count = len(features)
    order = np.random.RandomState(_SPLITS_KEY).permutation(count)
    values, influence = [], np.empty(count)
    for split in range(SPLITS):
        part = order[split * count // SPLITS : (split + 1) * count // SPLITS]
        logits = torch.from_numpy(features[part].astype(np.float64) @ classifier.astype(np.float64).T)
        share, logarithm = logits.softmax(1), logits.log_softmax(1)
        # Not the logarithm of the mean share, which is 0 where a class is out of the question.
        average = logarithm.logsumexp(0) - np.log(len(part))
        divergence = (share * (logarithm - average)).sum(1).numpy()
        values.append(float(np.exp(divergence.mean())))
        influence[part] = values[-1] * (divergence - divergence.mean()) * count / (SPLITS * len(part))
    return Estimate(float(np.mean(values)), (influence,))


def clip_scores(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """100 times the cosine between each picture's and its prompt's embedding, at least 0."""
    return 100 * np.einsum("nd,nd->n", images.astype(np.float64), texts.astype(np.float64)).clip(0)
