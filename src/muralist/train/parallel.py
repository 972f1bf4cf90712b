"""Data parallelism: full weights in every process (DDP), or sharded ones (FSDP2, DeepSpeed ZeRO 2 and 3).

A checkpoint is the same for all strategies: a run can be resumed under any of them, on any number of processes.
DeepSpeed, the extra `deepspeed`, keeps flat shards of its own layout; checkpoints are assembled from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from muralist.core.rng import SampleKeys
from muralist.models.blocks import compile_block
from muralist.models.spec import Encoded, ModelSpec
from muralist.train import checkpoint
from muralist.train.distributed import World, full_tensor
from muralist.train.optim import MOMENTS, load_optimizer, optimizer_tensors

if TYPE_CHECKING:
    from muralist.train.step import EMA, TrainState


_BLOCK_SHAPES = 8  # of a U-Net, whose stages differ in channels and size


class LossWrapper(nn.Module):
    """A module whose forward is the loss, so that DDP and torch.compile see the complete step."""

    def __init__(self, spec: ModelSpec, network: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.spec, self.network, self.autocast = spec, network, autocast

    def forward(self, encoded: Encoded, seed: int, sample_indices: Tensor) -> Tensor:
        """Compute the loss of each sample, [B]."""
        with torch.autocast(sample_indices.device.type, self.autocast, enabled=self.autocast is not None):
            return self.spec.loss(self.network, encoded, SampleKeys(seed, sample_indices))


class Snapshot(NamedTuple):
    """Tensors of a checkpoint: sets of weights by name, and the optimizer's state."""

    weights: dict[str, dict[str, Tensor]]
    state: dict[str, Tensor]


