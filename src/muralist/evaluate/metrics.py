"""Metrics as functions of features, in float64.

Each returns its value and its empirical influence function: the first-order change of the value when a sample's weight
grows. A bootstrap over the influence values gives the confidence interval. (Bootstrapping the samples themselves would
not: repeated images lower the rank of a covariance, and the FID of every resampled set lies above the FID itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2048  # rows; sums are accumulated chunk by chunk, in order
_SUBSETS, _SUBSET_SIZE = 100, 1000
_MAX_NEIGHBOR_SAMPLES = 10_000
_CMMD_BANDWIDTH, _CMMD_SCALE = 10.0, 1000.0
RESAMPLES = 1000
_TAIL = 0.025  # on each side of a 95% interval
_LEAST_ROOT = 1e-7  # of an eigenvalue, as a share of the largest one: smaller ones are rounding
SPLITS = 10
NEIGHBORS = {"precision": 3, "recall": 3, "density": 5, "coverage": 5}
"""The k-th neighbor that gives each metric its radius."""
_SPLITS_SEED = 2020  # as in torch-fidelity


@dataclass(frozen=True)
class MetricEstimate:
    """A value, and its influence function at every sample of each set."""

    value: float
    influence_functions: tuple[np.ndarray, ...] = ()
    is_share: bool = False
    """Whether it is the share of samples with a property."""

    def interval(self, seed: int) -> tuple[float, float] | None:
        """Return the 95% interval; None where no samples are known, or where all are alike and show no spread."""
        if not any(np.ptp(influence) for influence in self.influence_functions):
            known = self.is_share and self.influence_functions and self.value in (0, 1)
            return self._exact_interval() if known else None
        generator = np.random.Generator(np.random.Philox(key=seed))
        deviations = np.zeros(RESAMPLES)
        for influence in self.influence_functions:
            centered = influence - influence.mean()
            for index in range(RESAMPLES):
                deviations[index] += centered[generator.integers(len(centered), size=len(centered))].mean()
        low, high = np.percentile(deviations, (2.5, 97.5))
        # Beyond the rounding of the arithmetic: an end that is 0 would come out as 1e-19.
        return round(self.value + float(low), 12) + 0.0, round(self.value + float(high), 12) + 0.0  # and -0 is 0

    def _exact_interval(self) -> tuple[float, float]:
        """Return the Clopper-Pearson interval of a share of 0 or 1, which every bootstrap sample repeats."""
        tail = _TAIL ** (1 / len(self.influence_functions[0]))
        return (tail, 1.0) if self.value else (0.0, 1 - tail)


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of features."""

    mean: np.ndarray
    covariance: np.ndarray


def compute_moments(features: np.ndarray) -> Moments:
    """Return mean and unbiased covariance, in two passes."""
    mean = sum((chunk.sum(0) for chunk in _chunks(features)), np.zeros(features.shape[1])) / len(features)
    scatter = np.zeros((features.shape[1], features.shape[1]))
    for chunk in _chunks(features):
        centered = chunk - mean
        scatter += centered.T @ centered
    return Moments(mean, scatter / (len(features) - 1))


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), _CHUNK):
        yield rows[start : start + _CHUNK].astype(np.float64)


def frechet_distance(
    fake: Moments,
    real: Moments,
    fake_rows: np.ndarray | None = None,
    real_rows: np.ndarray | None = None,
    device: str = "cpu",
) -> MetricEstimate:
    """Return the Frechet distance of two Gaussians: |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    With A^T A = S for each side, the last trace is the sum of the singular values of P = A1 A2^T: real and not
    negative, whatever the ranks. A holds the centered rows where there are fewer rows than features. One decomposition,
    P P^T = U s^2 U^T, gives the value and both influence functions, because each Gaussian is transported to the other
    by M1 = A1^+ U s U^T A1^+T and back by M2 = A1^T U s^-1 U^T A1.
    """
    factor, inverse = _factor(fake, fake_rows, device)
    product = factor @ _factor(real, real_rows, device)[0].T
    left = torch.linalg.eigh(product @ product.T)[1]
    # The norms of U^T P are exact where roots of the eigenvalues, which are squares, have lost half of their digits.
    singular = torch.linalg.vector_norm(left.T @ product, dim=1)
    offset = fake.mean - real.mean
    trace = np.trace(fake.covariance) + np.trace(real.covariance) - 2 * float(singular.sum())
    influence = []
    if fake_rows is not None:
        root = singular.sqrt()[:, None] * left.T
        if inverse is None:  # the rows are those of the factor, up to its scale
            transported = root.square().sum(0).mul(len(fake_rows) - 1).cpu().numpy()
        else:
            transported = _squared_norms(root @ inverse(), fake_rows, fake.mean)
        influence.append(_frechet_influence(fake_rows, fake.mean, offset, transported))
    if real_rows is not None:
        root = torch.where(singular > 0, singular.rsqrt(), 0)[:, None] * left.T
        transported = _squared_norms(root @ factor, real_rows, real.mean)
        influence.append(_frechet_influence(real_rows, real.mean, -offset, transported))
    return MetricEstimate(float(offset @ offset + trace), tuple(influence))


