"""Opens the painter of a model, on a device that was told to give the same pictures every time."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from muralist.generate.models import CheckedModel, check_model
from muralist.generate.painter import Painter
from muralist.lasting_imports import lasting_imports
from muralist.settings import GenerateSettings


def settle_environment() -> None:
    """What libraries read there when they are first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["HF_HUB_OFFLINE"] = "1"


def settle(device: torch.device) -> None:
    """First thing in a process: no kernel is chosen by a stopwatch, no sum depends on the number of threads."""
    settle_environment()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would write every result twice
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)


def made_with(device: torch.device) -> dict[str, str]:
    """What a picture's last bits depend on beside the settings: the device and the libraries."""
    processor = f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    return {"device": name, "torch": torch.__version__} | {
        library: version(library) for library in ("diffusers", "transformers")
    }


def open_painter(settings: GenerateSettings, device: torch.device) -> Painter:
    """Load the model at --model_path."""
    model = check_model(settings)
    settings = settings.model_copy(update=model.settled)
    if model.kind == "jit":
        from muralist.generate.jit_painter import JiTPainter

        return JiTPainter.load(settings, device)
    with lasting_imports():
        from muralist.generate.diffusers_painter import DiffusersPainter

    if model.kind == "pipeline":
        return DiffusersPainter.load(settings, device)
    return DiffusersPainter.load(settings, device, Path(model.description["folder"]), _trained(settings, model))


def _trained(settings: GenerateSettings, model: CheckedModel) -> dict[str, Any]:
    """The transformer of a run, with the first average of its weights."""
    from muralist.generate.diffusers_painter import DTYPES
    from muralist.models.hunyuan_export import trained_transformer
    from muralist.models.hunyuan_family import with_official_rotation
    from muralist.models.weights import read_weights

    weights = read_weights(settings.model_path)
    network = trained_transformer(weights, Path(model.description["folder"]), model.description.get("lora"))
    torch.nn.Module.to(network, DTYPES[settings.dtype])  # diffusers' own warns of nothing
    return {"transformer": with_official_rotation(network)}