class SwappedWeights(nn.Module):
    """A network called with other weights, such as EMA weights, without copying or changing it."""

    def __init__(self, network: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.network, self.weights = network, weights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with the replaced weights."""
        return torch.func.functional_call(self.network, self.weights, args, kwargs)


class DataParallel:
    """Every process holds everything and gradients are averaged (DDP); or there is one process."""

    is_sharded = False  # then a forward pass needs all processes, and none may run one alone
    layout = "full copy on each GPU"
    main_saves_alone = True  # whether the main process needs no other process for a checkpoint
    checkpoint_mesh: DeviceMesh | None = None  # the processes that write checkpoints together; None: the main one alone

    def __init__(self, world: World) -> None:
        self.world = world
        self.module: nn.Module = nn.Identity()

    def to_device(self, network: nn.Module, compiled: bool) -> None:
        """Bring a network from host memory to where it is trained."""
        network.to(self.world.device)

    def wrap(self, module: LossWrapper, optimizer: Optimizer, compiled: bool, cuda_graphs: bool) -> nn.Module:
        """Prepare the module whose forward is the loss."""
        if compiled and module.spec.compiles_blocks:
            if module.spec.static_shapes:
                compile_each_size(_BLOCK_SHAPES)
            for block in blocks(module.network):  # type: ignore[arg-type]
                compile_block(block)
        elif compiled:
            module.compile(mode="reduce-overhead" if cuda_graphs else None)
        self.module = module
        if self.world.size > 1:
            # Not by Accelerate, which takes the local rank for a GPU's index, although processes may share a GPU.
            gpus = [self.world.device] if self.world.device.type == "cuda" else None
            # Gradients live in the buckets that are reduced, without a copy.
            self.module = ddp = DistributedDataParallel(
                module,
                device_ids=gpus,
                gradient_as_bucket_view=True,
                find_unused_parameters=module.spec.has_unused_weights,
            )
            if module.autocast is torch.bfloat16:
                # Most gradients come from bf16 GEMMs; half the bytes overlap with the backward pass sooner.
                ddp.register_comm_hook(None, lambda _, bucket: _all_reduce_bf16(bucket))
                self.layout = f"{DataParallel.layout}, gradients all-reduced in bf16"
        return self.module

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Surround forward and backward of one micro-batch; gradients are all-reduced in the last one of a step."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) and not last else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()

    def optimizer_step(self, state: TrainState, fused_step: Callable[[], None] | None) -> Tensor:
        """Clip the gradients, update the weights, reset the gradients; returns the norm before clipping.

        The norm is that of all processes, so they agree whether to skip. A `fused_step` replaces the optimizer's own.
        """
        optimizer, scaler = state.optimizer, state.scaler
        scaler.unscale_(optimizer)
        parameters = state.trained.values()
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        norm = full_tensor(get_total_norm(gradients, foreach=True))
        # isfinite waits for the device, so it is asked only where steps may be skipped.
        if state.skip_non_finite and not scaler.is_enabled() and not torch.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            return norm
        if state.max_grad_norm is not None:
            clip_grads_with_norm_(parameters, state.max_grad_norm, norm, foreach=True)
        if fused_step:
            fused_step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def trained_weights(self, trained: Mapping[str, nn.Parameter]) -> Mapping[str, Tensor]:
        """The trained weights, or this process's shards of them."""
        return trained

    def load_ema(self, ema: EMA, weights: dict[str, Tensor]) -> None:
        """Load full EMA weights."""
        for name, value in ema.items():
            full = weights[name]
            if isinstance(value, DTensor):
                # Every process has read the same file and keeps its shard: nothing is sent.
                full, mesh = full.to(value.device), value.device_mesh
                full = distribute_tensor(full, mesh, value.placements, src_data_rank=None)
            value.copy_(full)

    def load_optimizer(self, path: Path, state: TrainState) -> None:
        """Load the optimizer state of a checkpoint, however many processes wrote it."""
        load_optimizer(path, state.network, state.optimizer, sharded=self.is_sharded)

    def snapshot(self, state: TrainState) -> Snapshot | None:
        """The tensors of a checkpoint; None where this process has nothing to write."""
        if not self.world.is_main and self.checkpoint_mesh is None:
            return None
        tensors = state.network.state_dict()
        weights = {"model": {name: value for name, value in tensors.items() if state.spec.is_saved(name)}}
        for number, ema in enumerate(state.emas, start=1):
            weights[f"ema{number}"] = weights["model"] | dict(ema.items())
        return Snapshot(weights, optimizer_tensors(state.network, state.optimizer))

    def inference_network(self, state: TrainState) -> nn.Module | None:
        """A network with the first EMA's weights that this process can run alone; None where it does not fit."""
        return SwappedWeights(state.network, dict(state.emas[0].items()))


class FullySharded(DataParallel):
    """FSDP2: every process holds a shard of everything and gathers the weights of one block at a time."""

    is_sharded = True
    layout = "sharded over the GPUs (FSDP2)"
    main_saves_alone = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        # A group of its own: checkpoints are written in a thread, beside the collectives of training.
        self.checkpoint_mesh = DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=world.timeout), "cpu")

    def to_device(self, network: nn.Module, compiled: bool) -> None:
        """Shard every block, then the rest; each moves as it is sharded, so the full network is never on the device."""
        # The warning is about outputs changed in place; the loss changes none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for module in blocks(network):
            if compiled:
                compile_block(module)  # block by block: the all-gathers between them cannot be compiled
            fully_shard(module, mesh=self.mesh)
        fully_shard(network, mesh=self.mesh)

    def wrap(self, module: LossWrapper, optimizer: Optimizer, compiled: bool, cuda_graphs: bool) -> nn.Module:
        """Compile what is around the blocks; the network has its hooks already."""
        if compiled:
            module.compile()
        return module

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Reduce-scatter in every micro-batch: full gradients until the last would cost the memory that was saved."""
        return nullcontext()

    def inference_network(self, state: TrainState) -> nn.Module | None:
        """Gather a full copy of the EMA weights."""
        return gather_network(self.world, state.spec, state.network.state_dict() | dict(state.emas[0].items()))


def build_strategy(world: World) -> DataParallel:
    """Build the strategy that the process group was started for."""
    if world.strategy == "fsdp2":
        return FullySharded(world)
    if world.strategy in ("zero2", "zero3"):
        return DeepSpeedZero(world, stage=int(world.strategy[-1]))
    return DataParallel(world)


def blocks(network: nn.Module) -> list[nn.Module]:
    """The modules that are gathered, and compiled, as one: `_no_split_modules` as in transformers."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def gather_network(world: World, spec: ModelSpec, weights: Mapping[str, Tensor]) -> nn.Module | None:
    """Build a full network from sharded weights; a collective, and either all processes get one or none does."""
    needed = sum(value.numel() * value.element_size() for value in weights.values())
    # With a margin: a process that ran out of memory while gathering would leave the others waiting.
    free = 1 << 62  # host memory: the network was built there
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(world.device)[0]
    if not world.all_reduce_min(1.2 * needed < free):
        return None
    network = spec.meta_model()
    expected = network.state_dict()
    full = {name: full_tensor(value).view(expected[name].shape) for name, value in weights.items()}
    network.load_state_dict(full, assign=True)
    return network


def _all_reduce_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients in bf16; torch's own hook of this kind needs a GPU."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None
    return work.get_future().then(lambda summed: buffer.copy_(summed.value()[0]))


def compile_each_size(count: int) -> None:
    """Make torch.compile build one static graph for each of so many image sizes.

    By default it builds one for the first size it meets and a dynamic, slower one for all others: results would then
    depend on the step at which the run was started.
    """
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False
    config.recompile_limit = max(config.recompile_limit, 8 * count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * count)


