"""How weights, gradients and optimizer state lie over the processes: whole on each (DDP), or in parts (FSDP2, ZeRO).

A checkpoint is the same for all of them: a run can go on under any strategy, on any number of processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from muralist.models.family import Family
from muralist.scale.memory import state_bytes
from muralist.train import checkpoint
from muralist.train.distributed import Engine
from muralist.train.ema import WeightAverage, WithWeights
from muralist.train.loss_module import LossModule


class Snapshot(NamedTuple):
    """What a checkpoint stores: sets of weights by name, and the optimizer's tensors."""

    weights: dict[str, dict[str, Tensor]]
    state: dict[str, Tensor]


class Replicated:
    """Every process holds everything and gradients are averaged (DDP); or there is one process."""

    in_parts = False  # whether a forward pass needs all processes: then none may run one alone
    words = "whole on each"
    saves_alone = True  # whether the main process needs nobody for a checkpoint
    writers: DeviceMesh | None = None  # the processes that write checkpoints together; None: the main one alone

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module: nn.Module = nn.Identity()

    def memory(self, trained: int, frozen: int) -> float:
        """Bytes of weights, gradients, optimizer and averages in each process."""
        return state_bytes(self.engine.strategy, trained, frozen, self.engine.size)

    def place(self, network: nn.Module, compiled: bool) -> None:
        """Bring a whole network from host memory to where it is trained."""
        network.to(self.engine.device)

    def wrap(self, module: LossModule, optimizer: torch.optim.Optimizer, compiled: bool, graphs: bool) -> nn.Module:
        """Prepare the module whose forward is the loss."""
        if compiled:
            module.compile(mode="reduce-overhead" if graphs else None)
        self.module = module
        if self.engine.size > 1:
            self.module = replicated = self.engine.accelerator.prepare_model(module)
            if module.autocast is torch.bfloat16:
                # Most of them were products in bf16 a moment ago, and half the bytes hide behind the backward pass sooner.
                assert isinstance(replicated, DistributedDataParallel)
                replicated.register_comm_hook(None, lambda _, bucket: _averaged_in_bf16(bucket))
                self.words = f"{Replicated.words}, gradients exchanged in bf16"
        return self.module

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a part of a step; gradients are exchanged in the last one."""
        return nullcontext() if last or self.engine.size == 1 else self.engine.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        loss.backward()

    def update(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        most: float | None,
        skip: bool = False,
        change: Callable[[], None] | None = None,
    ) -> Tensor:
        """Clip the gradients at norm `most`, change the weights, forget the gradients; returns the norm there was.

        With `skip`, gradients that are not finite change nothing. The norm is that of all processes, so they agree.
        Where there is a `change`, it takes the place of the optimizer's step.
        """
        scaler.unscale_(optimizer)
        parameters = [parameter for parameter in network.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if (
            skip and not scaler.is_enabled() and not torch.isfinite(norm)
        ):  # waits for the device, so only where asked for
            optimizer.zero_grad(set_to_none=True)
            return norm
        if most is not None:
            clip_grads_with_norm_(parameters, most, norm, foreach=True)
        if change:
            change()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def trained(self, network: nn.Module) -> dict[str, Tensor]:
        """The trained weights as they lie here: what averages follow."""
        return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}

    def load_averages(self, averages: list[WeightAverage], states: list[dict[str, Tensor]]) -> None:
        """Go on from whole averages."""
        for average, state in zip(averages, states, strict=True):
            for name, value in average.items():
                value.copy_(_laid_out_like(value, state[name]))

    def load_optimizer(self, path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Go on from a checkpoint's optimizer state, however many processes wrote it."""
        checkpoint.read_state(path, checkpoint.optimizer_tensors(network, optimizer), together=self.in_parts)

    def snapshot(
        self, family: Family, network: nn.Module, optimizer: torch.optim.Optimizer, averages: list[WeightAverage]
    ) -> Snapshot | None:
        """What a checkpoint stores, as it lies here; None where this process has nothing to write."""
        if not self.engine.is_main and self.writers is None:
            return None
        weights = {"model": {name: value for name, value in network.state_dict().items() if family.stores(name)}}
        for number, average in enumerate(averages, start=1):
            weights[f"ema{number}"] = weights["model"] | dict(average.items())
        return Snapshot(weights, checkpoint.optimizer_tensors(network, optimizer))

    def drawing_network(self, family: Family, network: nn.Module, average: WeightAverage) -> nn.Module | None:
        """A network with averaged weights that this process can run alone; None where it does not fit into memory."""
        return WithWeights(network, dict(average.items()))