def _factor(side: Moments, rows: np.ndarray | None, device: str) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Return A with A^T A = S, and what computes the transpose of its pseudoinverse unless A holds the rows."""
    if rows is not None and len(rows) <= rows.shape[1]:
        centered = (rows.astype(np.float64) - side.mean) / np.sqrt(len(rows) - 1)
        return torch.from_numpy(centered).to(device), None
    covariance = torch.from_numpy((side.covariance + side.covariance.T) / 2).to(device)
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        identity = torch.eye(len(lower), dtype=lower.dtype, device=device)
        return lower.T, lambda: torch.linalg.solve_triangular(lower, identity, upper=False)
    values, vectors = torch.linalg.eigh(covariance)  # ten times as slow as Cholesky's, but for any rank
    roots = values.clamp(min=0).sqrt()  # eigenvalues that rounding made negative count as zero
    inverse = torch.where(roots > _LEAST_ROOT * roots.max(), 1 / roots, 0)
    return roots[:, None] * vectors.T, lambda: inverse[:, None] * vectors.T


def _squared_norms(matrix: Tensor, rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the squared length of the product of a matrix and each centered row."""
    centered = (torch.from_numpy(chunk - mean).to(matrix.device) for chunk in _chunks(rows))
    return torch.cat([(chunk @ matrix.T).square_().sum(1) for chunk in centered]).cpu().numpy()


def _frechet_influence(rows: np.ndarray, mean: np.ndarray, offset: np.ndarray, transported: np.ndarray) -> np.ndarray:
    """2 (m1 - m2)(x - m1) + |x - m1|^2 - (x - m1)^T M1 (x - m1), of which the last product is `transported`."""
    parts = []
    for chunk in _chunks(rows):
        centered = chunk - mean
        parts.append((centered @ offset, np.einsum("nd,nd->n", centered, centered)))
    shift, spread = (np.concatenate(part) for part in zip(*parts, strict=True))
    return 2 * shift + (spread - transported) * len(rows) / (len(rows) - 1)


def kid(fake: np.ndarray, real: np.ndarray, seed: int, device: str = "cpu") -> MetricEstimate:
    """Return the Kernel Inception Distance: the unbiased squared MMD with kernel (x y / d + 1)^3, mean of 100 subsets.

    Subsets have 1,000 samples, or as many as the smaller set; two small sets of one size are compared once, in full.
    """
    size = min(_SUBSET_SIZE, len(fake), len(real))
    subsets = 1 if size == len(fake) == len(real) else _SUBSETS
    both = [torch.from_numpy(rows).to(device) for rows in (fake, real)]
    values = []
    influence: tuple[np.ndarray, ...] = ()
    for subset in range(subsets):
        generator = np.random.Generator(np.random.Philox(key=(seed << 32) + subset))
        chosen = [torch.from_numpy(np.sort(generator.permutation(len(rows))[:size])) for rows in both]
        x, y = (rows[indices.to(device)].double() for rows, indices in zip(both, chosen, strict=True))
        within_x, within_y, across = _cubic(x, x).fill_diagonal_(0), _cubic(y, y).fill_diagonal_(0), _cubic(x, y)
        values.append(float((within_x.sum() + within_y.sum()) / (size * (size - 1)) - 2 * across.mean()))
        if subset == 0:
            influence_x = 2 * (within_x.sum(1) / (size - 1) - across.mean(1)).cpu().numpy()
            influence_y = 2 * (within_y.sum(1) / (size - 1) - across.mean(0)).cpu().numpy()
            influence = (_rescale(influence_x, len(fake)), _rescale(influence_y, len(real)))
    return MetricEstimate(float(np.mean(values)), influence)


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    base = x @ y.T / x.shape[1] + 1
    return base * base * base


def _rescale(influence: np.ndarray, count: int) -> np.ndarray:
    """Scale influence values of a subset so that their mean varies as that of all `count` samples does."""
    centered = influence - influence.mean()
    return centered * np.sqrt(len(influence) / count)


