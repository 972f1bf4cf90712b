"""One optimizer step: forward and backward over its parts, the update, the averages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from muralist.data.loader import Batch
from muralist.errors import UserError
from muralist.keyed_random import SampleKeys
from muralist.models.family import Family
from muralist.models.weights import Which
from muralist.settings import OptimSettings
from muralist.train import checkpoint
from muralist.train.ema import WeightAverage
from muralist.train.loss_module import LossModule
from muralist.train.schedule import BatchPlan, LearningRate
from muralist.train.strategy import Replicated

if TYPE_CHECKING:
    from muralist.train.one_pass import OnePass

log = logging.getLogger("muralist")


class StepResult(NamedTuple):
    """What a step leaves behind, still on the device: reading it would wait for the device."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float


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
    groups = [group for group in groups if group["params"]]  # LoRA has no vectors
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=True)


@dataclass
class Stepper:
    """Everything a step changes: network, optimizer, averages, loss scale."""

    family: Family
    network: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Replicated
    plan: BatchPlan
    rate: LearningRate
    seed: int
    autocast: torch.dtype | None
    compiled: bool
    max_grad_norm: float | None
    half_lives: tuple[float, float]
    micro: int = 0
    skip_non_finite: bool = False
    graphs: bool = False  # whether the compiled step is recorded once and replayed: nothing waits for the host
    loss_module: LossModule = field(init=False)
    module: nn.Module = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    averages: list[WeightAverage] = field(init=False)

    def __post_init__(self) -> None:
        self.micro = self.micro or self.plan.part
        self.graphs &= self.plan.parts == 1 and self.micro >= self.plan.part
        self.engine = self.strategy.engine
        self.loss_module = LossModule(self.family, self.network, self.autocast)
        self.module = self.strategy.wrap(self.loss_module, self.optimizer, self.compiled, self.graphs)
        self.scaler = torch.amp.GradScaler(self.engine.device.type, enabled=self.autocast is torch.float16)
        trained = self.strategy.trained(self.network)
        self.averages = [WeightAverage(trained, half_life) for half_life in self.half_lives]

    def restore(self, path: Path, loss_scale: dict[str, Any]) -> None:
        """Go on from a checkpoint whose weights the network already has."""
        sets: tuple[Which, Which] = ("ema1", "ema2")
        averages = [checkpoint.read_stored(path, which, self.network, self.family) for which in sets]
        self.strategy.load_averages(self.averages, averages)
        self.strategy.load_optimizer(path, self.network, self.optimizer)
        self.scaler.load_state_dict(loss_scale)

    def step(self, parts: Iterable[Batch], images: int) -> StepResult:
        """Train on the rank's parts of the global batch that starts at sample number `images`."""
        learning_rate = self.rate.at(images)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._gradients(parts)
        change = None
        if self.one_pass:
            toward = [average.toward(images, self.plan.total) for average in self.averages]
            change = partial(self.one_pass.step, toward)
        grad_norm = self.strategy.update(
            self.network, self.optimizer, self.scaler, self.max_grad_norm, self.skip_non_finite, change
        )
        if not change:
            trained = self.strategy.trained(self.network)
            for average in self.averages:
                average.update(trained, images, self.plan.total)
        return StepResult(loss, grad_norm, learning_rate)

    @cached_property
    def one_pass(self) -> OnePass | None:
        """What changes weights and averages at once, where all lie whole on a GPU; asked for when there are gradients."""
        whole = type(self.strategy) is Replicated and self.compiled and self.engine.device.type == "cuda"
        if not whole or self.scaler.is_enabled() or self.skip_non_finite:
            return None
        from muralist.train.one_pass import OnePass

        checkpoint.optimizer_tensors(self.network, self.optimizer)  # AdamW makes its state in its own first step only
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        return OnePass(self.optimizer, trained, self.averages) if OnePass.suits(self.optimizer, trained) else None

    def _gradients(self, parts: Iterable[Batch], exchange: bool = True) -> Tensor:
        loss = torch.zeros((), device=self.engine.device)
        for number, part in enumerate(parts, start=1):
            batch = part.to(self.engine.device)
            encoded = self.family.encode(batch, SampleKeys(self.seed, batch.numbers))
            pieces = list(range(0, len(batch.numbers), self.micro))
            for start in pieces:
                piece = slice(start, start + self.micro)
                last = number == self.plan.parts and start == pieces[-1]
                with self.strategy.part(last=exchange and last):
                    if self.graphs:
                        torch.compiler.cudagraph_mark_step_begin()
                    cut = type(encoded)(*(tensor[piece] for tensor in encoded))
                    losses = self.module(cut, self.seed, batch.numbers[piece])
                    self.strategy.backward(self.scaler.scale(losses.sum() / self.plan.share))
                loss += losses.detach().sum() / self.plan.share
        return loss

    @torch.no_grad()
    def losses(self, batch: Batch, seed: int) -> Tensor:
        """The loss of each sample with weights as they are; where weights lie in parts, all processes call this."""
        encoded = self.family.encode(batch, SampleKeys(seed, batch.numbers))
        # Where a process can do it alone it does, past DDP and past another compilation.
        forward = self.module if self.strategy.in_parts else self.loss_module.forward
        return forward(encoded, seed, batch.numbers)

    def _without_graphs(self) -> None:
        """Gradients that add up over several pieces may not lie where the next replay would write."""
        if self.graphs:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            self.graphs = False
            # The recording keeps the memory of what did not fit until nothing refers to it.
            torch._dynamo.reset()
            reset_cudagraph_trees()
            gc.collect()
            torch.cuda.empty_cache()
            self.module = self.strategy.wrap(self.loss_module, self.optimizer, self.compiled, graphs=False)

    def warm_up(self, batch: Batch) -> None:
        """One throw-away backward: finds a micro batch that fits, and lets DDP settle its buckets, whose order of sums
        would otherwise differ between a fresh start and a resumed one. Nothing is left behind."""
        if self.strategy.in_parts:
            return  # a rank that ran out of memory in the middle of a forward pass would leave the others waiting
        while True:
            try:
                # Without the exchange: a rank that runs out of memory must not leave the others waiting in it.
                self._gradients([batch] * self.plan.parts, exchange=False)
                if self.graphs:  # the recording keeps its memory to itself: held-out loss must fit beside it
                    self.losses(batch.to(self.engine.device), self.seed)
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
                    fix="Use a smaller model or image size, --use_amp, --cache none, or a GPU that others leave free.",
                )
            self.micro = next(size for size in range(self.micro // 2, 0, -1) if self.plan.part % size == 0)
            self._without_graphs()
            log.info("Memory is short: %d images per forward pass, same result.", self.micro)
        if self.engine.size > 1:
            self._gradients([batch] * self.plan.parts)
            self.optimizer.zero_grad(set_to_none=True)
