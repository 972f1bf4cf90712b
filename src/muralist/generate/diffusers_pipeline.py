"""Images from any text-to-image or text-to-video pipeline in diffusers layout."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.utils import logging as transformers_logging

from muralist.core.errors import UserError, closest_match
from muralist.core.hardware import copy_to_device, copy_to_host
from muralist.data.image_inputs import STRENGTH
from muralist.generate import diffusers_patches
from muralist.generate.denoising import DenoisingLoop, denoisers
from muralist.generate.image_inputs import PipelineInputs
from muralist.generate.model_info import FP8_PIPELINES, PEFT_CONFIG, LoraAdapter, ModelInfo, check_adapters
from muralist.generate.optimizations import (
    CudaGraphs,
    Fp8Linear,
    NonBlockingCopies,
    Optimizations,
    exact_matmuls,
    use_fp8,
)
from muralist.generate.pipeline import (
    DTYPES,
    MEMORY_PROBE_STEPS,
    GenerationMode,
    PendingBatch,
    Pipeline,
    PipelineError,
    Requests,
    SampleRequest,
    Size,
    StepCallback,
)
from muralist.kernels.fp8 import has_fp8
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name

_MAX_SHARE_OF_GPU = 0.6  # a larger model leaves too little memory for its activations
_SHORT_PROMPT, _LONG_PROMPT = "a", "one of many words " * 12
_EMPTY_NEGATIVE_PROMPT = " "  # pipelines with true_cfg_scale guide only where a negative prompt is given
_TEXT_ARGUMENTS = ("prompt", "negative_prompt")  # and prompt_2, negative_prompt_3, ...
_TEXT_ENCODER = re.compile(r"text_encoder(_\d+)?")
_LORA_ERRORS = (OSError, ValueError, RuntimeError, KeyError)


class DiffusersPipeline(Pipeline):
    """A diffusers pipeline on one device."""

    def __init__(
        self,
        pipe: Any,
        settings: GenerateSettings,
        device: torch.device,
        optimizations: Optimizations,
        inputs: PipelineInputs | None = None,
    ) -> None:
        assert settings.height and settings.width and settings.guidance_scale != "auto", "resolved by inspect_model"
        self._pipe, self._size = pipe, (settings.height, settings.width)
        self._name, self._inputs = type(pipe).__name__, inputs
        self._parameters = inspect.signature(pipe.__call__).parameters
        self._check_pipeline()
        self._steps = settings.num_inference_steps
        self._guidance = self._guidance_arguments(settings.guidance_scale)
        self._frames = self._frame_arguments(settings)
        self._dtype = settings.dtype
        self._device, self._optimizations = device, optimizations
        self._fast = settings.preset == "fast"
        networks = denoisers(pipe)
        self._fp8_layers: list[Fp8Linear] = []
        if self._fast and self._name in FP8_PIPELINES and has_fp8(device):
            blocks = (diffusers_patches.repeated_blocks(network) for network in networks)
            self._fp8_layers = use_fp8(block for each in blocks for block in each)
        self._graphs = CudaGraphs(optimizations.cuda_graphs and device.type == "cuda")
        self._copies = NonBlockingCopies(device)
        self._embeddings = PromptEmbeddingCache(pipe)
        self._loop = DenoisingLoop(
            pipe, self._steps, settings.cfg_truncation_step, self._fast, device, self._graphs, self._copies
        )
        self._execution_info = optimizations.apply(pipe, networks, device)
        for encoder in text_encoders(pipe):
            _disable_kv_cache(encoder)
            encoder.forward = self._copies.suspended(self._graphs.wrap(encoder.forward))
        if getattr(pipe, "vae", None) is not None:
            pipe.vae.decode = self._copies.suspended(pipe.vae.decode)
            if inputs:
                pipe.vae.encode = self._copies.suspended(pipe.vae.encode)
        self._reset_text_cache = diffusers_patches.cache_text_embeddings(pipe)

    @classmethod
    def load(
        cls,
        settings: GenerateSettings,
        device: torch.device,
        folder: Path | None = None,
        components: dict[str, Any] | None = None,
        optimizations: Optimizations | None = None,
        model: ModelInfo | None = None,
    ) -> DiffusersPipeline:
        """Load a pipeline's folder onto a device; `components` replace those in the folder.

        `model` names another class for it, where rows have image inputs.
        """
        inputs = model.inputs if model else None
        pipeline_class = getattr(diffusers, model.pipeline_class) if model and inputs else DiffusionPipeline
        folder, dtype = folder or Path(settings.model_path), DTYPES[settings.dtype]
        for library in (diffusers_logging, transformers_logging):
            library.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        diffusers_logging.set_verbosity_warning()
        diffusers_logging.disable_default_handler()  # of one warning for each long prompt of ten thousand
        diffusers_logging.add_handler(_TRUNCATIONS)  # a logger keeps a handler once
        try:
            pipe: Any = pipeline_class.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **(components or {})
            )
        except (OSError, ValueError, AttributeError, ImportError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"The pipeline in {folder} cannot be loaded.",
                f"The reason: {reason}",
                "Check that the folder is complete.",
            ) from error
        pipe.set_progress_bar_config(disable=True)
        for module in _modules(pipe):
            module.eval().requires_grad_(False)
        if settings.scheduler is not None:
            pipe.scheduler = _replace_scheduler(pipe.scheduler, settings.scheduler)
        _add_adapters(pipe, check_adapters(settings.lora))
        offloaded = device.type == "cuda" and _wants_offload(pipe, settings, device)
        optimizations = optimizations or Optimizations.choose(settings.compile, device)
        if not offloaded:  # before the optimizations, which quantize and reorder weights faster on the GPU
            pipe.to(device)
        pipeline = cls(pipe, settings, device, optimizations, inputs)
        if offloaded:
            # Last: offloading wraps the components' calls and unwraps them again, so it must be outermost.
            pipe.enable_model_cpu_offload(gpu_id=device.index or 0)
            pipeline._graphs.disable()  # a graph needs its weights where they were at capture
            pipeline._copies.disable()  # weights that move to the GPU must not be pinned
        return pipeline

    def _check_pipeline(self) -> None:
        required = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in ("prompt", *(self._inputs.arguments.values() if self._inputs else ()))
        ]
        if "prompt" not in self._parameters or required:
            why = f"It needs {', '.join(required)}." if required else "It takes no prompt."
            raise UserError(
                f"{self._name} does not generate images from text alone.", why, "Give another --model_path."
            )
        if getattr(self._pipe, "scheduler", None) is None:
            raise UserError(
                f"{self._name} is several pipelines in one.",
                "generate supports pipelines with one scheduler.",
                "Give another --model_path.",
            )

    def _guidance_arguments(self, scale: float) -> dict[str, Any]:
        """The pipeline's argument for the scale; a network with the scale as an input needs no second pass."""
        if "true_cfg_scale" not in self._parameters:
            return {"guidance_scale": scale}
        network = getattr(self._pipe, "transformer", None)
        if getattr(getattr(network, "config", None), "guidance_embeds", False):
            return {"guidance_scale": scale, "true_cfg_scale": 1.0}
        return {"true_cfg_scale": scale}

    def _frame_arguments(self, settings: GenerateSettings) -> dict[str, int]:
        frames = settings.num_frames
        if "num_frames" not in self._parameters and frames > 1:
            raise UserError(
                f"{self._name} generates images, not clips of {frames} frames.", fix="Leave --num_frames out."
            )
        return {"num_frames": frames}

    def supports_batching(self) -> bool:
        """Whether prompts of any length have embeddings of one shape, and image inputs are scaled to one size."""
        return self._has_fixed_length and not (self._inputs and self._inputs.own_resize)

    @cached_property
    def _has_fixed_length(self) -> bool:
        if not self._embeddings.is_available:
            return False
        short, long = (self._encode(SampleRequest(text, text, 0)) for text in (_SHORT_PROMPT, _LONG_PROMPT))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the embeddings are still being copied to the host
        self._embeddings.evict()
        self._reset_text_cache()  # these were encoded before it was known whether masks are forced
        return bool(short) and _can_batch(short, long)

    @property
    def _compiled(self) -> bool:
        """Where embeddings are as long as the prompt, every length would compile its own graph."""
        return self._optimizations.compiled and self._has_fixed_length

    def execution_info(self) -> dict[str, str]:
        """Whether the pipeline is compiled, and which fused or FP8 kernels it uses."""
        info = {"compiled": "yes"} | self._execution_info if self._compiled else self._execution_info
        return info | ({"products": "fp8"} if self._fp8_layers else {})

    def prepare(self, requests: Requests) -> None:
        """Encode the prompts of these requests, and drop the others."""
        if not self._embeddings.is_available:
            return
        eager = not self._compiled
        self._loop.clock.enter()
        with self._running(eager):
            self._embeddings.prepare(requests, self._encode)
        self._loop.clock.leave()

    @contextmanager
    def _running(self, eager: bool) -> Iterator[None]:
        """For calls of the pipeline; an `eager` call neither compiles nor captures. Embeddings stay the same."""
        with (
            self._optimizations.active(self._device, eager),
            self._graphs.enabled(not eager),
            diffusers_patches.forced_attention_mask(self._compiled),
        ):
            yield

    def is_truncated(self, prompt: str) -> bool:
        """Whether the pipeline warned of it when it encoded the prompt."""
        return prompt in self._embeddings.truncated

    def _encode(self, request: SampleRequest) -> list[Any]:
        """Return a request's embeddings, by a call of the pipeline that ends before its first step."""
        self._embeddings.begin()
        with self._loop.text_only():
            self._call([request], self._size, self._steps)
        return self._embeddings.used()

    def generate_async(
        self, requests: Requests, size: Size, on_step: StepCallback, mode: GenerationMode = GenerationMode.DEFAULT
    ) -> PendingBatch:
        """Queue images, or clips."""
        exact, probe = mode is GenerationMode.EXACT, mode is GenerationMode.MEMORY_PROBE
        # A memory probe would compile a graph for every batch size; so would an exact image in fast mode.
        eager = not self._compiled or probe or (exact and self._fast)
        self._embeddings.begin()
        self._loop.clock.enter()
        with (
            self._running(eager),
            exact_matmuls(self._fp8_layers if exact else ()),
            self._loop.running(len(requests), on_step, lambda: self._embeddings.prompt_embeds, exact),
        ):
            images = self._fetch(self._call(requests, size, self._probe_steps if probe else self._steps), size)
        if mode is not GenerationMode.DEFAULT:
            self._loop.clock.reset()
        self._embeddings.evict()
        return images

    @property
    def _probe_steps(self) -> int:
        """The steps of a memory probe, of which image-to-image runs only the fraction `strength`."""
        strength = self._parameters[STRENGTH].default if self._inputs and STRENGTH in self._parameters else 1.0
        return math.ceil(MEMORY_PROBE_STEPS / strength)

    def _input_arguments(self, requests: Requests, size: Size) -> dict[str, Any]:
        """The arguments for image inputs, scaled to the size of the images as diffusers scales them."""
        arguments: dict[str, Any] = {}
        for column, argument in self._inputs.arguments.items() if self._inputs else ():
            assert self._inputs
            if column == STRENGTH:
                strength = requests[0].inputs.strength if requests[0].inputs else None  # all of a batch have this one
                if strength is not None:
                    arguments[argument] = strength
                continue
            images = [request.inputs.images.get(column) if request.inputs else None for request in requests]
            if column in self._inputs.required:  # black images, where only texts are encoded or memory is measured
                images = [image or Image.new("RGB", size[::-1]) for image in images]
            if None in images:
                continue
            if self._inputs.own_resize:  # one at a time, and not in a list: QwenImageEditPipeline scales no list
                arguments[argument] = images[0]
            else:
                arguments[argument] = [self._pipe.image_processor.resize(image, *size) for image in images]
        if self._inputs and "max_area" in self._parameters:
            arguments["max_area"] = size[0] * size[1]  # else FluxKontextPipeline would change the size
        return arguments

    def _call(self, requests: Requests, size: Size, steps: int) -> Any:
        generators = [torch.Generator("cpu").manual_seed(request.seed) for request in requests]
        # New lists in every call: some pipelines write into them.
        arguments: dict[str, Any] = {
            "prompt": [request.prompt for request in requests],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": steps,
            "generator": generators,
            "output_type": "pt",
            "use_resolution_binning": False,  # it would change the size
            "clean_caption": False,  # it would depend on which packages are installed
            **self._guidance,
            **self._frames,
            **self._input_arguments(requests, size),
        }
        if self._guidance.get("true_cfg_scale") != 1.0:
            empty = _EMPTY_NEGATIVE_PROMPT if "true_cfg_scale" in self._guidance else ""
            arguments["negative_prompt"] = [request.negative_prompt or empty for request in requests]
        try:
            with diffusers_patches.per_sample_noise(generators), self._copies.active():
                return self._pipe(**{name: value for name, value in arguments.items() if name in self._parameters})
        except ValueError as error:
            if "height" in str(error) and "width" in str(error):
                raise self._size_error(size, " ".join(str(error).split())) from None
            raise

    def _fetch(self, output: Any, size: Size) -> PendingBatch:
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UserError(
                "The model's safety checker flagged the image and replaced it by a black one.",
                fix="Change the prompt, or remove safety_checker from model_index.json.",
            )
        values: Any = output.frames if hasattr(output, "frames") else output.images
        values = (values if isinstance(values, Tensor) else torch.stack(list(values))).float()
        actual = tuple(values.shape[-2:])
        if actual != size:
            raise self._size_error(size, f"It generates {actual[0]} x {actual[1]} instead.")
        if values.ndim == 5 and values.shape[1] == 1:
            values = values[:, 0]
        pixels = (values * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
        finite = values.isfinite().all()
        self._loop.clock.leave()
        return PendingBatch(pixels, finite, self._loop.clock.batch(), self._dtype)

    def _size_error(self, size: Size, why: str) -> UserError:
        step = self._size_step
        sides = [max(step, round(side / step) * step) for side in size]
        # A wrong size in one row of the table concerns that row alone.
        kind = PipelineError if size == self._size else UserError
        return kind(
            f"{self._name} cannot generate images of {size[0]} x {size[1]} pixels.",
            why,
            f"Both sides must be multiples of {step}: try {sides[0]} x {sides[1]}.",
        )

    @property
    def _size_step(self) -> int:
        """The pixels that one token of the denoiser covers."""
        factor: Any = getattr(self._pipe, "vae_scale_factor", None)
        factor = factor or getattr(self._pipe, "vae_scale_factor_spatial", 8)
        config = denoisers(self._pipe)[0].config
        patch = config.get("patch_size", 1)
        packed = "guidance_embeds" in config or "all_patch_size" in config
        return int(factor) * (2 if packed else patch[-1] if isinstance(patch, (list, tuple)) else int(patch or 1))


def _modules(pipe: Any) -> list[nn.Module]:
    return [component for component in pipe.components.values() if isinstance(component, nn.Module)]


def _replace_scheduler(scheduler: Any, wanted: str) -> Any:
    """A scheduler of another class with the same noise schedule; the name may omit the suffix Scheduler."""
    compatible = {kind.__name__: kind for kind in scheduler.compatibles if "dummy" not in kind.__module__} | {
        type(scheduler).__name__: type(scheduler)
    }
    for name, kind in compatible.items():
        if scheduler_name(name) == scheduler_name(wanted):
            return kind.from_config(scheduler.config)
    names = sorted(name.removesuffix("Scheduler") for name in compatible)
    raise UserError(
        f"The scheduler {wanted} does not fit this model.",
        f"These do: {', '.join(names)}.",
        closest_match(wanted, names),
    )


def _wants_offload(pipe: Any, settings: GenerateSettings, device: torch.device) -> bool:
    if settings.cpu_offload != "auto":
        return settings.cpu_offload
    size = sum(weight.numel() * weight.element_size() for module in _modules(pipe) for weight in module.parameters())
    return size > _MAX_SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory


def _add_adapters(pipe: Any, adapters: Sequence[LoraAdapter]) -> None:
    """Add adapters to a pipeline: merge PEFT's into the denoiser, load others beside it."""
    for adapter in adapters:
        if adapter.is_peft:
            _merge(pipe, adapter)
    unmerged = [adapter for adapter in adapters if not adapter.is_peft]
    if not unmerged:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"{type(pipe).__name__} takes LoRA only as a PEFT folder with an {PEFT_CONFIG}.",
            f"{unmerged[0].path} has none.",
            "For LoRA trained here, give the folder lora/ of its export.",
        )
    names = [f"lora_{index}" for index in range(len(unmerged))]
    for name, adapter in zip(names, unmerged, strict=True):
        try:
            pipe.load_lora_weights(str(adapter.path), adapter_name=name, local_files_only=True)
        except _LORA_ERRORS as error:
            raise _mismatch(adapter, pipe, error) from error
    try:
        pipe.set_adapters(names, [adapter.weight for adapter in unmerged])
    except ValueError as error:
        raise _mismatch(unmerged[0], pipe, error) from error