def neighbor_metrics(
    fake: np.ndarray, real: np.ndarray, seed: int, device: str = "cpu"
) -> tuple[dict[str, MetricEstimate], tuple[int, int]]:
    """Return precision and recall, k = 3 (Kynkaanniemi et al. 2019), density and coverage, k = 5 (Naeem et al. 2020).

    Larger sets are subsampled to 10,000; also returns how many samples of each set are used.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    x, y = (_subsample(rows, generator, device) for rows in (fake, real))
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
    found = {"precision": inside_real, "recall": inside_fake, "density": balls, "coverage": covered}
    estimates = {
        name: mean_estimate(values.double().cpu().numpy(), is_share=name != "density") for name, values in found.items()
    }
    return estimates, (len(x), len(y))


def _subsample(rows: np.ndarray, generator: np.random.Generator, device: str) -> Tensor:
    if len(rows) > _MAX_NEIGHBOR_SAMPLES:
        rows = rows[np.sort(generator.permutation(len(rows))[:_MAX_NEIGHBOR_SAMPLES])]
    return torch.from_numpy(rows.astype(np.float64)).to(device)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Return squared distances, clamped: rounding must not hide that two samples are equal."""
    return ((x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T).clamp_min_(0)


def _radii(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distance of each sample to its third and fifth nearest neighbor."""
    found = []
    for start in range(0, len(x), _CHUNK):
        distances = _distances(x[start : start + _CHUNK], x)
        distances[torch.arange(len(distances)), torch.arange(start, start + len(distances))] = -1
        found.append(distances.topk(min(6, len(x)), largest=False).values)
    nearest = torch.cat(found)
    last = nearest.shape[1] - 1
    return nearest[:, min(3, last)], nearest[:, min(5, last)]


def mean_estimate(values: np.ndarray, is_share: bool = False) -> MetricEstimate:
    """Estimate a mean: the influence of a sample is its value."""
    return MetricEstimate(float(values.mean()), (values,), is_share)


def cmmd(fake: np.ndarray, real: np.ndarray, device: str = "cpu") -> MetricEstimate:
    """Return CMMD (Jayasumana et al. 2024): 1,000 times the squared MMD of normalized CLIP embeddings, Gaussian kernel.

    The kernel has width 10; as in the published code, the similarity of a sample to itself counts.
    """
    x, y = (torch.from_numpy(rows.astype(np.float64)).to(device) for rows in (fake, real))
    x_to_x, x_to_y, y_to_y, y_to_x = (_similarity(one, other) for one, other in ((x, x), (x, y), (y, y), (y, x)))
    value = x_to_x.mean() + y_to_y.mean() - 2 * x_to_y.mean()
    influence = (2 * _CMMD_SCALE * (x_to_x - x_to_y), 2 * _CMMD_SCALE * (y_to_y - y_to_x))
    return MetricEstimate(float(_CMMD_SCALE * value), influence)


def _similarity(x: Tensor, y: Tensor) -> np.ndarray:
    """Return the mean kernel value of each x with all y."""
    gamma = 1 / (2 * _CMMD_BANDWIDTH**2)
    found = [torch.exp(-gamma * _distances(x[start : start + _CHUNK], y)).mean(1) for start in range(0, len(x), _CHUNK)]
    return torch.cat(found).cpu().numpy()


def inception_score(features: np.ndarray, classifier: np.ndarray) -> MetricEstimate:
    """Return exp E KL(p(class | x) || p(class)), the mean over 10 shuffled splits (Salimans et al. 2016).

    As in torch-fidelity: logits without the classifier's bias, and its shuffling. The influence of a sample on the
    logarithm is its own KL: p(class) changes too, but the KL is minimal there, so that change is of second order.
    """
    count = len(features)
    order = np.random.RandomState(_SPLITS_SEED).permutation(count)
    values, influence = [], np.empty(count)
    for split in range(SPLITS):
        part = order[split * count // SPLITS : (split + 1) * count // SPLITS]
        logits = torch.from_numpy(features[part].astype(np.float64) @ classifier.astype(np.float64).T)
        probability, log_probability = logits.softmax(1), logits.log_softmax(1)
        # logsumexp instead of log of the mean probability, which may underflow to 0.
        log_marginal = log_probability.logsumexp(0) - np.log(len(part))
        divergence = (probability * (log_probability - log_marginal)).sum(1).numpy()
        values.append(float(np.exp(divergence.mean())))
        influence[part] = values[-1] * (divergence - divergence.mean()) * count / (SPLITS * len(part))
    return MetricEstimate(float(np.mean(values)), (influence,))


def clip_scores(images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return 100 times the cosine of each image's and its prompt's embedding, at least 0."""
    return 100 * np.einsum("nd,nd->n", images.astype(np.float64), texts.astype(np.float64)).clip(0)


def paired_distances(images: np.ndarray, originals: np.ndarray) -> tuple[float, float]:
    """Return the mean feature distance of each image to its original, and that of two different originals."""
    x, y = images.astype(np.float64), originals.astype(np.float64)
    paired = np.linalg.norm(x - y, axis=1).mean()
    unpaired = np.linalg.norm(y[:, None] - y[None], axis=2).sum() / max(1, len(y) * (len(y) - 1))
    return float(paired), float(unpaired)
