"""Watches a pipeline's denoising loop from outside: a sign of life at every step, and an early end of guidance.

Classifier-free guidance runs the network for the prompt and for the negative prompt: in one call of a doubled batch, or
in two calls. After the cut only the prompt's part is run, and its result is handed back in both places: u + s (c - u) is
then c, whatever the pipeline's own formula looks like. Nothing here asks the GPU for a number at every step.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from muralist.generate.painter import Beat, CannotPaint, nothing_to_cut

DENOISERS = ("transformer", "transformer_2", "unet")
_NOT_ROWS = ("rotary", "rope", "freqs", "img_ids", "txt_ids")  # positions, the same for every picture


class TextIsEncoded(Exception):
    """Ends a pipeline's call before its first step."""


class DenoisingLoop:
    """The loop of one pipeline; `steps` as asked for, guided in the first `truncation` of them (None: in all)."""

    def __init__(self, pipe: Any, steps: int, truncation: int | None) -> None:
        self._name = type(pipe).__name__
        self._steps, self._truncation = steps, truncation
        self._beat: Beat | None = None
        self._text_only = False
        self._rows = 0
        self._positive: Callable[[], Any] = lambda: None
        self._begin()
        scheduler = pipe.scheduler
        scheduler.set_timesteps = self._watched_start(scheduler, scheduler.set_timesteps)
        scheduler.step = self._watched_step(scheduler.step)
        for name in DENOISERS if truncation is not None else ():
            network = getattr(pipe, name, None)
            if network is not None:
                network.forward = self._cut(network.forward)

    def _begin(self) -> None:
        self._step = self._calls = 0
        self._cut_from: float = math.inf
        self._conditional_half: int | None = None
        self._conditional_output: Any = None
        self._first_is_conditional = True

    @contextmanager
    def watched(self, rows: int, beat: Beat, positive: Callable[[], Any]) -> Iterator[None]:
        """For one call with this many pictures; `positive` gives the prompts' embeddings once there are some."""
        self._begin()
        self._rows, self._beat, self._positive = rows, beat, positive
        try:
            yield
        finally:
            self._beat, self._conditional_output = None, None

    @contextmanager
    def text_only(self) -> Iterator[None]:
        """For a call that ends, without a picture, where the text is encoded and the first step would begin."""
        self._text_only = True
        try:
            yield
        except TextIsEncoded:
            pass
        finally:
            self._text_only = False

    def _watched_start(self, scheduler: Any, set_timesteps: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_timesteps)
        def start(*inputs: Any, **named: Any) -> None:
            if self._text_only:
                raise TextIsEncoded
            set_timesteps(*inputs, **named)
            self._begin()
            if self._truncation is not None:
                # Heun's scheduler and others go through several stages for a step.
                self._cut_from = math.ceil(self._truncation * len(scheduler.timesteps) / self._steps)

        return start

    def _watched_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def stepped(*inputs: Any, **named: Any) -> Any:
            if self._text_only:  # a pipeline that makes its own time steps
                raise TextIsEncoded
            unguided = self._step == 0 and self._calls < 2 and self._conditional_half is None
            if self._truncation is not None and unguided:
                raise nothing_to_cut(self._name)
            result = step(*inputs, **named)
            self._step, self._calls = self._step + 1, 0
            if self._beat is not None:
                self._beat()
            return result

        return stepped

    def _cut(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def run(*inputs: Any, **named: Any) -> Any:
            self._calls += 1
            bound = signature.bind(*inputs, **named)
            latents = next(iter(bound.arguments.values()))
            doubled = len(latents) == 2 * self._rows
            if self._step == 0:
                self._find_conditional(bound.arguments, doubled)
            if self._step < self._cut_from:
                return forward(*inputs, **named)
            if doubled:
                half = slice(0, self._rows) if self._conditional_half == 0 else slice(self._rows, None)
                for name, value in bound.arguments.items():
                    bound.arguments[name] = self._halved(name, value, half)
                return self._in_both_places(forward(*bound.args, **bound.kwargs))
            if self._calls == 1:
                self._conditional_output = forward(*inputs, **named)
            return self._conditional_output

        return run

    def _find_conditional(self, arguments: dict[str, Any], doubled: bool) -> None:
        """Which half of a doubled batch, or which of two calls, is the prompt's; most pipelines: the second, the first."""
        if doubled:
            halves = [self._is_positive(arguments, first) for first in (0, self._rows)]
            self._conditional_half = 0 if halves == [True, False] else 1
        elif self._calls == 1:
            self._first_is_conditional = self._is_positive(arguments, 0)
        elif not self._first_is_conditional and self._is_positive(arguments, 0):
            raise CannotPaint(
                f"--cfg_truncation_step does not work with {self._name}.",
                "It runs the network for the negative prompt first, so that nothing is there to be used in its place.",
                "Leave it out.",
            )

    def _is_positive(self, arguments: dict[str, Any], first: int) -> bool:
        """Whether rows from `first` on, of any argument, are the prompts' embeddings."""
        positive = self._positive()
        if positive is None:
            return False
        candidates = [value[first : first + self._rows] for value in arguments.values() if _is_rows(value)]
        return any(_same(rows, positive) for rows in candidates)

    def _halved(self, name: str, value: Any, half: slice) -> Any:
        if isinstance(value, dict):
            return {key: self._halved(str(key), item, half) for key, item in value.items()}
        if _is_rows(value) and len(value) == 2 * self._rows and not any(word in name for word in _NOT_ROWS):
            return value[half]
        return value

    def _in_both_places(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return torch.cat([output, output]) if len(output) == self._rows else output
        if isinstance(output, dict):  # diffusers' outputs are dictionaries and dataclasses
            return type(output)(**{name: self._in_both_places(value) for name, value in output.items()})
        if isinstance(output, tuple):
            return tuple(map(self._in_both_places, output))
        return [*output, *output] if isinstance(output, list) and len(output) == self._rows else output


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _same(rows: Any, positive: Any) -> bool:
    if isinstance(rows, Tensor) and isinstance(positive, Tensor):
        return rows.shape == positive.shape and torch.equal(rows, positive.to(rows))
    if isinstance(rows, list) and isinstance(positive, list):
        return len(rows) == len(positive) and all(map(_same, rows, positive))
    return False
