"""Images from any text-to-image or text-to-video pipeline in diffusers layout."""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
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
from transformers.utils import logging as transformers_logging

from muralist.core.errors import UserError
from muralist.data.image_inputs import STRENGTH
from muralist.generate import diffusers_patches
from muralist.generate.denoising import DenoisingLoop, denoisers
from muralist.generate.lora_check import PEFT_CONFIG
from muralist.generate.model_info import FP8_PIPELINES, STEP_CACHING, LoraAdapter, ModelInfo, check_adapters
from muralist.generate.noise_schedulers import (
    SchedulerChoice,
    build_scheduler,
    check_effect,
    choose_scheduler,
    eta_argument,
)
from muralist.generate.optimizations import (
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
    Truncation,
)
from muralist.generate.text_embeddings import (
    EncoderShapes,
    PromptEmbeddingCache,
    TokenCounter,
    can_batch,
    disable_kv_cache,
    has_other_mask,
    text_encoders,
)
from muralist.kernels.cuda_graphs import CudaGraphs
from muralist.kernels.fp8 import has_fp8
from muralist.models.components import checked_loading
from muralist.models.integrity import read_json
from muralist.models.pipeline_class import PipelineInputs
from muralist.models.weights import check_finite_file, first_non_finite
from muralist.settings import GenerateSettings

