"""`muralist estimate --model.path FOLDER`: the memory that fine-tuning a pipeline takes, from its files alone.

Nothing is loaded: all networks are built on the meta device, where one forward pass shows the FLOPs of an image and the
tensors that autograd keeps for the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import transformers
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from muralist.core.errors import UserError, first_line
from muralist.core.formatting import format_bytes, format_count
from muralist.core.image_size import format_size, height_width
from muralist.models.blocks import block_classes
from muralist.models.components import load_pipeline
from muralist.models.frozen_weights import count_swapped
from muralist.models.hub import find_model
from muralist.models.integrity import read_json, stored_parameters
from muralist.models.lora import Lora
from muralist.models.pipeline_class import INDEX_FILE
from muralist.models.pipeline_probe import PipelineProbe
from muralist.models.spec import DIFFUSERS, frozen_bytes
from muralist.settings import EstimateSettings, ModelSettings, Optimizer, Strategy, TrainSettings
from muralist.settings.train import BasePrecision
from muralist.train.preflight import CONTEXT, state_bytes

_FROZEN_BYTES = 2  # per parameter of the VAE and the text encoders, in bf16
_CAST_BYTES = 2  # per float32 parameter: the copy in bf16 that autocast keeps until the backward pass
_CAPTION = "a red car"
_PLANS: tuple[tuple[Literal["all", "lora"], BasePrecision, bool, Optimizer, Strategy], ...] = (  # bool: blocks swapped
    ("all", "auto", False, "adamw", "ddp"),
    ("all", "auto", False, "adamw8bit", "ddp"),
    ("all", "auto", False, "adamw", "fsdp2"),
    ("lora", "auto", False, "adamw", "ddp"),
    ("lora", "fp8", False, "adamw", "ddp"),
    ("lora", "nf4", False, "adamw", "ddp"),
    ("lora", "auto", True, "adamw", "ddp"),
    ("lora", "fp8", True, "adamw", "ddp"),
    ("lora", "auto", False, "adamw", "fsdp2"),
)


@dataclass(frozen=True)
class ImageCost:
    """What one image costs in training."""

    flops: float  # of the forward pass
    activations: float  # bytes that autograd keeps, in bf16
    checkpointed: float  # with gradient checkpointing


def run(settings: EstimateSettings) -> int:
    """Print what full fine-tuning and LoRA of a pipeline need, and what fits."""
    assert settings.model_path is not None
    if settings.img_size is None:
        raise UserError("The image size is missing.", fix="Give --img_size, as in training.")
    model = ModelSettings(path=settings.model_path, img_size=settings.img_size)
    DIFFUSERS.check(model)
    folder, size = find_model(settings.model_path, "--model.path"), height_width(settings.img_size)
    diffusers.utils.logging.set_verbosity_error()  # what it says of casts and schedules is about weights
    name = DIFFUSERS.network_name(model)
    pipe, network = weightless_pipeline(folder, name)
    total = sum(parameter.numel() for parameter in network.parameters())
    rank = model.lora_rank if settings.lora_rank is None else settings.lora_rank
    lora = Lora(rank, tuple(model.lora_targets)).for_network(network)
    adapter = _adapter_size(network, lora)
    blocks, resident = count_swapped(network, block_classes(network))
    costs: tuple[ImageCost, ImageCost] | None = None
    try:
        costs = image_costs(pipe, network, size, DIFFUSERS.noise_range(folder, name), lora)
    except Exception as error:  # a network that reads values on the way cannot run on the meta device
        reason = first_line(error)
    encoders = {part: stored_parameters(folder / part) for part in DIFFUSERS.encoder_components(folder)}
    frozen = {part: _FROZEN_BYTES * float(count) for part, count in encoders.items() if count}
    memory = 1e9 * (settings.memory or 80.0)

    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    console.print(
        f"{name} of {type(pipe).__name__} in {folder} at {format_size(settings.img_size)} px: {format_count(total)} "
        f"parameters, {format_count(adapter)} of LoRA."
    )
    if costs:
        flops = costs[0].flops / 1e12
        console.print(f"An image takes {3 * flops:,.3g} TFLOPs of full training, {2 * flops:,.3g} of LoRA.")
    shown = ", ".join(f"{part} {format_bytes(size)}" for part, size in frozen.items())
    console.print(
        f"Frozen components in bf16: {shown}; on data of `muralist pack --encode` only the VAE stays on the GPU.\n"
    )
    title = f"Memory per GPU, of {format_bytes(memory)}{'' if settings.memory else ' (--memory)'}"
    table = Table(Column("training", no_wrap=True), "optimizer", "strategy", title=title, title_justify="left")
    for column in ("state", "largest micro-batch", "with gradient checkpointing"):
        table.add_column(column, justify="right")
    for parts, precision, swapped, optimizer, strategy in _PLANS:
        is_lora = parts == "lora"
        trained, base = (adapter, resident if swapped else total) if is_lora else (total, 0.0)
        planned = model.model_copy(update={"training_parts": parts, "base_precision": precision})
        each_frozen = frozen_bytes(TrainSettings(model=planned, use_amp=True))
        ranks = settings.gpus if strategy == "fsdp2" else 1
        state = state_bytes(strategy, trained, base, ranks, optimizer, each_frozen) + _CAST_BYTES * trained / ranks
        fixed = state + frozen.get("vae", 0.0) + CONTEXT
        stored = "" if precision == "auto" else f", {precision} base"
        stored += f", --swap_blocks {blocks}" if swapped else ""
        row = [
            f"LoRA, rank {rank}{stored}" if is_lora else "full",
            optimizer,
            f"{strategy}, {ranks} GPUs" if ranks > 1 else strategy,
        ]
        row.append(format_bytes(state))
        if costs:
            kept = (costs[is_lora].activations, costs[is_lora].checkpointed)
            row += [f"{int((memory - fixed) / each):,}" if memory >= fixed + each else "does not fit" for each in kept]
        table.add_row(*row)
    console.print(table)
    if costs:
        words = [
            f"{cost.activations / 1e6:,.1f} MB ({cost.checkpointed / 1e6:,.1f} MB with gradient checkpointing)"
            for cost in costs
        ]
        console.print(
            "State: weights, gradients, optimizer, EMA, and copies in bf16. For the backward pass an image keeps "
            f"{words[0]} in full training, {words[1]} with LoRA; --use_amp, on data of `muralist pack --encode`. "
            "These are counts, not measurements: the start of a run finds the micro-batch that fits."
        )
    else:
        console.print(
            f"The memory of an image is unknown ({reason}): the start of a run finds the micro-batch that fits."
        )
    return 0


def _adapter_size(network: nn.Module, lora: Lora) -> float:
    """Count the parameters of a LoRA, without inserting it."""
    layers = [
        module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and any(name.endswith(f".{target}") for target in lora.targets)
    ]
    return float(sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers))


def weightless_pipeline(folder: Path, network_name: str) -> tuple[Any, Any]:
    """Build a pipeline whose networks are on the meta device; its text encoders return zeros of the right shape."""
    index = read_json(folder / INDEX_FILE)
    parts: dict[str, Any] = {}
    for name, origin in index.items():
        if not isinstance(origin, list) or len(origin) != 2 or not (folder / name / "config.json").is_file():
            continue
        library: Any = {"diffusers": diffusers, "transformers": transformers}.get(str(origin[0]))
        kind = getattr(library, str(origin[1]), None)
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin):
                parts[name] = kind.from_config(kind.load_config(folder, subfolder=name)).eval()
            elif isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                config_class: Any = kind.config_class
                config = config_class.from_pretrained(folder, subfolder=name, local_files_only=True)
                parts[name] = _returns_zeros(kind(config).eval())
    pipe = load_pipeline(folder, str(index.get("_class_name")), parts, lambda: torch.device("cpu"))
    return pipe, parts[network_name]


def _returns_zeros(encoder: Any) -> Any:
    forward: Callable[..., Any] = encoder.forward

    def run(*inputs: Any, **named: Any) -> Any:
        # Shapes follow from the token ids alone. Values of masks, or of positions without a cache, would be read.
        tokens = {name: value for name, value in named.items() if name == "input_ids" or not isinstance(value, Tensor)}
        tokens.pop("use_cache", None)
        inputs, named = tree_map_only(Tensor, lambda value: value.to("meta"), (inputs[:1], tokens))
        with torch.no_grad():
            output = forward(*inputs, **named)
        return tree_map_only(Tensor, lambda value: torch.zeros(value.shape, dtype=value.dtype), output)

    encoder.forward = run
    return encoder


def image_costs(
    pipe: Any, network: Any, size: tuple[int, int], noise_range: tuple[float, float], lora: Lora
) -> tuple[ImageCost, ImageCost]:
    """Call a network on the meta device as its pipeline does for one image: full training, then with a LoRA inserted."""
    time = 1000 * sum(noise_range) / 2  # of the trained network, where a pipeline has two
    probe = PipelineProbe(pipe, network, (time, time - 1, time - 2))
    arguments: Mapping[str, Any] = probe.network_arguments(_CAPTION, size)
    network.train().to(torch.bfloat16)

    def narrow(value: Tensor) -> Tensor:
        return value.to("meta", torch.bfloat16 if value.is_floating_point() else value.dtype)

    arguments = tree_map_only(Tensor, narrow, dict(arguments))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(**arguments)
    flops = float(counter.get_total_flops())
    full = ImageCost(flops, *saved_bytes(network, arguments))
    try:
        lora.insert(network)
    except UserError:  # PEFT is not installed
        return full, full
    return full, ImageCost(flops, *saved_bytes(network.to(torch.bfloat16), arguments))


def saved_bytes(network: nn.Module, arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Count the bytes that autograd keeps of a forward pass, without and with checkpoints of every block."""
    names, current = set(block_classes(network)), ""
    known = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    kept: dict[int, tuple[Any, str]] = {}  # by storage, which stays alive so that its address is not used again
    inputs: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept.setdefault(storage._cdata, (storage, current))
        return tensor

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal current
        if not current:
            current = str(id(module))
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            inputs.update({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors})

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal current
        current = "" if current == str(id(module)) else current

    blocks = [module for module in network.modules() if type(module).__name__ in names]
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        stack.enter_context(_memory_efficient_attention())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        network(**arguments)
    total = float(sum(storage.nbytes() for storage, _ in kept.values()))
    # Checkpoints keep the inputs of all blocks, and in the backward pass the rest of one block.
    within: dict[str, float] = {}
    for key, (storage, owner) in kept.items():
        if owner and key not in inputs:
            within[owner] = within.get(owner, 0.0) + storage.nbytes()
    outside = sum(storage.nbytes() for key, (storage, owner) in kept.items() if not owner and key not in inputs)
    held = sum(storage.nbytes() for storage in inputs.values())
    return total, min(total, float(outside + held) + max(within.values(), default=0.0))


class _Attention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps: queries, keys, values and output, but no matrix of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def _memory_efficient_attention() -> Iterator[None]:
    functional: Any = torch.nn.functional
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda query, key, value, *_, **__: _Attention.apply(query, key, value)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
