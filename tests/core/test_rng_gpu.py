"""Random numbers on a GPU, compiled: the same words as on a CPU, however many of them a sample draws."""

from __future__ import annotations

import pytest
import torch

from muralist.core import rng
from muralist.core.rng import Purpose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("side", [64, 256, 512])
def test_compiled_words_are_those_of_a_cpu(side: int) -> None:
    numbers, count = torch.tensor([0, 7, 1 << 40]), 3 * side * side
    compiled = torch.compile(rng.words, dynamic=False)
    found = compiled(5, int(Purpose.NOISE), numbers.cuda(), count)
    assert torch.equal(found.cpu(), rng.words(5, Purpose.NOISE, numbers, count))


def test_compiled_noise_is_that_of_a_cpu_but_for_rounding() -> None:
    numbers, shape = torch.arange(4), (3, 256, 256)
    compiled = torch.compile(rng.normal, dynamic=False)
    found = compiled(5, int(Purpose.NOISE), numbers.cuda(), shape).cpu()
    assert (found - rng.normal(5, Purpose.NOISE, numbers, shape)).abs().max() < 1e-4
