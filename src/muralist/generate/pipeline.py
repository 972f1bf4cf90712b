"""The `Pipeline` interface between workers and models, images that are still being computed, and loading a model."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from muralist.core.compile_cache import imports_without_gc
from muralist.core.errors import UserError
from muralist.core.hardware import copy_to_host
from muralist.data.image_inputs import LoadedInputs
from muralist.generate.model_info import ModelInfo, inspect_model
from muralist.settings import GenerateSettings

StepCallback = Callable[[], None]
"""Called at every denoising step: the heartbeat that distinguishes a slow worker from a hanging one."""
MEMORY_PROBE_STEPS = 2
SAMPLING_SETTINGS = (
    "num_inference_steps",
    "guidance_scale",
    "guidance_interval",
    "official_last_step",
    "cfg_truncation_step",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "enable_half_frame",
    "seed_start",
)
"""Settings that a loaded pipeline may change from call to call; the others are those of the loaded model."""
_OVERFLOW_FIXES = {
    "fp16": "Try --dtype bf16 or fp32.",
    "bf16": "Try --dtype fp32, or another --guidance_scale or --scheduler.",
    "fp32": "Try another --guidance_scale, --num_inference_steps or --scheduler.",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class GenerationMode(Enum):
    """How a batch is generated."""

    DEFAULT = "as the settings say"
    EXACT = "as --preset exact would, with the same steps"
    MEMORY_PROBE = "in two steps, to measure whether a batch size fits into memory"


class GpuClock:
    """Measures for which fraction of the time a GPU had work, with CUDA events; on other devices it measures nothing.

    `enter` and `leave` mark where the host begins and ends to fill the queue. The GPU's time between a `leave` and the
    next `enter` is idle time. Gaps between the kernels of one filling are not seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Treat the next batch as the first: the work before it was not ordinary generation."""
        self._left: Any = None
        self._last_end: Any = None
        self._gaps: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        """Mark that work follows."""
        if self._left is not None:
            self._gaps.append((self._left, self._event()))
            self._left = None

    def leave(self) -> None:
        """Mark that no work follows for now."""
        if self._is_gpu:
            self._left = self._event()

    def batch(self) -> Callable[[], float] | None:
        """After `leave`, return a function that waits for the batch and computes the busy fraction of its time.

        Its time begins at the end of the last batch; None for the first batch.
        """
        start, end, gaps = self._last_end, self._left, self._gaps
        self._last_end, self._gaps = end, []

        def busy() -> float:
            end.synchronize()
            total = start.elapsed_time(end)
            idle = sum(before.elapsed_time(after) for before, after in gaps)
            return max(0.0, 1.0 - idle / total) if total > 0 else 1.0

        return busy if start is not None else None

    @staticmethod
    def _event() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class PendingBatch:
    """A batch of images that a device may still be computing, and that is copied to the host."""

    def __init__(self, pixels: Tensor, finite: Tensor, busy: Callable[[], float] | None, dtype: str) -> None:
        """Start copying pixels [B, ..., H, W, 3] in uint8, made in `dtype`; `wait` raises an error unless `finite`."""
        self._pixels, self._finite = copy_to_host(pixels), copy_to_host(finite)
        self._busy, self._dtype = busy, dtype
        self._copied: Any = None
        if pixels.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.ready = self._copied is None
        """Whether `wait` returns at once because no device is working on the images."""
        self.gpu_busy: float | None = None
        """After `wait`: for which fraction of the time since the last batch the GPU had work; None if unknown."""

    def wait(self) -> list[np.ndarray]:
        """Return the images: uint8 [H, W, 3] each, or clips [F, H, W, 3]."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._busy is not None:
            self.gpu_busy = self._busy()
        if not bool(self._finite):
            raise UserError(
                "The model produced NaN or Inf values instead of an image.",
                f"Its weights are finite; some values overflowed in {self._dtype}.",
                _OVERFLOW_FIXES[self._dtype],
            )
        return list(self._pixels.numpy())


Truncation = dict[str, dict[str, Any]]
"""By text encoder: `class`, the `tokens` of a prompt, and the `limit` to which they were truncated."""


