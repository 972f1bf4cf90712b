"""How a training scales: a model of the exchange of gradients, stated in full and simple enough to be checked by hand.

A step on one GPU takes `compute` seconds, two thirds of them backward. Gradients (2 bytes each) are summed over n GPUs by
a ring: each GPU sends 2 (n - 1) / n of them over the slowest link of the ring. The exchange of a bucket starts when the
backward pass has filled it, so all but the last bucket can hide behind the backward pass. A step waits for the slowest of
n GPUs, each of which is now and then a little late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GPUS = tuple(2**power for power in range(11))
"""1 to 1024."""
BACKWARD = 2 / 3
"""The backward pass's part of a step."""
BUCKET = 25 * 2**20 // 2  # bytes on their way: DDP fills 25 MB of float32
"""Bytes that DDP exchanges at once."""
REACHED = 0.8
"""The part of a link's advertised speed that a collective reaches."""
LATENCY_INSIDE, LATENCY_BETWEEN = 5e-6, 20e-6
"""Seconds of a hop inside a machine, and between machines."""
LATENESS = 0.01
"""Standard deviation of a GPU's time for a step, as a part of it."""
PCIE = 25e9


@dataclass(frozen=True)
class Links:
    """How fast a GPU sends, in bytes per second."""

    inside: float
    between: float
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Scaling:
    """One row of the scaling table."""

    gpus: int
    exchange: float
    """Seconds that the exchange takes."""
    visible: float
    """Seconds of it that the backward pass does not hide."""
    waiting: float
    """Seconds for the slowest GPU."""
    compute: float

    @property
    def efficiency(self) -> float:
        """The part of n times one GPU's speed that n GPUs reach."""
        return self.compute / (self.compute + self.visible + self.waiting)

    @property
    def speedup(self) -> float:
        """How many times faster than one GPU."""
        return self.gpus * self.efficiency

    @property
    def communication(self) -> float:
        """The part of a step in which nothing is computed."""
        return 1 - self.efficiency


def ring_seconds(size: float, gpus: int, links: Links) -> float:
    """Seconds to sum `size` bytes over so many GPUs."""
    if gpus == 1:
        return 0.0
    here = min(gpus, links.gpus_per_node)
    nodes = -(-gpus // links.gpus_per_node)
    speed = REACHED * (links.inside if nodes == 1 else min(links.inside, links.between))
    hops = 2 * (here - 1) * LATENCY_INSIDE + 2 * math.ceil(math.log2(nodes)) * LATENCY_BETWEEN
    return 2 * (gpus - 1) / gpus * size / speed + hops


def scale(compute: float, gradients: float, gpus: int, links: Links) -> Scaling:
    """A step of `compute` seconds and so many bytes of gradients on so many GPUs."""
    exchange = ring_seconds(gradients, gpus, links)
    last = ring_seconds(min(gradients, BUCKET), gpus, links)
    hidden = BACKWARD * compute
    # The last bucket is full only when the backward pass is over.
    visible = max(last, exchange - hidden)
    waiting = compute * LATENESS * math.sqrt(2 * math.log(gpus)) if gpus > 1 else 0.0
    return Scaling(gpus, exchange, visible, waiting, compute)


def assumptions(links: Links, gradients: float, compute: float) -> str:
    """What the table rests on, for people."""
    return (
        f"A step on one GPU takes {compute * 1e3:.1f} ms, two thirds of them backward. {gradients / 1e9:.2f} GB of "
        f"gradients are summed by a ring at {REACHED:.0%} of {links.inside / 1e9:.0f} GB/s inside a machine of "
        f"{links.gpus_per_node} GPUs, and of {links.between / 1e9:g} GB/s per GPU between machines, behind the backward "
        f"pass but for the last {BUCKET >> 20} MB. A GPU's time for a step varies by {LATENESS:.0%}. Not in it: reading "
        "data, checkpoints, samples."
    )
