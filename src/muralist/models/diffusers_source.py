"""Classes of diffusers, read from their source: signatures and default sizes without the seconds that its import takes."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_FOLDERS = {"pipelines": "pipelines/**/pipeline_*.py", "schedulers": "schedulers/scheduling_*.py"}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}
Configs = Mapping[str, Mapping[str, Any]]
"""The config.json of each component of a pipeline, by its name; `""` is model_index.json."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method: the source of its annotation, and its default (None also if it is not a literal)."""

    annotation: str
    default: Any
    required: bool


def diffusers_folder() -> Path:
    """Return the folder of the diffusers package."""
    package = importlib.util.find_spec("diffusers")
    assert package and package.origin  # a dependency
    return Path(package.origin).parent


@functools.cache
def find_class(name: str, kind: Literal["pipelines", "schedulers"]) -> ClassSource | None:
    """Return the source of a pipeline or a scheduler; None if the installed diffusers has no such class."""
    if not name.isidentifier():
        return None
    start = f"class {name}(".encode()
    for file in sorted(diffusers_folder().glob(_FOLDERS[kind])):
        if start in (content := file.read_bytes()):
            for node in ast.parse(content).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return ClassSource(node, kind, content)
    return None


class ClassSource:
    """The source of one class."""

    def __init__(self, node: ast.ClassDef, kind: Literal["pipelines", "schedulers"], module: bytes) -> None:
        self._node, self._kind, self._module = node, kind, module

    @property
    def needs_chat_template(self) -> bool:
        """Whether a pipeline wraps prompts in the tokenizer's chat template."""
        return b"tokenizer.apply_chat_template" in self._module

    def parameters(self, method: str) -> dict[str, Parameter]:
        """Return the parameters of a method, except self; empty if the class and its bases do not define it."""
        function = self._method(method)
        if function is None:
            return {}
        given = function.args
        defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
        pairs = [*zip(given.args, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        return {
            argument.arg: Parameter(
                ast.unparse(argument.annotation) if argument.annotation else "", _literal(default), default is None
            )
            for argument, default in pairs
            if argument.arg != "self"
        }

    def default_size(self, configs: Configs) -> tuple[int, int] | None:
        """Return the height and width of images of a pipeline that is called without them; None if unknown."""
        parameters = self.parameters("__call__")
        sides = [parameters[name].default if name in parameters else None for name in ("height", "width")]
        sides = [
            side or self._default_side(name, configs) for side, name in zip(sides, ("height", "width"), strict=True)
        ]
        height, width = sides
        return (height, width) if type(height) is int and type(width) is int and min(height, width) > 0 else None

    def _default_side(self, name: str, configs: Configs) -> Any:
        """Evaluate a `height = height or ...` of `__call__`, or Stable Diffusion's form with an `if`."""
        call = self._method("__call__")
        sides = [
            node.value
            for node in ast.walk(call or self._node)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        ]
        for value in sides:
            if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or):
                side = self._evaluate(value.values[-1], configs)
                if side is not None:
                    return side
        if any(isinstance(value, ast.IfExp) for value in sides):
            size, factor = _sample_side(name, configs), self._attribute("vae_scale_factor", configs)
            return size * factor if type(size) is int and type(factor) is int else None
        return None

    def _evaluate(self, node: ast.expr, configs: Configs) -> Any:
        """Evaluate an expression of numbers, config values and attributes that `__init__` sets; None if it has others."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.BinOp(left=left, op=op, right=right):
                values = self._evaluate(left, configs), self._evaluate(right, configs)
                known = type(op) in _OPERATORS and all(type(value) in (int, float) for value in values)
                return _OPERATORS[type(op)](*values) if known else None
            case ast.Call(func=ast.Name(id="len"), args=[argument]):
                value = self._evaluate(argument, configs)
                return len(value) if isinstance(value, list) else None
            case ast.IfExp(body=body, orelse=other):  # "if the pipeline has this component", as a rule
                value = self._evaluate(body, configs)
                return self._evaluate(other, configs) if value is None else value
            case ast.Attribute(value=ast.Attribute(value=ast.Attribute(attr=part), attr="config"), attr=key):
                return configs.get(part, {}).get(key)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._attribute(name, configs)
        return None

    def _attribute(self, name: str, configs: Configs) -> Any:
        """Evaluate an attribute as the last assignment of `__init__` sets it."""
        init = self._method("__init__")
        target = f"self.{name}"
        values = [
            node.value
            for node in ast.walk(init or ast.Module([], []))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target
        ]
        return self._evaluate(values[-1], configs) if values else None

    def _method(self, name: str) -> ast.FunctionDef | None:
        for node in self._node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        for base in self._node.bases:
            source = find_class(ast.unparse(base), self._kind)
            if source is not None and (found := source._method(name)) is not None:
                return found
        return None


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _sample_side(name: str, configs: Configs) -> Any:
    size = configs.get("unet", {}).get("sample_size")
    return size[name == "width"] if isinstance(size, list) and len(size) == 2 else size