def _merge(pipe: Any, adapter: LoraAdapter) -> None:
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
    from peft.tuners.lora import LoraLayer

    part = "transformer" if getattr(pipe, "transformer", None) is not None else "unet"
    network = getattr(pipe, part)
    dtype = network.dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of missing keys, which are checked below
            model: Any = PeftModel.from_pretrained(network.float(), str(adapter.path), local_files_only=True)
    except _LORA_ERRORS as error:
        raise _mismatch(adapter, pipe, error) from error
    expected, given = set(get_peft_model_state_dict(model)), set(load_peft_weights(str(adapter.path)))
    if expected != given:  # PEFT loads the rest without an error
        key = min(expected ^ given)
        side = "the adapter" if key in given else "the model"
        raise _mismatch(adapter, pipe, KeyError(f"{key} is only in {side}"))
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scale_layer(adapter.weight)
    setattr(pipe, part, model.merge_and_unload().to(dtype))


def _mismatch(adapter: LoraAdapter, pipe: Any, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(f"The LoRA at {adapter.path} does not fit {type(pipe).__name__}.", f"The reason: {reason}")


class _TruncationCounter(logging.Handler):
    """Counts the warnings of pipelines that a prompt was truncated; the user gets one message for all prompts."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record."""
        self.count += "truncated" in record.getMessage()


_TRUNCATIONS = _TruncationCounter(logging.WARNING)


@dataclass(frozen=True)
class _Stored:
    """A tensor on the CPU, and the device it belongs to."""

    value: Tensor
    device: torch.device

    def restore(self) -> Tensor:
        return copy_to_device(self.value, self.device)  # a copy: the pipeline may change it in place


class PromptEmbeddingCache:
    """Replaces a pipeline's `encode_prompt` and keeps the embeddings of each prompt on the CPU.

    The public arguments `prompt_embeds=` and the like differ from pipeline to pipeline; all of them share
    `encode_prompt`.
    """

    def __init__(self, pipe: Any) -> None:
        encode: Any = getattr(pipe, "encode_prompt", None)
        self.is_available = encode is not None and "image" not in inspect.signature(encode).parameters
        """Some old pipelines encode text elsewhere, and QwenImageEditPipeline encodes an image with it; they generate
        one image at a time."""
        self._embeddings: dict[Hashable, Any] = {}
        self._kept: dict[SampleRequest, set[Hashable]] = {}
        self._used: dict[Hashable, None] = {}
        self.truncated: set[str] = set()
        """Prompts that some text encoder did not read to their end."""
        self.prompt_embeds: Any = None
        """The prompts' embeddings of the first call since `begin`: [B, ...], or a list of B."""
        if self.is_available:
            self._encode: Callable[..., Any] = encode
            self._signature = inspect.signature(self._encode)
            pipe.encode_prompt = functools.wraps(self._encode)(self)

    def begin(self) -> None:
        """Start another batch, or another prompt to be encoded ahead."""
        self.prompt_embeds, self._used = None, {}

    def used(self) -> list[Any]:
        """The stored embeddings that calls since `begin` used, in order."""
        return [self._embeddings[key] for key in self._used]

    def prepare(self, requests: Requests, encode: Callable[[SampleRequest], Any]) -> None:
        """Keep the embeddings of these requests only; those that are missing come from a call of `encode`."""
        wanted = dict.fromkeys(requests)
        self._kept = {request: keys for request, keys in self._kept.items() if request in wanted}
        for request in wanted:
            if request not in self._kept:
                encode(request)
                self._kept[request] = set(self._used)
        self.evict()

    def evict(self) -> None:
        """Delete embeddings that are kept for no request."""
        kept = set().union(*self._kept.values())
        self._embeddings = {key: value for key, value in self._embeddings.items() if key in kept}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts as `encode_prompt` does, joined from the results for each prompt alone."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = bound.arguments
        prompts: Any = given.get("prompt")
        has_embeds = any(value is not None for name, value in given.items() if name.endswith("embeds"))
        if not _is_texts(prompts) or has_embeds:
            return self._encode(*args, **kwargs)
        texts = [
            name
            for name, value in given.items()
            if name.startswith(_TEXT_ARGUMENTS) and _is_texts(value) and len(value) == len(prompts)
        ]
        rows = [self._encode_one(given, {name: given[name][index] for name in texts}) for index in range(len(prompts))]
        joined = _join(rows)
        if self.prompt_embeds is None:
            self.prompt_embeds = joined[0] if isinstance(joined, tuple) else joined
        return joined

    def _encode_one(self, given: dict[str, Any], texts: dict[str, str]) -> Any:
        others = {name: value for name, value in given.items() if name not in texts}
        key = (tuple(texts.items()), repr(others))
        if key not in self._embeddings:
            alone = {name: [text] for name, text in texts.items()}
            bound = inspect.BoundArguments(self._signature, {**given, **alone})  # type: ignore[arg-type]
            before = _TRUNCATIONS.count
            result = self._encode(*bound.args, **bound.kwargs)
            self._embeddings[key] = tree_map_only(
                Tensor, lambda value: _Stored(copy_to_host(value), value.device), result
            )
            if _TRUNCATIONS.count > before:
                self.truncated.add(texts["prompt"])
        self._used[key] = None
        return self._embeddings[key]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _join(rows: Sequence[Any]) -> Any:
    """Join the results for each prompt into the result for the batch."""
    first = rows[0]
    if isinstance(first, _Stored):
        return torch.cat([row.restore() for row in rows]) if _is_batched(first) else first.restore()
    if isinstance(first, tuple):
        return tuple(_join(parts) for parts in zip(*rows, strict=True))
    if isinstance(first, list):  # one embedding for each prompt
        return [part.restore() if isinstance(part, _Stored) else part for row in rows for part in row]
    return first


def _is_batched(stored: _Stored) -> bool:
    """Whether a prompt's tensor is a row of the batch; others are shared by the batch, such as Flux's text_ids."""
    return stored.value.ndim > 0 and stored.value.shape[0] == 1


def _can_batch(one: Any, other: Any) -> bool:
    """Whether the stored embeddings of two prompts can be joined in one batch without changing either."""
    if isinstance(one, _Stored) and isinstance(other, _Stored):
        same_shape = one.value.shape == other.value.shape
        return same_shape and (_is_batched(one) or torch.equal(one.value, other.value))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_can_batch, one, other))
    return bool(one == other)


def text_encoders(pipe: Any) -> list[nn.Module]:
    """The text encoders of a pipeline."""
    components = pipe.components.items()
    return [part for name, part in components if _TEXT_ENCODER.fullmatch(name) and isinstance(part, nn.Module)]


def _disable_kv_cache(encoder: Any) -> None:
    """Turn a language model's key-value cache off: embeddings do not need it, and a CUDA graph cannot return it."""
    config: Any = getattr(encoder, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if getattr(config, "use_cache", False):
        config.use_cache = False
