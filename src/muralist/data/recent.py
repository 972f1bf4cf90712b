"""A few open files or decoded blocks, kept for the process that opened them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Makes values when asked for and keeps the last few; a pickled copy starts empty, for another process to fill."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: dict[int, Value] = {}

    def get(self, key: int, make: Callable[[int], Value]) -> Value:
        """Return the value of a key, made by `make` if it is not at hand."""
        if key not in self._values:
            value = make(key)
            if len(self._values) >= self.most:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return self._values[key]

    def __reduce__(self) -> tuple[type[Recent[Value]], tuple[int]]:
        return type(self), (self.most,)