class FullyShard(Replicated):
    """FSDP2: every process holds a part of everything and gathers the weights of one block at a time."""

    in_parts = True
    words = "in parts over the GPUs (FSDP2)"
    saves_alone = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.mesh = init_device_mesh(engine.device.type, (engine.size,))
        # A group of its own: checkpoints are written in a thread, beside the collectives of training.
        self.writers = DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=engine.timeout), "cpu")

    def place(self, network: nn.Module, compiled: bool) -> None:
        """Shard every block, then the rest; each goes to the device as it is sharded, so the whole never lies there."""
        # The loss changes no output in place, which this would be about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        for module in units(network):
            if compiled:
                module.compile()  # block by block: the gathering between them cannot be compiled
            fully_shard(module, mesh=self.mesh)
        fully_shard(network, mesh=self.mesh)

    def wrap(self, module: LossModule, optimizer: torch.optim.Optimizer, compiled: bool, graphs: bool) -> nn.Module:
        """The network has its hooks; what is around it is compiled in pieces, between them."""
        if compiled:
            module.compile()
        return module

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in every part: keeping them whole until the last would cost the memory that was saved."""
        return nullcontext()

    def drawing_network(self, family: Family, network: nn.Module, average: WeightAverage) -> nn.Module | None:
        """A whole copy of the averaged weights, gathered once."""
        weights = network.state_dict() | dict(average.items())
        return gathered_network(self.engine, family, weights)


def _averaged_in_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A bucket of gradients averaged over the processes; torch's own hook of this kind wants a GPU."""
    whole = bucket.buffer()
    half = whole.to(torch.bfloat16).div_(dist.get_world_size())
    sent = dist.all_reduce(half, async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda summed: whole.copy_(summed.value()[0]))


def units(network: nn.Module) -> list[nn.Module]:
    """The parts of a network whose weights are gathered, and which are compiled, as one."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names]


def gathered_network(engine: Engine, family: Family, weights: Mapping[str, Tensor]) -> nn.Module | None:
    """Build a whole network from weights that lie in parts; all processes call this, and all get one or none does."""
    needed = sum(value.numel() * value.element_size() for value in weights.values())
    # With some room to spare: one process that ran out of memory while gathering would leave the others waiting.
    if not engine.smallest(1.2 * needed < _free_memory(engine.device)):
        return None
    network = family.skeleton()
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    network.load_state_dict({name: whole(value).view(shapes[name]) for name, value in weights.items()}, assign=True)
    return network


def _free_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 62  # host memory: the network came from there
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from its parts on all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out_like(pattern: Tensor, tensor: Tensor) -> Tensor:
    if not isinstance(pattern, DTensor):
        return tensor
    # Every process has read the same file and keeps its part: nothing is sent.
    tensor = tensor.to(pattern.device)
    return distribute_tensor(tensor, pattern.device_mesh, pattern.placements, src_data_rank=None)


def compile_each_size(count: int) -> None:
    """Have torch.compile make one graph for each of so many picture sizes.

    By itself it would make one for the first size it meets and a slower one for all others: what a step computes would then
    depend on where the run was started from. Each size is compiled when its first batch comes.
    """
    from torch._dynamo import config

    config.automatic_dynamic_shapes = False
    config.recompile_limit = max(config.recompile_limit, 8 * count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * count)


def build_strategy(engine: Engine) -> Replicated:
    """The strategy that the engine was started for."""
    if engine.strategy == "fsdp2":
        return FullyShard(engine)
    if engine.strategy in ("zero2", "zero3"):
        from muralist.train.zero import Zero

        return Zero(engine, stage=int(engine.strategy[-1]))
    return Replicated(engine)
