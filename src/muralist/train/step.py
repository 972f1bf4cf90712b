"""The training state and one optimizer step: forward and backward over micro-batches, optimizer, EMA."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muralist.core.errors import UserError
from muralist.core.rng import SampleKeys
from muralist.data.loader import AllBroken, Batch, BrokenImage, held_out_batches
from muralist.models.frozen_weights import count_frozen
from muralist.models.spec import ModelSpec
from muralist.models.weights import WeightSet
from muralist.settings import TrainSettings
from muralist.train.checkpoint import Checkpoint, read_saved_weights
from muralist.train.optim import LR_SCALE, build_optimizer, optimizer_tensors
from muralist.train.parallel import DataParallel, LossWrapper
from muralist.train.schedule import BatchPlan, LearningRate, ema_decay, ema_half_lives

if TYPE_CHECKING:
    from muralist.kernels.fused_adamw_ema import FusedAdamWEma
    from muralist.train.dataset import TrainingData
    from muralist.train.watchdog import Watchdog

log = logging.getLogger("muralist")


class StepResult(NamedTuple):
    """Metrics of a step, still on the device: reading them would wait for the device."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float


def autocast_dtype(settings: TrainSettings, device: torch.device) -> torch.dtype | None:
    """The dtype of --precision, or for --use_amp bf16 where the hardware has it, else fp16; None without either."""
    if not settings.mixed:
        return None
    if settings.precision != "auto":
        return torch.float16 if settings.precision == "fp16" else torch.bfloat16
    return torch.float16 if device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16


