"""Components of a pipeline: their classes, and loading them so that incomplete weights are refused.

diffusers leaves missing weights on the meta device, and transformers draws them at random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from muralist.core.errors import UserError, first_line
from muralist.models.integrity import read_json

# Output heads that pipelines do not call: a BERT that was built without a pooler has none in its file.
_HEADS = re.compile(r"(.*\.)?(pooler|lm_head)\..*")
_LOADERS: tuple[Any, ...] = (diffusers.ModelMixin, transformers.PreTrainedModel)


def component_class(folder: Path, config: str = "config.json") -> Any:
    """Return the class of diffusers that a component's config names."""
    name = read_json(folder / config).get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    if found is None:
        raise UserError(
            f"{folder / config} names {f'the class {name}' if name else 'no class'}.",
            f"diffusers {diffusers.__version__}, which is installed, has no such class."
            if name
            else "A component of a pipeline names its class.",
            "Install the version of diffusers that the model was made for, or copy the model again.",
        )
    return found


def load_network(folder: Path) -> Any:
    """Load a component of diffusers in float32."""
    kind = component_class(folder)
    try:
        with checked_loading():
            return kind.from_pretrained(folder, local_files_only=True).float()
    except UserError:
        raise
    except Exception as error:  # whatever diffusers says of weights of other shapes
        raise UserError(
            f"The weights in {folder} cannot be loaded: {first_line(error)}.",
            "They do not fit config.json beside them.",
            "Copy the model again.",
        ) from error


def load_pipeline(folder: Path, class_name: str, given: Mapping[str, Any], device: Callable[[], torch.device]) -> Any:
    """Load a pipeline with some components given, which may be on the meta device: it runs on `device()`."""
    try:
        with checked_loading(given):
            pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except ImportError as error:  # transformers needs torchvision for processors of video, as Qwen3-VL has one
        raise UserError(
            f"The {class_name} in {folder} cannot be loaded: {first_line(error).partition('. ')[0]}.",
            "A component needs a package that is not installed.",
            "Install the package, for example with `pip install torchvision`.",
        ) from error
    except Exception as error:  # whatever a class needs to be built
        raise UserError(
            f"The {class_name} in {folder} cannot be loaded: {first_line(error)}.",
            "A package that it needs is not installed, or its files do not fit each other.",
            f"Try `{class_name}.from_pretrained` of diffusers alone, or give another --model.path.",
        ) from error
    # A pipeline takes the device of its first network for its own.
    place = property(lambda _: device())
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), {"_execution_device": place, "device": place})
    return pipe


@contextmanager
def checked_loading(given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Let `from_pretrained` refuse incomplete weights; `given` are components by name, which are not loaded.

    As arguments of a pipeline's `from_pretrained`, components that are optional would be ignored.
    """
    before = {loader: vars(loader)["from_pretrained"] for loader in _LOADERS}

    def replacement(original: Any) -> Any:
        def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            folder = Path(path)
            if given and folder.name in given:
                return given[folder.name]
            model, found = original(cls, path, *args, output_loading_info=True, **kwargs)
            if missing := sorted(name for name in found["missing_keys"] if not _HEADS.fullmatch(name)):
                others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
                raise UserError(
                    f"The weights in {folder} are incomplete: {missing[0]}{others} missing.",
                    "They would be random numbers.",
                    "Copy the model again.",
                )
            return model

        return classmethod(from_pretrained)

    for loader, original in before.items():
        loader.from_pretrained = replacement(original.__func__)
    try:
        yield
    finally:
        for loader, original in before.items():
            loader.from_pretrained = original