class SampleRequest(NamedTuple):
    """One image to generate."""

    prompt: str
    negative_prompt: str
    seed: int
    inputs: LoadedInputs | None = None  # None: none, or, to encode text or probe memory, images that stand for them


Requests = Sequence[SampleRequest]
Size = tuple[int, int]
"""Height and width."""


class Pipeline(ABC):
    """A loaded model on one device.

    An image depends on its request, its size, the number of requests of the call and its index among them, never on the
    other requests.
    """

    @abstractmethod
    def configure(self, settings: GenerateSettings) -> None:
        """Sample with the `SAMPLING_SETTINGS` of these settings from now on; the model stays as it was loaded."""

    @abstractmethod
    def supports_batching(self) -> bool:
        """Whether that holds for several images in one call; if not, workers generate one image at a time."""

    def groups_by_text(self) -> bool:
        """Whether only requests of one text group can share a call."""
        return False

    def text_groups(self, requests: Requests) -> list[str]:
        """The text group of each request, found without running a text encoder."""
        return [""] * len(requests)

    @abstractmethod
    def execution_info(self) -> dict[str, str]:
        """Everything that an image's last bits depend on besides the settings, the device and the library versions."""

    @abstractmethod
    def prepare(self, requests: Requests) -> None:
        """Encode prompts or draw noise for upcoming requests, and drop the results of all others."""

    def truncation(self, prompt: str) -> Truncation:
        """The text encoders that did not read a generated prompt to its end; empty for none."""
        return {}

    def ignores_negative_prompts(self) -> str:
        """Why negative prompts have no effect, as far as the last batch shows; empty if they have."""
        return "this model takes none"

    @abstractmethod
    def generate_async(
        self, requests: Requests, size: Size, on_step: StepCallback, mode: GenerationMode = GenerationMode.DEFAULT
    ) -> PendingBatch:
        """Queue images of a height and width on the device; another batch may be queued before they are complete."""

    def generate(
        self, requests: Requests, size: Size, on_step: StepCallback, mode: GenerationMode = GenerationMode.DEFAULT
    ) -> list[np.ndarray]:
        """Generate images of a height and width."""
        return self.generate_async(requests, size, on_step, mode).wait()


class PipelineError(UserError):
    """These settings generate no image with this model, whatever the prompt."""


def no_guidance_error(name: str) -> PipelineError:
    """For a pipeline that runs its denoiser once per step."""
    return PipelineError(
        f"--cfg_truncation_step has no effect: {name} runs without classifier-free guidance here.",
        "Its guidance is distilled into the network, or --guidance_scale is too low.",
        "Leave --cfg_truncation_step out, or give a higher --guidance_scale.",
    )


def make_deterministic(device: torch.device) -> None:
    """Choose no kernel by timing and let no sum depend on the number of threads; call first in a process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # writes twice
    if device.type == "cpu":
        torch.set_num_threads(1)
        torch.get_num_threads()  # this thread keeps the number from now on, whatever others set
    else:
        torch.cuda.set_device(device)


def environment_info(device: torch.device) -> dict[str, str]:
    """The device and the library versions, on which an image's last bits depend."""
    processor = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    return {"device": name, "torch": torch.__version__} | {
        library: version(library) for library in ("diffusers", "transformers")
    }


def load_pipeline(
    settings: GenerateSettings, device: torch.device, model: ModelInfo | None = None, cpus: int = 1
) -> Pipeline:
    """Load the model at --model_path; `model` is what `inspect_model` found there, if it was called before."""
    model = model or inspect_model(settings)
    settings = settings.model_copy(update=model.resolved)
    if model.is_jit:
        from muralist.generate.jit_pipeline import JiTPipeline

        return JiTPipeline.load(settings, device, model.description, cpus)
    with imports_without_gc():
        from muralist.generate.diffusers_pipeline import DiffusersPipeline

    components = {}
    if model.description:  # trained here
        from muralist.models.spec import find_family_by_key
        from muralist.models.weights import read_weights

        spec, dtype = find_family_by_key(model.description["family"]).spec_class(), DTYPES[settings.dtype]
        components = spec.trained_components(
            read_weights(settings.model_path, settings.weights), model.description, dtype
        )
    return DiffusersPipeline.load(settings, device, model.folder, components, model=model)
