"""The settings of `muralist estimate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from muralist.settings.section import Section


class EstimateSettings(Section):
    """muralist estimate: how long a training takes, what it costs, how it scales and what fits, from a measured speed."""

    source: str = "probe"
    """A run's folder, a file of bench/results, or probe: real training steps on this machine for --seconds."""
    model: str | None = None
    """JiT-B/4 and so on; default: the model that was measured. Another one is taken to reach the same part of the GPU's
    speed."""
    img_size: PositiveInt | None = None
    """Side of the images; default: as measured."""
    batch_size: PositiveInt | None = None
    """Images per GPU and step; default: as measured."""
    gpus: PositiveInt = 8
    """How many GPUs."""
    tokens: list[str] = ["1T", "10B"]
    """Token budgets: 10B, 1T, 5e9. A token is an image patch."""
    images: list[str] = []
    """Image budgets instead: 300M, 1.2B."""
    price: PositiveFloat | None = None
    """Price of a GPU hour, in any currency."""
    watts: PositiveFloat | None = None
    """Power of a GPU under load; default: the card's limit, where it is known."""
    memory: PositiveFloat | None = None
    """Memory of a GPU in GB; default: the card's, where it is known, else 80."""
    gpus_per_node: PositiveInt = 8
    """GPUs that share the fast link inside a machine."""
    link: PositiveFloat | None = None
    """GB/s that a GPU sends inside a machine; default: the card's NVLink, where it is known, else PCIe 4's 25."""
    network: PositiveFloat = 400.0
    """Gbit/s that a GPU sends to other machines: 400 and 200 are InfiniBand's, 25 a 200 Gbit/s Ethernet card for eight."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long the probe takes."""
    plot: str | None = None
    """Write the scaling curve: a page of its own (FILE.html) or a picture (FILE.svg)."""


ESTIMATE_FLAT_NAMES = {"from": "source"}
"""`from` is a word of Python's."""
