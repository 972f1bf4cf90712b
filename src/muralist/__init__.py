"""muralist: train diffusion transformers, generate images from prompt tables, evaluate them.

    muralist.train(data_path="photos", img_size=64, ...)     a run, with the settings of `muralist train`
    muralist.distill(run, steps=2, ...)                      a student that samples in a few steps, as `muralist distill`
    muralist.generate(model, prompts, output_dir, ...)       images in a folder, as `muralist generate`
    muralist.load_pipeline(model)(prompts, seeds=...)        images in memory
    muralist.evaluate(images, reference, output_dir, ...)    FID and other metrics, as `muralist evaluate`

`import muralist` imports none of the libraries behind these functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muralist.api import (
        GenerationRecord,
        LoadedPipeline,
        TrainingResult,
        UserError,
        distill,
        evaluate,
        generate,
        load_pipeline,
        train,
    )

__version__ = "0.2.0"
__all__ = [
    "GenerationRecord",
    "LoadedPipeline",
    "TrainingResult",
    "UserError",
    "__version__",
    "distill",
    "evaluate",
    "generate",
    "load_pipeline",
    "train",
]
_PACKAGES = ("evaluate", "generate", "train")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:  # packages of modules that can be called; an import sets them as attributes
        return import_module(f"muralist.{name}")
    if name in __all__:
        return getattr(import_module("muralist.api"), name)
    raise AttributeError(f"module 'muralist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
