"""Packages that can be called: `muralist.generate(...)` is a function of the Python API and a package of modules."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

API = "muralist.api"


class _CallablePackage(ModuleType):
    """A package; a call goes to the API function of the same name, which is imported only then."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    def _function(self) -> Any:
        return getattr(import_module(API), self.__name__.rpartition(".")[2])


def make_callable(package: str) -> None:
    """Let a package be called. Importing one of its modules sets the attribute of `muralist` that has its name."""
    sys.modules[package].__class__ = _CallablePackage
