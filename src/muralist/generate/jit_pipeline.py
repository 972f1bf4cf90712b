"""Images from a JiT model: a training run, a checkpoint, an export, or a file of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.image_size import height_width
from muralist.core.images import to_uint8
from muralist.diffusion.samplers import time_grid
from muralist.generate.optimizations import Optimizations, compile_deterministically
from muralist.generate.pipeline import (
    DTYPES,
    MEMORY_PROBE_STEPS,
    GenerationMode,
    GpuClock,
    PendingBatch,
    Pipeline,
    Requests,
    Size,
    StepCallback,
)
from muralist.kernels.cuda_graphs import CudaGraphs
from muralist.models.configs import IMAGE_CHANNELS
from muralist.models.jit import JiT
from muralist.models.jit_spec import (
    CONFIG_FILE,
    JiTSpec,
    infer_jit_config,
    jit_arguments,
    read_jit_folder,
    spec_from_description,
)
from muralist.models.weights import first_non_finite, read_weights, weights_file
from muralist.settings import GenerateSettings, SampleSettings

_NOISE_BLOCK = 1 << 18  # values drawn at once: 85 images of 32 px; each alone takes longer to start than to draw
_NOISE_CPUS = 8


class JiTPipeline(Pipeline):
    """A JiT network on one device; prompts are names or indices of classes."""

    def __init__(self, spec: JiTSpec, network: nn.Module, settings: GenerateSettings, cpus: int = 1) -> None:
        self._spec, self._network = spec, network
        self._dtype = settings.dtype
        for module in network.modules() if self._dtype != "fp32" else ():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.to(DTYPES[self._dtype])  # once, instead of by autocast in every call: the same images
        device = next(network.parameters()).device
        self._clock = GpuClock(device)
        self._optimizations = Optimizations.choose(settings.compile, device)
        if self._optimizations.compiled:
            compile_deterministically()
            network.compile(dynamic=False)
        wanted = self._optimizations.compiled and self._optimizations.cuda_graphs
        self._graphs = CudaGraphs(wanted and device.type == "cuda")
        self._forward = self._graphs.wrap(network.__call__)
        self._sampling = _sample_settings(settings)
        # Noise takes a CPU core a second for a hundred images of 256 px; the GPU would be idle meanwhile.
        # In one thread: several would wait for the interpreter, and so would the one that feeds the GPU. Beside a GPU,
        # several CPUs compute its operations; on a CPU, threads that start later would compute a matmul with as many.
        several = partial(torch.set_num_threads, min(_NOISE_CPUS, max(1, cpus // 2)))
        self._noise_thread = ThreadPoolExecutor(1, "noise", several if device.type == "cuda" else None)
        self._noise: dict[int, tuple[Future[Tensor], int]] = {}  # by seed: a block of noise, and the row in it

    @classmethod
    def load(
        cls, settings: GenerateSettings, device: torch.device, description: Mapping[str, Any], cpus: int = 1
    ) -> JiTPipeline:
        """Load the weights onto a device; `cpus` draw noise."""
        path = Path(settings.model_path)
        if (path / CONFIG_FILE).is_file():
            config, weights = read_jit_folder(path)
        else:
            weights = read_weights(path, settings.weights)
            config = infer_jit_config(weights)
        if name := first_non_finite(weights.items()):
            raise UserError(
                f"{weights_file(path, settings.weights)} holds NaN or Inf in the tensor {name}.",
                "Every image would be made of such values.",
                "Use a checkpoint from before the weights diverged, or other --weights.",
            )
        with torch.device("meta"):
            network = JiT(**jit_arguments(config))
        # Copied: a mapped file's tensors have any alignment, and on a CPU a matmul's last bits depend on it.
        network.to_empty(device=device).load_state_dict(weights)
        return cls(spec_from_description(description), network.eval().requires_grad_(False), settings, cpus)

    def configure(self, settings: GenerateSettings) -> None:
        """Sample with other settings."""
        self._sampling = _sample_settings(settings)

    def supports_batching(self) -> bool:
        """Always: an image depends on its index in the batch alone."""
        return True

    def execution_info(self) -> dict[str, str]:
        """Whether the network is compiled."""
        return {"compiled": "yes"} if self._optimizations.compiled else {}

    def prepare(self, requests: Requests) -> None:
        """Draw the noise of these requests in a thread, while the device is busy."""
        seeds = dict.fromkeys(request.seed for request in requests)  # in order: the first are needed first
        kept = {seed: place for seed, place in self._noise.items() if seed in seeds}
        for block in {block for block, _ in self._noise.values()} - {block for block, _ in kept.values()}:
            block.cancel()
        self._noise, new = kept, [seed for seed in seeds if seed not in kept]
        at_once = max(1, _NOISE_BLOCK // (IMAGE_CHANNELS * math.prod(height_width(self._spec.img_size))))
        for start in range(0, len(new), at_once):
            drawn = new[start : start + at_once]
            block = self._noise_thread.submit(self._spec.sample_noise, drawn)
            self._noise |= {seed: (block, row) for row, seed in enumerate(drawn)}

    def generate_async(
        self, requests: Requests, size: Size, on_step: StepCallback, mode: GenerationMode = GenerationMode.DEFAULT
    ) -> PendingBatch:
        """Queue images of the model's one size."""
        height, width = height_width(self._spec.img_size)
        if size != (height, width):
            raise UserError(  # of a row of the table: the command's own size was checked before
                f"This JiT model generates images of {width} x {height} pixels, not {size[1]} x {size[0]}.",
                fix="Leave height and width out, also in the table.",
            )
        # A memory probe would compile a graph for every batch size.
        eager = mode is GenerationMode.MEMORY_PROBE
        probing = eager and not self._spec.distilled  # whose steps are few and its own
        sampling = self._sampling.model_copy(update={"steps": MEMORY_PROBE_STEPS}) if probing else self._sampling
        device = next(self._network.parameters()).device
        noise = self._noise_for([request.seed for request in requests])
        self._clock.enter()
        with (
            self._optimizations.active(device, eager),
            self._graphs.enabled(not eager),
            torch.autocast(device.type, DTYPES[self._dtype], enabled=self._dtype != "fp32"),
        ):
            network = _NetworkWithCallback(self._network, self._forward, on_step)
            prompts = [request.prompt for request in requests]
            images = self._spec.sample_from(network, noise, prompts, sampling, self._optimizations.compiled)
        pixels, finite = to_uint8(images).contiguous(), images.isfinite().all()
        self._clock.leave()
        pending = PendingBatch(pixels, finite, self._clock.batch(), self._dtype)
        if mode is not GenerationMode.DEFAULT:
            self._clock.reset()
        return pending

    def _noise_for(self, seeds: Sequence[int]) -> Tensor:
        if not all(seed in self._noise for seed in seeds):  # not prepared
            return self._spec.sample_noise(seeds)
        try:
            return torch.stack([block.result()[row] for block, row in map(self._noise.__getitem__, seeds)])
        except Exception:
            self._noise.clear()  # a retry would get the same exception
            raise


