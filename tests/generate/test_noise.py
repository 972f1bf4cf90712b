"""A seed's noise is the same numbers whatever draws it."""

from __future__ import annotations

import sys

import pytest
import torch
from diffusers.pipelines.stable_diffusion import pipeline_stable_diffusion
from diffusers.schedulers import scheduling_ddpm
from diffusers.utils.torch_utils import randn_tensor

from muralist.generate.noise import own_noise


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_float32_noise_is_that_of_diffusers_and_rougher_noise_is_that_rounded() -> None:
    shape = (2, 4, 8, 8)
    expected = randn_tensor(shape, generator=generators(3, 4))
    with own_noise([]):
        drawn = pipeline_stable_diffusion.randn_tensor(shape, generator=generators(3, 4))
        half = scheduling_ddpm.randn_tensor(shape, generator=generators(3, 4), dtype=torch.bfloat16)
        alone = scheduling_ddpm.randn_tensor((1, 4, 8, 8), generator=generators(4)[0])
    assert torch.equal(drawn, expected)
    assert torch.equal(half, expected.to(torch.bfloat16))
    assert torch.equal(alone[0], expected[1])


def test_where_no_generator_is_handed_on_the_pictures_own_are_used() -> None:
    with own_noise(generators(3, 4)):
        drawn = scheduling_ddpm.randn_tensor((2, 5))
    assert torch.equal(drawn, randn_tensor((2, 5), generator=generators(3, 4)))


def test_diffusers_is_left_as_it_was() -> None:
    with pytest.raises(KeyError), own_noise([]):
        assert scheduling_ddpm.randn_tensor is not randn_tensor
        raise KeyError
    users = [module for name, module in sys.modules.items() if name.startswith("diffusers")]
    assert {vars(module).get("randn_tensor", randn_tensor) for module in users} == {randn_tensor}
