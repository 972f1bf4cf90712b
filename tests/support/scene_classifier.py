"""A small network that says which of the eight driving scenes a image shows, also when it is blurred or noisy."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muralist.demo.driving_world import PROMPTS, draw_scene

BATCH = 64
# Training scenes come from a seed of their own, so that no scene of the data set proper has been seen.
SCENE_SEED = 1_000_003


def scenes(numbers: range, img_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw scenes of all kinds in turn: uint8 [N, H, W, 3] and their kinds."""
    drawn = [draw_scene(number % 8, number // 8, img_size, seed) for number in numbers]
    return torch.from_numpy(np.stack(drawn)), torch.tensor([number % 8 for number in numbers])


def _network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    # A 2 x 2 pool keeps "above" and "below" apart, which is most of what tells the scenes apart.
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 128, len(PROMPTS))
    )


def _spoil(images_NCHW: Tensor, draw: torch.Generator) -> Tensor:
    """Flip, shift, tint, blur and add noise, so that the images of a half-trained model are recognized too."""
    count, _, size, _ = images_NCHW.shape
    flipped = torch.rand(count, 1, 1, 1, generator=draw) < 0.5
    images = torch.where(flipped, images_NCHW.flip(3), images_NCHW)
    reach = max(1, size // 16)
    down, right = (int(torch.randint(-reach, reach + 1, (), generator=draw)) for _ in range(2))
    images = F.pad(images, (reach,) * 4, mode="replicate")
    images = images[:, :, reach + down : reach + down + size, reach + right : reach + right + size]
    images = images * (1 + 0.15 * torch.randn(count, 3, 1, 1, generator=draw))
    images = images + 0.1 * torch.randn(count, 3, 1, 1, generator=draw)
    for _ in range(int(torch.randint(3, (), generator=draw))):
        images = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    strength = 0.25 * torch.rand(count, 1, 1, 1, generator=draw)
    return images + strength * torch.randn(images.shape, generator=draw)


def _prepare(images_NHWC: Tensor) -> Tensor:
    return images_NHWC.permute(0, 3, 1, 2).float() / 127.5 - 1.0


class SceneClassifier:
    """Maps images, uint8 [N, H, W, 3], to their kinds, int64 [N]."""

    def __init__(self, network: nn.Sequential) -> None:
        self._network = network.eval()

    @torch.no_grad()
    def __call__(self, images_NHWC: Tensor) -> Tensor:
        return torch.cat([self._network(_prepare(part)).argmax(1) for part in images_NHWC.split(256)])

    @torch.no_grad()
    def features(self, images_NHWC: Tensor) -> Tensor:
        """The inputs of the last layer, float64 [N, D]."""
        return torch.cat([self._network[:-1](_prepare(part)) for part in images_NHWC.split(256)]).double()


def kernel_distance(one: Tensor, kinds: Tensor, other: Tensor, other_kinds: Tensor) -> float:
    """The mean over the kinds of the KID of two sets of features; of both together it would be biased.

    KID is the unbiased squared MMD with the cubic kernel (Binkowski et al. 2018). Its samples must be independent, and
    sets with as many of each kind are so within a kind only.
    """

    def mean(x: Tensor, y: Tensor) -> Tensor:
        kernel = (x @ y.T / x.shape[1] + 1) ** 3
        return kernel.mean() if x is not y else (kernel.sum() - kernel.trace()) / (len(x) * (len(x) - 1))

    pairs = [(one[kinds == kind], other[other_kinds == kind]) for kind in kinds.unique()]
    return float(torch.stack([mean(x, x) + mean(y, y) - 2 * mean(x, y) for x, y in pairs]).mean())


def train_classifier(img_size: int, samples: int, steps: int, seed: int) -> SceneClassifier:
    """Train on freshly drawn scenes."""
    images, kinds = scenes(range(samples), img_size, SCENE_SEED + seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network()
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
        for _ in range(steps):
            chosen = torch.randint(samples, (BATCH,), generator=draw)
            loss = F.cross_entropy(network(_spoil(_prepare(images[chosen]), draw)), kinds[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return SceneClassifier(network)
