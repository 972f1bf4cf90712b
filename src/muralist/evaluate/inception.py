"""The Inception network that FID is defined on: TensorFlow's graph of 2015-12-05, with the pooling it really has.

Its average pools leave the padding out of the count, and its last block has a maximum pool where the paper has an average.
Module names are those of the usual PyTorch port, so that its weights load as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

FEATURES = 2048
SIDE = 299
_RESIZED_AT_ONCE = 64 << 20  # numbers of full-size pictures, each four bytes, in two copies
_SPOILED = 2 << 30  # bytes: more than a batch of 64 has at any time
RESIZING = "bilinear to 299 x 299 without antialiasing, corners not aligned, as pytorch-fid does"


class Convolution(nn.Module):
    """Convolution without a bias, batch norm, ReLU; padded to keep the size unless it strides or is told not to."""

    in_one_kernel = False

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded and stride == 1 else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Three steps, one name in the weights file."""
        if self.in_one_kernel:
            return in_one_kernel(x_BCHW, self.conv)
        return F.relu(self.bn(self.conv(x_BCHW)))


def in_one_kernel(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor:
    """Convolution, bias and ReLU, by cuDNN."""
    assert not isinstance(conv.padding, str)
    return torch.cudnn_convolution_relu(
        x_BCHW, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups
    )


def _average(x_BCHW: Tensor) -> Tensor:
    return F.avg_pool2d(x_BCHW, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35 x 35: branches of 1 x 1, 5 x 5 and two 3 x 3."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(inputs, 64, 1)
        self.branch5x5_1 = Convolution(inputs, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3)
        self.branch_pool = Convolution(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Four branches side by side."""
        five = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat((self.branch1x1(x), five, double, self.branch_pool(_average(x))), 1)


class BlockB(nn.Module):
    """From 35 x 35 to 17 x 17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Convolution(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Three branches side by side."""
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat((self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)), 1)


class BlockC(nn.Module):
    """17 x 17: 7 x 7 convolutions taken apart into 1 x 7 and 7 x 1."""

    def __init__(self, inputs: int, middle: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(inputs, 192, 1)
        self.branch7x7_1 = Convolution(inputs, middle, 1)
        self.branch7x7_2 = Convolution(middle, middle, (1, 7))
        self.branch7x7_3 = Convolution(middle, 192, (7, 1))
        self.branch7x7dbl_1 = Convolution(inputs, middle, 1)
        self.branch7x7dbl_2 = Convolution(middle, middle, (7, 1))
        self.branch7x7dbl_3 = Convolution(middle, middle, (1, 7))
        self.branch7x7dbl_4 = Convolution(middle, middle, (7, 1))
        self.branch7x7dbl_5 = Convolution(middle, 192, (1, 7))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Four branches side by side."""
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat((self.branch1x1(x), seven, double, self.branch_pool(_average(x))), 1)


class BlockD(nn.Module):
    """From 17 x 17 to 8 x 8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(inputs, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Convolution(inputs, 192, 1)
        self.branch7x7x3_2 = Convolution(192, 192, (1, 7))
        self.branch7x7x3_3 = Convolution(192, 192, (7, 1))
        self.branch7x7x3_4 = Convolution(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Three branches side by side."""
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat((self.branch3x3_2(self.branch3x3_1(x)), seven, F.max_pool2d(x, 3, stride=2)), 1)


class BlockE(nn.Module):
    """8 x 8: 1 x 3 and 3 x 1 convolutions side by side."""

    def __init__(self, inputs: int, maximum: bool) -> None:
        super().__init__()
        self.maximum = maximum
        self.branch1x1 = Convolution(inputs, 320, 1)
        self.branch3x3_1 = Convolution(inputs, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3))
        self.branch3x3_2b = Convolution(384, 384, (3, 1))
        self.branch3x3dbl_1 = Convolution(inputs, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Six branches side by side."""
        three = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else _average(x)
        sides = (self.branch3x3_2a(three), self.branch3x3_2b(three))
        doubles = (self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double))
        return torch.cat((self.branch1x1(x), *sides, *doubles, self.branch_pool(pooled)), 1)


class Inception(nn.Module):
    """Images in [-1, 1], [B, 3, 299, 299], to the 2048 numbers of the last pool."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padded=False)
        self.Mixed_5b = BlockA(192, pooled=32)
        self.Mixed_5c = BlockA(256, pooled=64)
        self.Mixed_5d = BlockA(288, pooled=64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b = BlockC(768, middle=128)
        self.Mixed_6c = BlockC(768, middle=160)
        self.Mixed_6d = BlockC(768, middle=160)
        self.Mixed_6e = BlockC(768, middle=192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b = BlockE(1280, maximum=False)
        self.Mixed_7c = BlockE(2048, maximum=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 2048]."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


def network_input(pixels_HWC: Tensor) -> Tensor:
    """One picture, uint8 [H, W, 3], as the network wants it: resized in [0, 1], then stretched to [-1, 1]."""
    return network_inputs(pixels_HWC[None])[0]


def network_inputs(pixels_BHWC: Tensor) -> Tensor:
    """Pictures of one size as the network wants them; each is resized by itself, wherever they lie."""
    pictures = pixels_BHWC.permute(0, 3, 1, 2).float().div(255)
    resized = F.interpolate(pictures, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return 2 * resized - 1


def resized(pictures: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pictures of any sizes, uint8 [H, W, 3] each, as one batch on a device, where they are resized.

    From page-locked memory, so that a GPU fetches them while it computes the batch before.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for place, picture in enumerate(pictures):
        by_shape[picture.shape].append(place)
    batch = torch.empty(len(pictures), 3, SIDE, SIDE, device=device)
    for shape, all_places in by_shape.items():
        count = max(1, _RESIZED_AT_ONCE // shape.numel())
        for first in range(0, len(all_places), count):
            places = all_places[first : first + count]
            pixels = torch.empty((len(places), *shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
            torch.stack([pictures[place] for place in places], out=pixels)
            inputs = network_inputs(pixels.to(device, non_blocking=True))
            if len(places) == len(pictures):
                return inputs
            batch[places] = inputs
    return batch


def fold_norms(network: Inception) -> Inception:
    """Every batch norm becomes part of its convolution: the same numbers but for rounding, and a pass over memory less."""
    for module in network.modules():
        if isinstance(module, Convolution):
            module.conv = fuse_conv_bn_eval(module.conv.double(), module.bn.double()).float()
            module.bn = nn.Identity()  # type: ignore[assignment]
    return network


def set_in_one_kernel(network: Inception, wanted: bool) -> None:
    """Have convolutions, whose norms are folded, with bias and ReLU in one kernel, or apart."""
    for module in network.modules():
        if isinstance(module, Convolution):
            module.in_one_kernel = wanted


def fuse_where_the_same(
    network: Inception, compute: Callable[[Tensor], Tensor], inputs_BCHW: Tensor, spoil: Callable[[], None]
) -> None:
    """Have them in one kernel, which is a third faster, if that gives the same bits as apart, and gives them again.

    PyTorch does not ask for kernels that are the same every time here, and hands cuDNN the memory of the result to add
    nought times what lies there: so it is compared, with that memory spoiled.
    """
    apart = compute(inputs_BCHW)
    set_in_one_kernel(network, True)
    try:
        for _ in range(2):
            spoil()
            if not torch.equal(compute(inputs_BCHW), apart):
                set_in_one_kernel(network, False)
                return
    except RuntimeError:  # there is no such kernel here, or too little memory to look
        set_in_one_kernel(network, False)


def spoil_memory(device: torch.device) -> None:
    """Fill memory that a GPU has free, and will hand out next, with what is not a number."""
    torch.cuda.empty_cache()
    size = min(_SPOILED, torch.cuda.mem_get_info(device)[0] // 2)
    torch.full((size // 4,), torch.nan, device=device)
