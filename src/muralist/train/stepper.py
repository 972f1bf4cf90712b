"""One optimizer step: forward and backward over its parts, the update, the averages."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from muralist.data.loader import Batch
from muralist.errors import UserError
from muralist.keyed_random import SampleKeys
from muralist.models.family import Encoded, Family
from muralist.settings import OptimSettings
from muralist.train.distributed import Engine
from muralist.train.ema import WeightAverage
from muralist.train.schedule import BatchPlan, LearningRate

log = logging.getLogger("muralist")


class StepResult(NamedTuple):
    """What a step leaves behind, still on the device: reading it would wait for the device."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float


class LossModule(nn.Module):
    """A module whose forward is the loss, so that wrappers (DDP, compile) see the whole step."""

    def __init__(self, family: Family, network: nn.Module, seed: int, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.family, self.network, self.seed, self.autocast = family, network, seed, autocast

    def forward(self, encoded: Encoded, numbers: Tensor) -> Tensor:
        """The loss of each sample, [B]."""
        with torch.autocast(numbers.device.type, self.autocast, enabled=self.autocast is not None):
            return self.family.loss(self.network, encoded, SampleKeys(self.seed, numbers))


def autocast_type(use_amp: bool, device: torch.device) -> torch.dtype | None:
    """bf16 where the hardware has it, else fp16; None without mixed precision."""
    if not use_amp:
        return None
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16


def build_optimizer(network: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """AdamW; vectors (biases, norms) without weight decay, as the official code does."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)


@dataclass
class Stepper:
    """Everything a step changes: network, optimizer, averages, loss scale."""

    family: Family
    network: nn.Module
    optimizer: torch.optim.Optimizer
    averages: list[WeightAverage]
    engine: Engine
    plan: BatchPlan
    rate: LearningRate
    seed: int
    autocast: torch.dtype | None
    compiled: bool
    max_grad_norm: float | None
    micro: int = 0
    module: nn.Module = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.micro = self.micro or self.plan.part
        loss_module: nn.Module = LossModule(self.family, self.network, self.seed, self.autocast)
        if self.compiled:
            loss_module.compile()
        self.module = self.engine.wrap(loss_module)
        self.scaler = torch.amp.GradScaler(self.engine.device.type, enabled=self.autocast is torch.float16)

    def step(self, parts: Iterable[Batch], images: int) -> StepResult:
        """Train on the rank's parts of the global batch that starts at sample number `images`."""
        learning_rate = self.rate.at(images)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._gradients(parts)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        for average in self.averages:
            average.update(self.network, images, self.plan.total)
        return StepResult(loss, grad_norm, learning_rate)

    def _gradients(self, parts: Iterable[Batch], exchange: bool = True) -> Tensor:
        loss = torch.zeros((), device=self.engine.device)
        for number, part in enumerate(parts, start=1):
            batch = part.to(self.engine.device)
            encoded = self.family.encode(batch, SampleKeys(self.seed, batch.numbers))
            pieces = list(range(0, len(batch.numbers), self.micro))
            for start in pieces:
                piece = slice(start, start + self.micro)
                last = number == self.plan.parts and start == pieces[-1]
                with self.engine.exchange(self.module, now=exchange and last):
                    losses = self.module(Encoded(*(tensor[piece] for tensor in encoded)), batch.numbers[piece])
                    self.scaler.scale(losses.sum() / self.plan.share).backward()
                loss += losses.detach().sum() / self.plan.share
        return loss

    def _clip(self) -> Tensor:
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True)
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, self.max_grad_norm, norm, foreach=True)
        return norm

    def warm_up(self, batch: Batch) -> None:
        """One throw-away backward: finds a micro batch that fits, and lets DDP settle its buckets, whose order of sums
        would otherwise differ between a fresh start and a resumed one. Nothing is left behind."""
        while True:
            try:
                # Without the exchange: a rank that runs out of memory must not leave the others waiting in it.
                self._gradients([batch] * self.plan.parts, exchange=False)
                fits = 1
            except torch.cuda.OutOfMemoryError:
                fits = 0
            self.optimizer.zero_grad(set_to_none=True)
            if self.engine.smallest(fits):
                break
            torch.cuda.empty_cache()
            if self.micro == 1:
                raise UserError(
                    "Not even one image at a time fits into the GPU's memory.",
                    fix="Use a smaller model or image size, --use_amp, or a GPU that other programs leave free.",
                )
            self.micro = next(size for size in range(self.micro // 2, 0, -1) if self.plan.part % size == 0)
            log.info("Memory is short: %d images per forward pass, same result.", self.micro)
        if self.engine.size > 1:
            self._gradients([batch] * self.plan.parts)
            self.optimizer.zero_grad(set_to_none=True)