_MAX_SHARE_OF_GPU = 0.6  # a larger model leaves too little memory for its activations
_SHORT_PROMPT, _LONG_PROMPT = "a", "one of many words " * 12
_TRUNCATED_PROMPT = "one of many words " * 300  # fills every token that a text encoder reads
_TRACED_SIZE = (128, 128)  # small, and valid for every pipeline known
_INTERMEDIATE_TIMESTEP_STEPS = 2  # the only number of steps for which Sana Sprint accepts its own default
_EMPTY_NEGATIVE_PROMPT = " "  # pipelines with true_cfg_scale guide only where a negative prompt is given
_LOAD_ERRORS = (OSError, ValueError, AttributeError, ImportError, RuntimeError, SafetensorError)
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
        self._pipe, self._name, self._inputs = pipe, type(pipe).__name__, inputs
        self._parameters = inspect.signature(pipe.__call__).parameters
        self._check_pipeline()
        self._read_sampling(settings)
        self._dtype = settings.dtype
        self._device, self._optimizations = device, optimizations
        step_caching = STEP_CACHING[settings.preset]
        networks = denoisers(pipe)
        self._fp8_layers: list[Fp8Linear] = []
        if step_caching and self._name in FP8_PIPELINES and has_fp8(device):
            blocks = (diffusers_patches.repeated_blocks(network) for network in networks)
            self._fp8_layers = use_fp8(block for each in blocks for block in each)
        self._graphs = CudaGraphs(optimizations.cuda_graphs and device.type == "cuda")
        self._copies = NonBlockingCopies(device)
        self._tokens = TokenCounter(pipe)
        length_step = diffusers_patches.text_length_step(networks[0])
        self._embeddings = PromptEmbeddingCache(pipe, self._tokens, length_step)
        self._encoder_shapes = EncoderShapes(text_encoders(pipe))
        self._loop = DenoisingLoop(
            pipe, self._steps, settings.cfg_truncation_step, step_caching, device, self._graphs, self._copies
        )
        self._execution_info = optimizations.apply(pipe, networks, device)
        for encoder in text_encoders(pipe):
            disable_kv_cache(encoder)
            encoder.forward = self._copies.suspended(self._graphs.wrap(encoder.forward))
        if getattr(pipe, "vae", None) is not None:
            pipe.vae.decode = self._copies.suspended(pipe.vae.decode)
            if inputs:
                pipe.vae.encode = self._copies.suspended(pipe.vae.encode)
        self._reset_text_cache = diffusers_patches.cache_text_embeddings(pipe)

    def _read_sampling(self, settings: GenerateSettings) -> None:
        assert settings.height and settings.width, "resolved by inspect_model"
        assert settings.guidance_scale != "auto" and settings.num_inference_steps != "auto", "resolved by inspect_model"
        self._size, self._steps = (settings.height, settings.width), settings.num_inference_steps
        self._timesteps = list(settings.timesteps)
        self._eta = eta_argument(settings.scheduler_options)
        self._guidance = self._guidance_arguments(settings.guidance_scale)
        self._frames = self._frame_arguments(settings)

    def configure(self, settings: GenerateSettings) -> None:
        """Sample with other settings."""
        self._read_sampling(settings)
        self._loop.configure(self._steps, settings.cfg_truncation_step)
        self.__dict__.pop("_text_batching", None)  # without guidance there are no negative prompts

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
        # Instead of one warning for each long prompt of ten thousand, TokenCounter counts them.
        diffusers_logging.disable_default_handler()
        diffusers_logging.add_handler(_SILENT)  # a logger keeps a handler once
        replaces_scheduler = settings.scheduler is not None or bool(settings.scheduler_options)
        if replaces_scheduler:  # before the weights are read
            _check_scheduler(folder / "scheduler", settings)
        try:
            with checked_loading():
                pipe: Any = pipeline_class.from_pretrained(
                    folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **(components or {})
                )
        except (*_LOAD_ERRORS, pickle.UnpicklingError) as error:
            is_unsafe = isinstance(error, pickle.UnpicklingError)  # torch's message is a paragraph of advice
            reason = "a .bin file asks to run code" if is_unsafe else " ".join(str(error).split())[:300]
            raise UserError(
                f"The pipeline in {folder} cannot be loaded.",
                f"The reason: {reason}",
                "Check that the folder is complete.",
            ) from error
        pipe.set_progress_bar_config(disable=True)
        for module in _modules(pipe):
            module.eval().requires_grad_(False)
        if replaces_scheduler:
            pipe.scheduler = build_scheduler(pipe.scheduler, _choose_scheduler(pipe.scheduler, settings))
        _add_adapters(pipe, check_adapters(settings.lora))
        offloaded = device.type == "cuda" and _wants_offload(pipe, settings, device)
        optimizations = optimizations or Optimizations.choose(settings.compile, device)
        if not offloaded:  # before the optimizations, which quantize and reorder weights faster on the GPU
            pipe.to(device)
        _check_finite(pipe, folder, settings, components or {})  # on the GPU, which reads its memory in milliseconds
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
        """Whether embeddings of one shape can be joined, and image inputs are scaled to one size."""
        return self._text_batching is not _TextBatching.NEVER and not (self._inputs and self._inputs.own_resize)

    def groups_by_text(self) -> bool:
        """Whether embeddings are as long as the prompt."""
        return self._text_batching is _TextBatching.SAME_LENGTH

    @cached_property
    def _text_batching(self) -> _TextBatching:
        with self._encoder_shapes.recorded():
            short, long = (self._encode(SampleRequest(text, text, 0)) for text in (_SHORT_PROMPT, _LONG_PROMPT))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the embeddings are still being copied to the host
        self._embeddings.evict()
        self._reset_text_cache()  # these were encoded before it was known whether masks are forced
        batching = _TextBatching.NEVER
        if short and can_batch(short, long):
            # Only a mask can tell a denoiser how long a text in a tensor of fixed shape is.
            masked = has_other_mask(short, long)
            if not masked or self._runs_the_same_operators(_SHORT_PROMPT, _TRUNCATED_PROMPT):
                batching = _TextBatching.ANY_LENGTH
        elif short and can_batch(short, short):
            self._embeddings.varies = True
            other = self._other_prompt_of_group(_SHORT_PROMPT)
            if self._runs_the_same_operators(_SHORT_PROMPT, other):
                batching = _TextBatching.SAME_LENGTH
        self._embeddings.evict()
        self._reset_text_cache()
        return batching

    def _other_prompt_of_group(self, prompt: str) -> str:
        """Return a longer prompt of the same text group where there is one, else one of the same length."""
        others = (f"{prompt} {prompt}", f"{prompt}{prompt}", "b")
        groups = [self._text_shapes([SampleRequest(text, text, 0)]) for text in (prompt, *others)]
        return next((other for other, group in zip(others, groups[1:], strict=True) if group == groups[0]), prompt)

    def _runs_the_same_operators(self, prompt: str, other: str) -> bool:
        """Whether the denoiser runs the same operators on the same shapes, whichever of two prompts are in a batch.

        Some shorten a batch to its longest text, or use no mask where all texts are equally long (Lumina2). The last
        bits of an image would then depend on its neighbors.
        """
        short, long = (SampleRequest(text, text, 0) for text in (prompt, other))
        batches = ((short, short), (short, long), (long, long))
        try:
            traces = [self._trace(batch, _TRACED_SIZE) for batch in batches]
        except UserError:  # this pipeline needs another size
            traces = [self._trace(batch, self._size) for batch in batches]
        return traces[0] == traces[1] == traces[2]

    def _trace(self, requests: Requests, size: Size) -> list[tuple[Any, ...]]:
        """Return the operators of the denoiser's first step."""
        eagerly = self._optimizations.active(self._device, True)
        with eagerly, self._graphs.enabled(False), self._loop.tracing(len(requests)) as trace:
            self._call(requests, size, self._probe_steps, num_frames=1)
        return trace.operators

    def text_groups(self, requests: Requests) -> list[str]:
        """The shapes of each request's embeddings, with the padding that they get in a batch."""
        return self._text_shapes(requests) if self.groups_by_text() else super().text_groups(requests)

    def _text_shapes(self, requests: Requests) -> list[str]:
        self._reset_text_cache()
        with self._encoder_shapes.predicted(), self._embeddings.shapes_only() as calls, self._loop.text_only():
            self._call(requests, self._size, self._steps)
        self._reset_text_cache()  # it holds the predicted zeros
        return [repr(shapes) for shapes in zip(*calls, strict=True)]

    @property
    def _compiled(self) -> bool:
        """Where embeddings are as long as the prompt, every length would compile its own graph."""
        return self._optimizations.compiled and self._text_batching is _TextBatching.ANY_LENGTH

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

    def truncation(self, prompt: str) -> Truncation:
        """What the tokenizers cut off when they encoded the prompt."""
        return self._tokens.truncated.get(prompt, {})

    def ignores_negative_prompts(self) -> str:
        """Why they have no effect: the pipeline takes none, or runs its denoiser once per step."""
        if "negative_prompt" not in self._parameters:
            return f"{self._name} takes none"
        return "" if self._loop.is_guided else f"{self._name} runs without classifier-free guidance here"

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
        eager = not self._compiled or probe or (exact and self._loop.caches_steps)
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
        """The steps of a memory probe or a trace, of which image-to-image runs only the fraction `strength`."""
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
            if self._inputs.own_resize:  # one at a time
                arguments[argument] = images[0]
            else:
                arguments[argument] = [self._pipe.image_processor.resize(image, *size) for image in images]
        if self._inputs and "max_area" in self._parameters:
            arguments["max_area"] = size[0] * size[1]  # else FluxKontextPipeline would change the size
        return arguments

    def _call(self, requests: Requests, size: Size, steps: int, **changes: Any) -> Any:
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
            **self._eta,
            **changes,
        }
        if steps != _INTERMEDIATE_TIMESTEP_STEPS:
            arguments["intermediate_timesteps"] = None
        if self._timesteps and steps == self._steps:  # not in a memory probe
            arguments["timesteps"] = list(self._timesteps)
        if self._guidance.get("true_cfg_scale") != 1.0:
            empty = _EMPTY_NEGATIVE_PROMPT if "true_cfg_scale" in self._guidance else ""
            arguments["negative_prompt"] = [request.negative_prompt or empty for request in requests]
        try:
            # Where a pipeline has encode_prompt, its wrapper counts each prompt by itself.
            texts = (*arguments["prompt"], *arguments.get("negative_prompt", ()))
            counting = self._tokens.counting(texts)
            with diffusers_patches.per_sample_noise(generators), self._copies.active(), counting:
                return self._pipe(**{name: value for name, value in arguments.items() if name in self._parameters})
        except ValueError as error:
            if "height" in str(error) and "width" in str(error):
                raise self._size_error(size, " ".join(str(error).split())) from None
            if "set_timesteps" in str(error):  # custom sigmas or time steps
                scheduler = type(self._pipe.scheduler).__name__
                raise PipelineError(
                    f"{self._name} cannot use {scheduler}.",
                    "The pipeline computes its own sigmas, which this scheduler does not take.",
                    "Choose another --scheduler, such as euler or unipc.",
                ) from None
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
            raise self._size_error(size, f"It generates {actual[1]} x {actual[0]} instead.")
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
            f"{self._name} cannot generate images of {size[1]} x {size[0]} pixels.",
            why,
            f"Both sides must be multiples of {step}: try {sides[1]} x {sides[0]}.",
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