class EMA:
    """Exponential moving average of a network's trained weights, in float32 and sharded as they are."""

    def __init__(self, trained: Mapping[str, Tensor], half_life: float) -> None:
        self.half_life = half_life
        self.names = list(trained)
        self.values = [value.detach().float().clone() for value in trained.values()]
        self._local_values = [local(value) for value in self.values]

    @torch.no_grad()
    def update(self, weights: list[Tensor], images: int, step_images: int) -> None:
        """Include this process's weights after the step that started at `images` images."""
        torch._foreach_lerp_(self._local_values, weights, self.lerp_weight(images, step_images))

    def lerp_weight(self, images: int, step_images: int) -> float:
        """Weight of the new weights in the step that starts at `images` images: 1 - decay."""
        return 1.0 - ema_decay(images, step_images, self.half_life)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and averaged tensors."""
        return zip(self.names, self.values, strict=True)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; others are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TrainState:
    """Network, optimizer, EMA weights, loss scale and images seen: what a step changes and a checkpoint stores."""

    def __init__(
        self,
        settings: TrainSettings,
        spec: ModelSpec,
        network: nn.Module,
        strategy: DataParallel,
        plan: BatchPlan,
        rate: LearningRate,
        autocast: torch.dtype | None,
        compiled: bool,
        cuda_graphs: bool = False,
    ) -> None:
        """Move the network to its device and wrap it; `cuda_graphs` replays the compiled step as one CUDA graph."""
        optim, micro_batch = settings.optim, settings.data.micro_batch_size
        self.spec, self.network, self.strategy, self.plan, self.rate = spec, network, strategy, plan, rate
        self.autocast, self.compiled, self.world, self.seed = autocast, compiled, strategy.world, settings.seed
        self.max_grad_norm, self.skip_non_finite = optim.max_grad_norm, optim.non_finite == "skip"
        self.micro_batch = plan.batch_size if micro_batch == "auto" else micro_batch
        self.cuda_graphs = cuda_graphs and plan.accumulation_steps == 1 and self.micro_batch >= plan.batch_size
        self.cuda_graphs &= spec.captures_step and not spec.compiles_blocks
        self.images = 0
        # Counted before weights are sharded: ZeRO-3 leaves empty parameters behind.
        self.num_trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
        self.num_frozen, self.frozen_bytes = count_frozen(network, spec.is_saved)

        strategy.to_device(network, compiled)
        self.optimizer_name, self.optimizer = optim.optimizer, build_optimizer(network, optim, spec.lr_scale)
        self.loss = LossWrapper(spec, network, autocast)
        self.module = strategy.wrap(self.loss, self.optimizer, compiled, self.cuda_graphs)
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=autocast is torch.float16)
        # Listed once: walking through the modules takes longer than all else that the host does for a small model's step.
        self.trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        trained = strategy.trained_weights(self.trained)
        self.emas = [EMA(trained, half_life) for half_life in ema_half_lives(optim, plan.total)]

    def restore(self, checkpoint: Checkpoint, images: int) -> None:
        """Load EMA weights, optimizer and loss scale, after `images` images; the network has its weights already."""
        if (written_by := checkpoint.manifest.get("optimizer", "adamw")) != self.optimizer_name:
            raise UserError(
                f"The checkpoint {checkpoint.path} holds the state of --optimizer {written_by}, not of "
                f"{self.optimizer_name}.",
                fix=f"Give --optimizer {written_by}, or --init_from {checkpoint.path} to start from its weights alone.",
            )
        names: tuple[WeightSet, WeightSet] = ("ema1", "ema2")
        for name, ema in zip(names, self.emas, strict=True):
            self.strategy.load_ema(ema, read_saved_weights(checkpoint.path, name, self.network, self.spec))
        self.strategy.load_optimizer(checkpoint.path, self)
        if loss_scale := checkpoint.manifest["loss_scale"]:  # empty unless it was trained in fp16: a fork may begin to
            self.scaler.load_state_dict(loss_scale)
        self.images = images

    def step(self, batches: Iterable[Batch]) -> StepResult:
        """Train on this rank's batches of the next global batch."""
        learning_rate = self.rate.at(self.images)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group[LR_SCALE]
        loss = self._backward(batches)
        fused_step = None
        if self.fused_adamw_ema:
            lerp_weights = [ema.lerp_weight(self.images, self.plan.total) for ema in self.emas]
            fused_step = partial(self.fused_adamw_ema.step, lerp_weights)
        grad_norm = self.strategy.optimizer_step(self, fused_step)
        if not fused_step:
            weights = [local(weight) for weight in self.strategy.trained_weights(self.trained).values()]
            for ema in self.emas:
                ema.update(weights, self.images, self.plan.total)
        self.images += self.plan.total
        return StepResult(loss, grad_norm, learning_rate)

    @cached_property
    def fused_adamw_ema(self) -> FusedAdamWEma | None:
        """The kernel for AdamW and EMA in one pass, where full weights are on a GPU; asked for once gradients exist."""
        unsharded = type(self.strategy) is DataParallel and self.compiled and self.world.device.type == "cuda"
        unsharded &= type(self.optimizer) is torch.optim.AdamW
        if not unsharded or self.scaler.is_enabled() or self.skip_non_finite:
            return None
        from muralist.kernels.fused_adamw_ema import FusedAdamWEma

        optimizer_tensors(self.network, self.optimizer)  # AdamW itself creates its state only in its first step
        trained = list(self.trained.values())
        if not FusedAdamWEma.supports(self.optimizer, trained):
            return None
        return FusedAdamWEma(self.optimizer, trained, [ema.values for ema in self.emas])

    def _backward(self, batches: Iterable[Batch], sync: bool = True) -> Tensor:
        loss = torch.zeros((), device=self.world.device)
        for number, host_batch in enumerate(batches, start=1):
            batch = host_batch.to(self.world.device)
            encoded = self.spec.encode(batch, SampleKeys(self.seed, batch.sample_indices))
            starts = range(0, len(batch.sample_indices), self.micro_batch)
            for start in starts:
                rows = slice(start, start + self.micro_batch)
                last = number == self.plan.accumulation_steps and start == starts[-1]
                with self.strategy.gradient_sync(last=sync and last):
                    if self.cuda_graphs:
                        torch.compiler.cudagraph_mark_step_begin()
                    micro_batch = type(encoded)(*(tensor[rows] for tensor in encoded))
                    losses = self.module(micro_batch, self.seed, batch.sample_indices[rows])
                    self.strategy.backward(self.scaler.scale(losses.sum() / self.plan.per_rank))
                loss += losses.detach().sum() / self.plan.per_rank
        return loss

    @torch.no_grad()
    def losses(self, batch: Batch, seed: int) -> Tensor:
        """Loss of each sample with the current weights; a collective where weights are sharded."""
        encoded = self.spec.encode(batch, SampleKeys(seed, batch.sample_indices))
        # Unsharded, it bypasses DDP and another compilation.
        forward = self.module if self.strategy.is_sharded else self.loss.forward
        return forward(encoded, seed, batch.sample_indices)

    def warm_up(self, batch: Batch, held_out: bool = True) -> None:
        """Run one backward pass and discard its gradients; without images `held_out`, their loss is not compiled.

        It finds a micro-batch that fits into memory, and makes DDP build its final buckets, whose order of sums would
        otherwise differ between a fresh start and a resumed one.
        """
        if self.strategy.is_sharded:
            return  # a rank that ran out of memory in the middle of a forward pass would leave the others waiting
        batches = [batch] * self.plan.accumulation_steps
        while True:
            try:
                # Without all-reduce: a rank that runs out of memory must not leave the others waiting in it.
                self._backward(batches, sync=False)
                if self.cuda_graphs and held_out:  # the graph shares no memory: this must fit beside it
                    self.losses(batch.to(self.world.device), self.seed)
                fits = 1
            except torch.cuda.OutOfMemoryError:
                fits = 0
            self.optimizer.zero_grad(set_to_none=True)
            if self.world.all_reduce_min(fits):
                break
            torch.cuda.empty_cache()
            if self.micro_batch == 1:
                raise UserError(
                    "CUDA out of memory, also with micro-batches of a single image.",
                    fix="Use --gradient_checkpointing, --use_amp, --cache none, a smaller model or image size, or a GPU "
                    "without other programs; with LoRA, also --base_precision fp8 or --swap_blocks N; for a distillation, "
                    "whose teacher sees the whole batch, a smaller --batch_size.",
                )
            batch_size = self.plan.batch_size
            self.micro_batch = next(size for size in range(self.micro_batch // 2, 0, -1) if batch_size % size == 0)
            self._disable_cuda_graphs()
            log.info("Memory is short: micro-batches of %d images, same result.", self.micro_batch)
        if self.world.size > 1:
            self._backward(batches)
            self.optimizer.zero_grad(set_to_none=True)

    def _disable_cuda_graphs(self) -> None:
        """Compile again without CUDA graphs: a replay would overwrite gradients that accumulate over micro-batches."""
        if self.cuda_graphs:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            self.cuda_graphs = False
            torch._dynamo.reset()
            reset_cudagraph_trees()
            gc.collect()  # the graph's memory is freed once nothing refers to it
            torch.cuda.empty_cache()
            self.module = self.strategy.wrap(self.loss, self.optimizer, self.compiled, cuda_graphs=False)


@torch.no_grad()
def held_out_loss(
    state: TrainState,
    data: TrainingData,
    watchdog: Watchdog,
    on_broken: Callable[[Sequence[BrokenImage]], None] | None = None,
) -> tuple[float | None, UserError | None]:
    """Mean loss over the held-out images with fixed noise, None without any; or an error that all ranks raise.

    `on_broken` is told of broken images, which are skipped; without it they are errors.
    """
    if data.held_out is None:
        return None, None
    world, count = state.world, len(data.held_out_indices)
    # The same number on every rank, repeating the last image if needed: a forward pass may need all ranks.
    rows = -(-count // world.size)
    positions = np.minimum(world.rank + world.size * np.arange(rows), count - 1)
    counted = torch.arange(rows) * world.size + world.rank < count
    skip = on_broken is not None
    batches = held_out_batches(data.held_out, data.held_out_indices, positions, state.micro_batch, skip)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    state.network.eval()
    try:
        for first in range(0, rows, state.micro_batch):
            watchdog.report("held-out loss")
            batch, error = None, None
            try:
                batch = next(batches)
            except UserError as caught:
                error = caught
            trouble = world.all_reduce_max(
                0 if error is None else 1 if on_broken and isinstance(error, AllBroken) else 2
            )
            if trouble == 1:  # 1% of a small data set is one image
                if on_broken and isinstance(error, AllBroken):
                    on_broken(error.broken)
                log.warning("The held-out images are broken: there is no val/loss.")
                return None, None
            if trouble or batch is None:
                return None, error or UserError("Another process could not read a held-out image; see its message.")
            if on_broken:
                on_broken(batch.broken)
            losses = state.losses(batch.to(world.device), state.spec.held_out_seed)
            total += losses.double()[counted[first : first + state.micro_batch].to(world.device)].sum()
    finally:
        state.network.train()
    return float(world.all_reduce_sum(total)) / count, None