class DeepSpeedZero(DataParallel):
    """ZeRO stage 2 or 3; all processes assemble a checkpoint and the main one writes it."""

    main_saves_alone = False

    def __init__(self, world: World, stage: int) -> None:
        super().__init__(world)
        self.stage, self.is_sharded = stage, stage == 3
        self.layout = f"optimizer state {'and weights ' if self.is_sharded else ''}sharded over the GPUs (DeepSpeed)"
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.deepspeed: Any = None

    def wrap(self, module: LossWrapper, optimizer: Optimizer, compiled: bool, cuda_graphs: bool) -> nn.Module:
        """Hand module and optimizer to DeepSpeed, which takes over backward and step."""
        warnings.filterwarnings("ignore", ".*is deprecated. Please use `torch.distributed", FutureWarning)
        if self.is_sharded:
            from deepspeed.utils import set_z3_leaf_module

            for unit in blocks(module.network):  # type: ignore[arg-type]
                set_z3_leaf_module(unit, getattr(unit, "is_zero3_leaf", False))
        self.deepspeed, _ = self.world.accelerator.prepare(module, optimizer)
        # DeepSpeed creates this state at the first step, but links only the first parameter group to it.
        for flat in self._flat_weights():
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)}
            optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in MOMENTS}
        if self.stage == 2:
            self.deepspeed.optimizer._lazy_init_hp_params_optimizer_state()
        return self.deepspeed

    def _flat_weights(self) -> list[Tensor]:
        zero = self.deepspeed.optimizer
        return zero.single_partition_of_fp32_groups if self.stage == 2 else zero.fp32_partitioned_groups_flat

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Set where a step ends: DeepSpeed counts its own accumulation steps otherwise."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, which DeepSpeed averages over the processes."""
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def optimizer_step(self, state: TrainState, fused_step: Callable[[], None] | None) -> Tensor:
        """Let DeepSpeed clip and step; skipping steps was refused before."""
        self.deepspeed.optimizer.clip_grad = state.max_grad_norm or 0.0
        self.deepspeed.step()
        return torch.as_tensor(self.deepspeed.get_global_grad_norm(), device=self.world.device)

    def trained_weights(self, trained: Mapping[str, nn.Parameter]) -> Mapping[str, Tensor]:
        """The trained weights: full under stage 2; DeepSpeed's flat shards under stage 3."""
        return {name: self._local(p) for name, p in trained.items()}

    def _local(self, parameter: Any) -> Tensor:
        if self.stage == 2:
            return parameter.detach()
        shard, count = parameter.ds_tensor.detach(), parameter.ds_numel
        held = min(len(shard), max(0, count - self.world.rank * len(shard)))  # the last shards are padded
        shape = torch.Size([count])
        return DTensor.from_local(shard[:held], self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

    def load_ema(self, ema: EMA, weights: dict[str, Tensor]) -> None:
        """Load full EMA weights, which are flat here under stage 3."""
        flat = {name: value.flatten() for name, value in weights.items()}
        super().load_ema(ema, flat if self.stage == 3 else weights)

    def load_optimizer(self, path: Path, state: TrainState) -> None:
        """Read the full state and keep this process's shards of it."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        trained = {name: p for name, p in state.network.named_parameters() if p.requires_grad}
        tensors = {f"{name}.{key}": torch.zeros(_shape(p)) for name, p in trained.items() for key in MOMENTS}
        tensors |= {f"{name}.step": torch.zeros(()) for name in trained}
        checkpoint.read_state(path, tensors)
        for name, parameter in trained.items():
            for key in MOMENTS:
                value = tensors[f"{name}.{key}"].flatten()
                if self.stage == 2:
                    safe_set_full_optimizer_state(parameter, value.to(self.world.device), key)
                else:
                    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                    padded = nn.functional.pad(value, (0, size * self.world.size - len(value)))
                    shard = padded[self.world.rank * size :][:size].to(self.world.device)
                    safe_set_local_optimizer_state(parameter, shard, key)
        steps = torch.stack([tensors[f"{name}.step"] for name in trained]).max()  # 0 for weights without gradients
        for flat in self._flat_weights():
            state.optimizer.state[flat]["step"].copy_(steps)

    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Assemble everything, one tensor at a time, in the main process's host memory."""
        from deepspeed.utils import safe_get_full_optimizer_state

        network, spec = state.network, state.spec
        model: dict[str, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        shapes = {name: _shape(parameter) for name, parameter in network.named_parameters()}
        (step, *_) = [state.optimizer.state[flat]["step"] for flat in self._flat_weights()]
        for name, parameter in network.named_parameters():
            if spec.is_saved(name):
                self._keep(model, name, full_tensor(self._local(parameter)).view(shapes[name]))
            if parameter.requires_grad:
                self._keep(tensors, f"{name}.step", step)
                for key in MOMENTS:
                    self._keep(tensors, f"{name}.{key}", safe_get_full_optimizer_state(parameter, key))
        for name, buffer in network.named_buffers():
            if name in network.state_dict() and spec.is_saved(name):
                self._keep(model, name, buffer)
        weights = {"model": model}
        for number, ema in enumerate(state.emas, start=1):
            weights[f"ema{number}"] = dict(model)
            for name, value in ema.items():
                self._keep(weights[f"ema{number}"], name, full_tensor(value).view(shapes[name]))
        return Snapshot(weights, tensors) if self.world.is_main else None

    def _keep(self, tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.world.is_main:
            tensors[name] = tensor.detach().to("cpu", copy=True)

    def inference_network(self, state: TrainState) -> nn.Module | None:
        """Under stage 3, gather a full copy."""
        if self.stage == 2:
            return super().inference_network(state)
        shards = {name: self._local(parameter) for name, parameter in state.network.named_parameters()}
        return gather_network(self.world, state.spec, shards | dict(state.emas[0].items()))


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