def _check_finite(pipe: Any, folder: Path, settings: GenerateSettings, replaced: Collection[str]) -> None:
    """Refuse a model with NaN or Inf in its weights: no image could be generated with it."""
    for part, module in pipe.components.items():
        if not isinstance(module, nn.Module) or not (name := first_non_finite(module.named_parameters())):
            continue
        place = Path(settings.model_path) if part in replaced else folder / part
        for file in sorted(place.glob("*.safetensors")):
            check_finite_file(file, "Copy the model again, or use a checkpoint from before its weights diverged.")
        raise UserError(
            f"The weights {name} of {place} hold NaN or Inf in {settings.dtype}.",
            f"{part} has weights that {settings.dtype} cannot represent.",
            "Try --dtype bf16 or fp32." if settings.dtype == "fp16" else "Copy the model again.",
        )


def _choose_scheduler(scheduler: Any, settings: GenerateSettings) -> SchedulerChoice:
    config = {**scheduler.config, "_class_name": type(scheduler).__name__}
    return choose_scheduler(config, settings.scheduler, settings.scheduler_options)


def _check_scheduler(folder: Path, settings: GenerateSettings) -> None:
    """Refuse options that fail or have no effect; the pipeline's own scheduler is in the folder."""
    kind = getattr(diffusers, str(read_json(folder / "scheduler_config.json").get("_class_name")), None)
    if kind is not None:
        own = kind.from_pretrained(folder, local_files_only=True)
        check_effect(own, _choose_scheduler(own, settings), int(settings.num_inference_steps), settings.timesteps)


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
            "For LoRA trained here, `muralist export RUN FOLDER --lora_format peft` writes one.",
        )
    names = [f"lora_{index}" for index in range(len(unmerged))]
    for name, adapter in zip(names, unmerged, strict=True):
        try:
            pipe.load_lora_weights(str(adapter.path), adapter_name=name, local_files_only=True)
        except _LORA_ERRORS as error:
            raise _mismatch(adapter, pipe, error) from error
        if not any(name in loaded for loaded in pipe.get_list_adapters().values()):  # diffusers only logs a warning
            raise _mismatch(adapter, pipe, KeyError("none of its layers is in the model"))
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


_SILENT = logging.NullHandler()


class _TextBatching(Enum):
    """Which requests can share a call of the pipeline."""

    ANY_LENGTH = "all: embeddings have one shape"
    SAME_LENGTH = "those whose embeddings have the same shape"
    NEVER = "none"
