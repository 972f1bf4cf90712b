"""What a diffusers pipeline class needs, read from its source: importing diffusers and torch would take seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from muralist.core.errors import UserError

_IMAGE_INPUT = re.compile(
    r"(?!num_|.*(embed|attention|latent))(.*_)?(images?|mask)(_.*)?"
)  # arguments that hold images


class PipelineSource(NamedTuple):
    """The parameters of a pipeline's `__call__` in order, each with whether it is required; and its module's text."""

    parameters: dict[str, bool]
    text: str

    @property
    def needs_chat_template(self) -> bool:
        """Whether prompts are wrapped in the tokenizer's chat template."""
        return "tokenizer.apply_chat_template" in self.text


def diffusers_pipelines() -> Path:
    """Return the folder of diffusers' pipelines."""
    diffusers = importlib.util.find_spec("diffusers")
    assert diffusers and diffusers.origin  # a dependency
    return Path(diffusers.origin).parent / "pipelines"


def read_pipeline_source(name: str) -> PipelineSource | None:
    """Find a pipeline class in diffusers; None if it is not there, or inherits its `__call__`."""
    declared = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE)
    folder = _folder_of(name)
    for file in sorted(folder.rglob("*.py")) if folder else []:
        text = file.read_text(encoding="utf-8")
        if not declared.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                call = next((it for it in node.body if isinstance(it, ast.FunctionDef) and it.name == "__call__"), None)
                return PipelineSource(_parameters(call.args), text) if call else None
    return None


def _folder_of(name: str) -> Path | None:
    """Find a class in the table of diffusers' lazy imports."""
    pipelines = diffusers_pipelines()
    text = (pipelines / "__init__.py").read_text(encoding="utf-8")
    if (place := text.find(f'"{name}"')) < 0:
        return None
    # Each list of names follows its folder: "flux": [...], _import_structure["flux"] = [...], ["flux"].extend([...])
    folders = re.findall(r'"(\w+)"(?:: |\] = |\]\.extend\(\s*)\[', text[:place])
    return pipelines / folders[-1] if folders and (pipelines / folders[-1]).is_dir() else None


def _parameters(arguments: ast.arguments) -> dict[str, bool]:
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = len(positional) - len(arguments.defaults)
    found = {argument.arg: index < optional for index, argument in enumerate(positional)}
    found |= {it.arg: default is None for it, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    return {name: required for name, required in found.items() if name != "self"}


def check_pipeline_class(name: str, parameters: dict[str, bool]) -> None:
    """Refuse a class that no table of prompts, sizes and image files can run, by the parameters of its `__call__`."""
    images = [each for each in parameters if _IMAGE_INPUT.fullmatch(each)]
    needed = [each for each, required in parameters.items() if required and each not in ("prompt", *images)]
    first = next(iter(parameters), "")
    why = ""
    if "prompt" not in parameters:
        why = "It takes no prompt."
    elif needed or "video" in first:
        why = f"It needs {', '.join(needed or [first])}."
    elif "height" not in parameters and not images:
        makes_audio = any("audio" in each for each in parameters)
        why = "It generates audio." if makes_audio else "It takes neither an image nor a height and width."
    if why:
        raise UserError(f"{name} does not generate images from a table of prompts.", why, "Give another --model_path.")
