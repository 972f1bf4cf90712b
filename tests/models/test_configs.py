"""Names, counts and FLOPs against the published figures and against the network itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from muralist.core.errors import UserError
from muralist.models import jit
from muralist.models.configs import (
    JIT_CONFIGS,
    check_image_size,
    forward_flops,
    parameter_count,
    parse_jit_name,
    tokens_per_image,
)

# name, image size, classes, trainable parameters, GFLOP of a forward pass (None where no figure is known)
PUBLISHED = [
    ("JiT-B/4", 64, 1000, 130_477_872, 50.1154),
    ("JiT-B/4", 64, 10, 129_717_552, 50.1154),
    ("JiT-B/16", 256, 1000, 131_123_712, 50.4457),
    ("JiT-B/32", 512, 1000, 133_190_400, 51.50),
    ("JiT-L/16", 256, 1000, 458_877_664, 175.89),
    ("JiT-L/32", 512, 1000, 461_534_176, None),
    ("JiT-H/16", 256, 1000, 952_514_368, 363.89),
    ("JiT-H/32", 512, 1000, 956_055_616, None),
    ("JiT-G/16", 256, 1000, 2_007_130_000, 767.49),
]


@pytest.mark.parametrize(("name", "size", "classes", "parameters", "gflop"), PUBLISHED)
def test_published_figures(name, size, classes, parameters, gflop):
    variant, patch = parse_jit_name(name)
    assert f"JiT-{variant}/{patch}" == name
    assert parameter_count(variant, patch, classes) == parameters
    assert tokens_per_image(patch, size) == 256
    if gflop is not None:
        digits = len(str(gflop).split(".")[1])
        assert round(forward_flops(variant, patch, size) / 1e9, digits) == gflop


@pytest.mark.parametrize("name", [f"JiT-{variant}/{patch}" for variant in JIT_CONFIGS for patch in (4, 16)])
def test_count_is_that_of_the_network(name):
    with torch.device("meta"):
        net = jit.build(name, 64, 10)
    variant, patch = parse_jit_name(name)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == parameter_count(variant, patch, 10)


@pytest.mark.parametrize(("name", "size"), [("JiT-T/4", 16), ("JiT-T/8", 64), ("JiT-S/4", 16), ("JiT-B/16", 64)])
def test_flops_are_those_torch_counts(name, size):
    with torch.device("meta"):
        net = jit.build(name, size, 10)
        inputs = torch.empty(2, 3, size, size), torch.empty(2), torch.empty(2, dtype=torch.long)
        # The counter knows the matmuls of plain attention, not every fused kernel.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            net(*inputs)
    variant, patch = parse_jit_name(name)
    assert counter.get_total_flops() == 2 * forward_flops(variant, patch, size)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("jit-b/4", "Did you mean JiT-B/4?"),
        ("JiT-B16", "Did you mean JiT-B/16?"),
        ("JiT-XL/16", "Did you mean JiT-L/16?"),
        ("JiT-B/0", "Did you mean JiT-B/"),
        ("JiT-B/16 ", "Did you mean JiT-B/16?"),
        ("unet", "An example is JiT-B/16."),
        ("org/unet", "A pipeline is named by its folder or its id on the Hugging Face Hub: --model.path org/unet"),
        ("", "An example is JiT-B/16."),
    ],
)
def test_wrong_names_say_what_was_meant(name, hint):
    with pytest.raises(UserError) as caught:
        parse_jit_name(name)
    assert str(caught.value).startswith(f"There is no model named {name}.")
    assert hint in caught.value.fix


@pytest.mark.parametrize(("patch", "size"), [(16, 100), (32, 8)])
def test_image_sizes_that_do_not_fit(patch, size):
    message = f"{size} pixels cannot be divided into patches of {patch}. .* a multiple of {patch}, .* divides {size}"
    with pytest.raises(UserError, match=message):
        check_image_size(patch, size)
