"""Products in 8 bits: near the exact ones, each row by itself, and exact again when asked."""

from __future__ import annotations

import torch
from torch import nn

from muralist.generate.fp8 import Fp8Linear, exactly, use_fp8
from muralist.models.fp8_products import can_fp8, rounded


def test_a_row_has_its_own_scale_and_loses_little() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).bfloat16().requires_grad_(False)
    in_8_bits = Fp8Linear(layer)
    rows = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    whole = in_8_bits(rows)
    off = (whole - layer(rows)).float().norm() / layer(rows).float().norm()
    assert 0.005 < off < 0.06
    louder = torch.cat([rows[:1], 1000 * rows[1:]])  # a scale for all would drown the first
    assert torch.equal(in_8_bits(louder)[:1], whole[:1])
    with exactly([in_8_bits]):
        assert torch.equal(in_8_bits(rows), layer(rows))
    assert torch.equal(in_8_bits(rows), whole)


def test_rounding_of_zeros_and_of_the_largest() -> None:
    values, scale = rounded(torch.tensor([[0.0, 0.0], [3.0, -6.0]]))
    assert torch.equal(values.float(), torch.tensor([[0.0, 0.0], [224.0, -448.0]]))
    assert torch.allclose(values.float() * scale, torch.tensor([[0.0, 0.0], [3.0, -6.0]]), rtol=1e-6, atol=0)


def test_only_large_layers_of_fitting_sides_are_changed() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 24), nn.Linear(32, 64), nn.Sequential(nn.Linear(128, 64)))
    changed = use_fp8([block], least_side=64)
    assert [(layer.in_features, layer.out_features) for layer in changed] == [(64, 64), (128, 64)]
    assert isinstance(block[0], Fp8Linear) and type(block[1]) is nn.Linear and isinstance(block[3][0], Fp8Linear)
    assert use_fp8([block], least_side=64) == []  # what is changed is not changed again
    assert not can_fp8(torch.device("cpu"))