class _NetworkWithCallback(nn.Module):
    """A network that calls back at every pass, outside the compiled code."""

    def __init__(self, network: nn.Module, run: Callable[..., Tensor], on_step: StepCallback) -> None:
        super().__init__()
        self.network, self.run, self.on_step = network, run, on_step

    def forward(self, *args: Tensor) -> Tensor:
        self.on_step()
        return self.run(*args)


def _sample_settings(settings: GenerateSettings) -> SampleSettings:
    """The sampler's settings; --cfg_truncation_step shortens the guidance interval."""
    assert settings.num_inference_steps != "auto", "resolved by inspect_model"
    low, high = settings.guidance_interval
    sampling = SampleSettings(
        steps=settings.num_inference_steps,
        guidance=settings.guidance_scale,
        interval=(low, high),
        solver=settings.scheduler or "auto",  # type: ignore[arg-type]  # checked by inspect_model
        official_last_step=settings.official_last_step,
    )
    if settings.cfg_truncation_step is None:
        return sampling
    # From the sampler's own grid: k / n may round to the next float above it.
    times = time_grid(sampling.step_count, JiTSpec.solver(sampling))
    end = min(high, times[min(settings.cfg_truncation_step, sampling.step_count)])
    changes = {"interval": (low, end)} if end > low else {"guidance": 1.0}
    return sampling.model_copy(update=changes)
