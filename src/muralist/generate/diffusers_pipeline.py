"""Images from any text-to-image or text-to-video pipeline in diffusers layout."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from muralist.core.errors import UserError, closest_match
from muralist.generate.denoising import DenoisingLoop, denoisers
from muralist.generate.diffusers_patches import (
    cache_text_embeddings,
    forced_attention_mask,
    per_sample_noise,
    repeated_blocks,
)
from muralist.generate.gpu_execution import CudaGraphs, NonBlockingCopies, PendingCopy
from muralist.generate.loras import add_adapters, check_adapters
from muralist.generate.optimizations import Fp8Linear, Optimizations, exact_matmuls, use_fp8
from muralist.generate.pipeline import (
    MEMORY_PROBE_STEPS,
    GeneratedBatch,
    GenerationMode,
    PendingBatch,
    Pipeline,
    PipelineError,
    SampleRequest,
    StepCallback,
    non_finite_error,
)
from muralist.generate.prompt_encoding import (
    PromptEmbeddingCache,
    can_batch,
    count_truncations,
    disable_kv_cache,
    text_encoders,
)
from muralist.generate.step_caching import step_cache_for
from muralist.kernels.fp8 import has_fp8
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MAX_SHARE_OF_GPU = 0.6  # a larger model leaves too little memory for its activations
_SHORT_PROMPT, _LONG_PROMPT = "a", "one of many words " * 12
_EMPTY_NEGATIVE_PROMPT = " "  # pipelines with true_cfg_scale guide only where a negative prompt is given


class DiffusersPipeline(Pipeline):
    """A diffusers pipeline on one device."""

    def __init__(
        self, pipe: Any, settings: GenerateSettings, device: torch.device, optimizations: Optimizations
    ) -> None:
        assert settings.height and settings.width and settings.guidance_scale != "auto", "resolved by inspect_model"
        self._pipe, self._size = pipe, (settings.height, settings.width)
        self._name = type(pipe).__name__
        self._parameters = inspect.signature(pipe.__call__).parameters
        self._check_pipeline()
        self._steps = settings.num_inference_steps
        self._guidance = self._guidance_arguments(settings.guidance_scale)
        self._frames = self._frame_arguments(settings)
        self._dtype = settings.dtype
        self._device, self._optimizations = device, optimizations
        self._fast = settings.preset == "fast"
        step_cache = step_cache_for(self._name) if self._fast else None
        networks = denoisers(pipe)
        self._fp8_layers: list[Fp8Linear] = []
        if step_cache is not None and step_cache.fp8 and has_fp8(device):
            self._fp8_layers = use_fp8(block for network in networks for block in repeated_blocks(network))
        self._graphs = CudaGraphs.on_device(optimizations.cuda_graphs, device)
        self._copies = NonBlockingCopies(device)
        self._loop = DenoisingLoop(
            pipe, self._steps, settings.cfg_truncation_step, step_cache, device, self._graphs, self._copies
        )
        self._execution_info = optimizations.apply(pipe, networks, device)
        for encoder in text_encoders(pipe):
            disable_kv_cache(encoder)
            encoder.forward = self._copies.suspended(self._graphs.wrap(encoder.forward))
        if getattr(pipe, "vae", None) is not None:
            pipe.vae.decode = self._copies.suspended(pipe.vae.decode)
        self._reset_text_cache = cache_text_embeddings(pipe)
        self._embeddings = PromptEmbeddingCache(pipe) if hasattr(pipe, "encode_prompt") else None

    @classmethod
    def load(
        cls,
        settings: GenerateSettings,
        device: torch.device,
        folder: Path | None = None,
        components: dict[str, Any] | None = None,
        optimizations: Optimizations | None = None,
    ) -> DiffusersPipeline:
        """Load a pipeline's folder onto a device; `components` replace those in the folder."""
        folder, dtype = folder or Path(settings.model_path), DTYPES[settings.dtype]
        for library in (diffusers_logging, transformers_logging):
            library.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        count_truncations()  # instead of one warning for each long prompt of ten thousand
        try:
            pipe: Any = DiffusionPipeline.from_pretrained(
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
            pipe.scheduler = replace_scheduler(pipe.scheduler, settings.scheduler)
        add_adapters(pipe, check_adapters(settings.lora))
        offloaded = device.type == "cuda" and _wants_offload(pipe, settings, device)
        optimizations = optimizations or Optimizations.choose(settings.compile, device)
        if not offloaded:  # before the optimizations, which quantize and reorder weights faster on the GPU
            pipe.to(device)
        pipeline = cls(pipe, settings, device, optimizations)
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
            and name != "prompt"
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
        """Whether prompts of any length have embeddings of one shape."""
        return self._supports_batching

    @cached_property
    def _supports_batching(self) -> bool:
        if self._embeddings is None:
            return False
        short, long = (self._encode(SampleRequest(text, text, 0)) for text in (_SHORT_PROMPT, _LONG_PROMPT))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the embeddings are still being copied to the host
        self._embeddings.evict()
        self._reset_text_cache()  # these were encoded before it was known whether masks are forced
        return bool(short) and can_batch(short, long)

    @property
    def _compiled(self) -> bool:
        """Where embeddings are as long as the prompt, every length would compile its own graph."""
        return self._optimizations.compiled and self.supports_batching()

    def execution_info(self) -> dict[str, str]:
        """Whether the pipeline is compiled, and which fused or FP8 kernels it uses."""
        info = {"compiled": "yes"} | self._execution_info if self._compiled else self._execution_info
        return info | ({"products": "fp8"} if self._fp8_layers else {})

    def prepare(self, requests: Sequence[SampleRequest]) -> None:
        """Encode the prompts of these requests, and drop the others."""
        if self._embeddings is None:
            return
        eager = not self._compiled
        self._loop.clock.enter()
        with self._running(eager):
            for request in self._embeddings.retain(requests):
                self._encode(request)
                self._embeddings.keep_for(request)
        self._embeddings.evict()
        self._loop.clock.leave()

    @contextmanager
    def _running(self, eager: bool) -> Iterator[None]:
        """For calls of the pipeline; an `eager` call neither compiles nor captures. Embeddings stay the same."""
        with (
            self._optimizations.active(self._device, eager),
            self._graphs.enabled(not eager),
            forced_attention_mask(self._compiled),
        ):
            yield

    def is_truncated(self, prompt: str) -> bool:
        """Whether the pipeline warned of it when it encoded the prompt."""
        return self._embeddings is not None and prompt in self._embeddings.truncated

    def _encode(self, request: SampleRequest) -> list[Any]:
        """Return a request's embeddings, by a call of the pipeline that ends before its first step."""
        assert self._embeddings is not None
        self._embeddings.begin()
        with self._loop.text_only():
            self._call([request], self._size, self._steps)
        return self._embeddings.used()

    def generate_async(
        self,
        requests: Sequence[SampleRequest],
        size: tuple[int, int],
        on_step: StepCallback,
        mode: GenerationMode = GenerationMode.DEFAULT,
    ) -> PendingBatch:
        """Queue images, or clips; generate them one at a time where the pipeline does not support batching."""
        if len(requests) > 1 and not self.supports_batching():
            return GeneratedBatch([self.generate([request], size, on_step, mode)[0] for request in requests])
        embeddings, exact = self._embeddings, mode is GenerationMode.EXACT
        # A memory probe would compile a graph for every batch size; so would an exact image in fast mode.
        eager = not self._compiled or mode is GenerationMode.MEMORY_PROBE or (exact and self._fast)
        if embeddings is not None:
            embeddings.begin()
        self._loop.clock.enter()
        with (
            self._running(eager),
            exact_matmuls(self._fp8_layers if exact else ()),
            self._loop.running(
                len(requests), on_step, lambda: embeddings.prompt_embeds if embeddings is not None else None, exact
            ),
        ):
            steps = MEMORY_PROBE_STEPS if mode is GenerationMode.MEMORY_PROBE else self._steps
            images = self._fetch(self._call(requests, size, steps), size)
        if mode is not GenerationMode.DEFAULT:
            self._loop.clock.reset()
        if embeddings is not None:
            embeddings.evict()
        return images

    def _call(self, requests: Sequence[SampleRequest], size: tuple[int, int], steps: int) -> Any:
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
        }
        if self._guidance.get("true_cfg_scale") != 1.0:
            empty = _EMPTY_NEGATIVE_PROMPT if "true_cfg_scale" in self._guidance else ""
            arguments["negative_prompt"] = [request.negative_prompt or empty for request in requests]
        try:
            with per_sample_noise(generators), self._copies.active():
                return self._pipe(**{name: value for name, value in arguments.items() if name in self._parameters})
        except ValueError as error:
            if "height" in str(error) and "width" in str(error):
                raise self._size_error(size, " ".join(str(error).split())) from None
            raise

    def _fetch(self, output: Any, size: tuple[int, int]) -> PendingBatch:
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UserError(
                "The model's safety checker flagged the image and replaced it by a black one.",
                fix="Change the prompt, or remove safety_checker from model_index.json.",
            )
        values: Any = output.frames if hasattr(output, "frames") else output.images
        values = (values if isinstance(values, torch.Tensor) else torch.stack(list(values))).float()
        actual = tuple(values.shape[-2:])
        if actual != size:
            raise self._size_error(size, f"It generates {actual[0]} x {actual[1]} instead.")
        if values.ndim == 5 and values.shape[1] == 1:
            values = values[:, 0]
        pixels = (values * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
        finite = values.isfinite().all()
        self._loop.clock.leave()
        return PendingCopy(pixels, finite, self._loop.clock.batch(), non_finite_error(self._dtype))

    def _size_error(self, size: tuple[int, int], why: str) -> UserError:
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


def _modules(pipe: Any) -> list[torch.nn.Module]:
    return [component for component in pipe.components.values() if isinstance(component, torch.nn.Module)]


def replace_scheduler(scheduler: Any, wanted: str) -> Any:
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
