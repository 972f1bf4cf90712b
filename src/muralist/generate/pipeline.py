"""The `Pipeline` interface between workers and models, and the function that loads one."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.metadata import version
from typing import NamedTuple, Protocol

import numpy as np
import torch

from muralist.core.compile_cache import imports_without_gc
from muralist.core.errors import UserError
from muralist.generate.model_info import inspect_model
from muralist.settings import GenerateSettings

StepCallback = Callable[[], None]
"""Called at every denoising step: the heartbeat that distinguishes a slow worker from a hanging one."""
MEMORY_PROBE_STEPS = 2


class GenerationMode(Enum):
    """How a batch is generated."""

    DEFAULT = "as the settings say"
    EXACT = "as --preset exact would, with the same steps"
    MEMORY_PROBE = "in two steps, to measure whether a batch size fits into memory"


class PendingBatch(Protocol):
    """Images that a device may still be computing."""

    def wait(self) -> list[np.ndarray]:
        """Return the images: uint8 [H, W, 3] each, or clips [F, H, W, 3]."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once because no device is working on the images."""

    @property
    def gpu_busy(self) -> float | None:
        """After `wait`: for which fraction of the time since the last batch the GPU had work; None if unknown."""


class GeneratedBatch(NamedTuple):
    """Images that are complete already."""

    images: list[np.ndarray]
    ready: bool = True
    gpu_busy: float | None = None

    def wait(self) -> list[np.ndarray]:
        """Return the images."""
        return self.images


class SampleRequest(NamedTuple):
    """One image to generate."""

    prompt: str
    negative_prompt: str
    seed: int


class Pipeline(ABC):
    """A loaded model on one device.

    An image depends on its request, its size, the number of requests of the call and its index among them, never on the
    other requests.
    """

    @abstractmethod
    def supports_batching(self) -> bool:
        """Whether that holds for several images in one call; if not, workers generate one image at a time."""

    @abstractmethod
    def execution_info(self) -> dict[str, str]:
        """Everything that an image's last bits depend on besides the settings, the device and the library versions."""

    @abstractmethod
    def prepare(self, requests: Sequence[SampleRequest]) -> None:
        """Encode prompts or draw noise for upcoming requests, and drop the results of all others."""

    def is_truncated(self, prompt: str) -> bool:
        """Whether a prepared prompt is longer than some text encoder reads."""
        return False

    @abstractmethod
    def generate_async(
        self,
        requests: Sequence[SampleRequest],
        size: tuple[int, int],
        on_step: StepCallback,
        mode: GenerationMode = GenerationMode.DEFAULT,
    ) -> PendingBatch:
        """Queue images of a height and width on the device; another batch may be queued before they are complete."""

    def generate(
        self,
        requests: Sequence[SampleRequest],
        size: tuple[int, int],
        on_step: StepCallback,
        mode: GenerationMode = GenerationMode.DEFAULT,
    ) -> list[np.ndarray]:
        """Generate images of a height and width."""
        return self.generate_async(requests, size, on_step, mode).wait()


class PipelineError(UserError):
    """These settings generate no image with this model, whatever the prompt."""


def non_finite_error(dtype: str) -> UserError:
    """For images with NaN or Inf values."""
    return UserError(
        "The model produced NaN or Inf values instead of an image.",
        f"Some values overflowed in {dtype}.",
        "Try --dtype bf16 or fp32.",
    )


def no_guidance_error(name: str) -> PipelineError:
    """For a pipeline that runs its denoiser once per step."""
    return PipelineError(
        f"--cfg_truncation_step has no effect: {name} runs without classifier-free guidance here.",
        "Its guidance is distilled into the network, or --guidance_scale is too low.",
        "Leave --cfg_truncation_step out, or give a higher --guidance_scale.",
    )


def set_library_environment() -> None:
    """Set the environment variables that libraries read at their first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["HF_HUB_OFFLINE"] = "1"


def make_deterministic(device: torch.device) -> None:
    """Choose no kernel by timing and let no sum depend on the number of threads; call first in a process."""
    set_library_environment()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # writes twice
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)


def environment_info(device: torch.device) -> dict[str, str]:
    """The device and the library versions, on which an image's last bits depend."""
    processor = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    return {"device": name, "torch": torch.__version__} | {
        library: version(library) for library in ("diffusers", "transformers")
    }


def load_pipeline(settings: GenerateSettings, device: torch.device) -> Pipeline:
    """Load the model at --model_path."""
    model = inspect_model(settings)
    settings = settings.model_copy(update=model.resolved)
    if model.jit is not None:
        from muralist.generate.jit_pipeline import JiTPipeline

        return JiTPipeline.load(settings, device)
    with imports_without_gc():
        from muralist.generate.diffusers_pipeline import DTYPES, DiffusersPipeline

    components = {}
    if model.description:  # trained here
        from muralist.models.spec import find_family_by_key
        from muralist.models.weights import read_weights

        spec, dtype = find_family_by_key(model.description["family"]).spec_class(), DTYPES[settings.dtype]
        components = spec.trained_components(read_weights(settings.model_path), model.description, dtype)
    return DiffusersPipeline.load(settings, device, model.folder, components)
