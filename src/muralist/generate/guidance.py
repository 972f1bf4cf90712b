"""Watches a pipeline's denoising loop from outside: a sign of life at every step, an early end of guidance, steps foretold.

Classifier-free guidance runs the network for the prompt and for the negative prompt: in one call of a doubled batch, or
in two calls. After the cut only the prompt's part is run, and its result is handed back in both places: u + s (c - u) is
then c, whatever the pipeline's own formula looks like. Where a shortcut leaves the network out, what it would say is
foretold from the last two times that it was run, along a straight line. Nothing here asks the GPU for a number in every
step.
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

from muralist.copies import to_device
from muralist.generate.card import CardClock, Ease
from muralist.generate.painter import Beat, CannotPaint, nothing_to_cut
from muralist.generate.recorded import Recorders
from muralist.generate.shortcuts import Shortcut

DENOISERS = ("transformer", "transformer_2", "unet")
_NOT_ROWS = ("rotary", "rope", "freqs", "img_ids", "txt_ids")  # positions, the same for every picture


class TextIsEncoded(Exception):
    """Ends a pipeline's call before its first step."""


class DenoisingLoop:
    """The loop of one pipeline; `steps` as asked for, guided in the first `truncation` of them (None: in all)."""

    def __init__(
        self,
        pipe: Any,
        steps: int,
        truncation: int | None,
        shortcut: Shortcut | None = None,
        device: torch.device | None = None,
        recorders: Recorders | None = None,
        ease: Ease | None = None,
    ) -> None:
        self._name = type(pipe).__name__
        self._steps, self._truncation, self._shortcut = steps, truncation, shortcut
        self._device = device or torch.device("cpu")
        self._recorders = recorders or Recorders(None)
        ease = ease or Ease(self._device)
        self.clock = CardClock(self._device)
        self._beat: Beat | None = None
        self._text_only = self._exact = False
        self._rows = 0
        self._known_half: int | None = None
        self._known_first = False
        self._positive: Callable[[], Any] = lambda: None
        self._begin(0)
        scheduler = pipe.scheduler
        scheduler.set_timesteps = self._watched_start(scheduler, scheduler.set_timesteps)
        scheduler.step = self._watched_step(scheduler.step)
        for name in DENOISERS:
            network = getattr(pipe, name, None)
            if network is not None:
                network.forward = self._watched_pass(ease.paused(self._recorders.before(network.forward)))

    def _begin(self, stages: int, times: tuple[float, ...] = ()) -> None:
        self._step = self._calls = 0
        self._times = times
        self._conditional_half: int | None = None
        self._conditional_output: Any = None
        self._said: dict[int, list[tuple[float, Any]]] = {}  # by number of the call within a step
        shortcut = None if self._exact else self._shortcut
        guided = self._truncation
        if guided is None and shortcut is not None:
            guided = shortcut.guided_steps(self._steps)
        # Heun's scheduler and others go through several stages for a step.
        self._cut_from = math.inf if guided is None else math.ceil(guided * stages / self._steps)
        self._computed = shortcut.computed(stages) if shortcut is not None and times else None

    @contextmanager
    def watched(self, rows: int, beat: Beat, positive: Callable[[], Any], exact: bool = False) -> Iterator[None]:
        """For one call with this many pictures; `positive` gives the prompts' embeddings once there are some.

        An `exact` one takes no shortcut.
        """
        self._exact = exact
        self._begin(0)
        self._rows, self._beat, self._positive = rows, beat, positive
        try:
            yield
        finally:
            self._beat, self._conditional_output, self._said = None, None, {}

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
        signature = inspect.signature(set_timesteps)

        @functools.wraps(set_timesteps)
        def start(*inputs: Any, **named: Any) -> None:
            if self._text_only:
                raise TextIsEncoded
            bound = signature.bind(*inputs, **named)
            if "device" in bound.arguments:
                # Pipelines and schedulers look at the time of every step: on a GPU each look would wait for it.
                bound.arguments["device"] = torch.device("cpu")
            set_timesteps(*bound.args, **bound.kwargs)
            times = scheduler.timesteps
            self._begin(len(times), tuple(float(time) for time in times) if self._shortcut is not None else ())

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
            self.clock.leave()
            self._recorders.step()
            if self._beat is not None:
                self._beat()
            return result

        return stepped

    def _watched_pass(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def run(*inputs: Any, **named: Any) -> Any:
            self.clock.enter()
            self._calls += 1
            bound = signature.bind(*inputs, **named)
            if self._device.type == "cuda":
                for name, value in bound.arguments.items():
                    if isinstance(value, Tensor) and value.device.type == "cpu":  # the time of this step
                        bound.arguments[name] = to_device(value, self._device)
            latents = next(iter(bound.arguments.values()))
            doubled = len(latents) == 2 * self._rows
            if self._step == 0 and self._cut_from < math.inf:
                self._find_conditional(bound.arguments, doubled)
            guided = self._step < self._cut_from
            half = slice(0, self._rows) if self._conditional_half == 0 else slice(self._rows, None)
            if guided or not (doubled or self._calls > 1):
                output = self._told(lambda: forward(*bound.args, **bound.kwargs))
                if not guided:
                    self._conditional_output = output
                return output
            if not doubled:
                return self._conditional_output
            for name, value in bound.arguments.items():
                bound.arguments[name] = self._halved(name, value, half)
            self._said = {
                call: [
                    (time, self._rows_changed(output, 2 * self._rows, lambda rows: rows[half])) for time, output in said
                ]
                for call, said in self._said.items()
            }
            output = self._told(lambda: forward(*bound.args, **bound.kwargs))
            return self._rows_changed(output, self._rows, _twice)

        return run

    def _told(self, forward: Callable[[], Any]) -> Any:
        """What the network says, or would say: on the line through what it said the last two times."""
        if self._computed is None:
            return forward()
        said, time = self._said.setdefault(self._calls, []), self._times[self._step]
        if self._step in self._computed:
            said.append((time, forward()))
            del said[:-2]
            return said[-1][1]
        (earlier, before), (later, last) = said[0], said[-1]
        ahead = (time - later) / (later - earlier) if later != earlier else 0.0
        return _on_the_line(last, before, ahead)

    def _find_conditional(self, arguments: dict[str, Any], doubled: bool) -> None:
        """Which half of a doubled batch, or which of two calls, is the prompt's; most pipelines: the second, the first.

        Found once for a pipeline, because the look waits for the GPU.
        """
        if doubled:
            if self._known_half is None:
                halves = [self._is_positive(arguments, first) for first in (0, self._rows)]
                self._known_half = {(True, False): 0, (False, True): 1}.get((halves[0], halves[1]))
            self._conditional_half = 1 if self._known_half is None else self._known_half
        elif self._calls == 1:
            self._known_first = self._known_first or self._is_positive(arguments, 0)
        elif not self._known_first and self._is_positive(arguments, 0):
            raise CannotPaint(
                f"Guidance cannot end early with {self._name}.",
                "It runs the network for the negative prompt first, so that nothing is there to be used in its place.",
                "Leave --cfg_truncation_step and --preset fast out.",
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

    def _rows_changed(self, output: Any, count: int, change: Callable[[Any], Any]) -> Any:
        """A network's answer with a change made to everything in it that has a row for each of `count` pictures."""
        if isinstance(output, dict):  # diffusers' outputs are dictionaries and dataclasses
            return type(output)(**{name: self._rows_changed(value, count, change) for name, value in output.items()})
        if isinstance(output, tuple):
            return tuple(self._rows_changed(value, count, change) for value in output)
        return change(output) if _is_rows(output) and len(output) == count else output


def _twice(rows: Any) -> Any:
    return torch.cat([rows, rows]) if isinstance(rows, Tensor) else [*rows, *rows]


def _on_the_line(last: Any, before: Any, ahead: float) -> Any:
    """A network's answer, foretold from its last two."""
    if isinstance(last, Tensor):
        return torch.lerp(last.float(), before.float(), -ahead).to(last.dtype)
    if isinstance(last, dict):
        return type(last)(**{name: _on_the_line(value, before[name], ahead) for name, value in last.items()})
    if isinstance(last, (tuple, list)):
        return type(last)(_on_the_line(*pair, ahead) for pair in zip(last, before, strict=True))
    return last


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _same(rows: Any, positive: Any) -> bool:
    if isinstance(rows, Tensor) and isinstance(positive, Tensor):
        return rows.shape == positive.shape and torch.equal(rows, positive.to(rows))
    if isinstance(rows, list) and isinstance(positive, list):
        return len(rows) == len(positive) and all(map(_same, rows, positive))
    return False
