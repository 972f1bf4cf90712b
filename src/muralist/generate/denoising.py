"""A pipeline's denoising loop, seen from outside: heartbeats, truncated classifier-free guidance, step caching.

Classifier-free guidance runs the denoiser for the prompt and for the negative prompt, in one call with a doubled batch
or in two calls. After the truncation step only the prompt's part runs, and its output is returned in both places:
u + s (c - u) is then c, whatever the pipeline's own formula. No step reads a value back from the GPU.

`callback_on_step_end` is not enough: a third of the pipelines do not have it, and it cannot skip the denoiser.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from muralist.core.hardware import copy_to_device
from muralist.generate.model_info import StepCaching
from muralist.generate.optimizations import NonBlockingCopies
from muralist.generate.pipeline import GpuClock, PipelineError, StepCallback, no_guidance_error
from muralist.kernels.cuda_graphs import CudaGraphs

_DENOISERS = ("transformer", "transformer_2", "unet")
_SCM = "SCMScheduler"  # its last timestep is the image; Sana Sprint computes with its timesteps on the GPU
_SUMS = re.compile(r"mm|matmul|linear|conv|attention|softmax|norm|mean|sum|var|einsum|fft|pool")
_NOT_BATCHED = ("rotary", "rope", "freqs", "img_ids", "txt_ids")  # positions, shared by all images


class _Ended(Exception):
    """Ends a pipeline's call before its first step is complete."""


class OperatorTrace(TorchDispatchMode):
    """Records the operators that sum, whose rounding depends on their shapes, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator and run it."""
        kwargs = kwargs or {}
        if _SUMS.search(str(func)):
            shapes = [value.shape for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            self.operators.append((str(func), *shapes))
        return func(*args, **kwargs)


def denoisers(pipe: Any) -> list[Any]:
    """The networks that a pipeline's denoising loop runs."""
    return [network for name in _DENOISERS if (network := getattr(pipe, name, None)) is not None]


class DenoisingLoop:
    """The denoising loop of one pipeline, with guidance in the first `truncation` of its `steps` (None: in all)."""

    def __init__(
        self,
        pipe: Any,
        steps: int,
        truncation: int | None,
        step_caching: StepCaching | None,
        device: torch.device,
        graphs: CudaGraphs,
        copies: NonBlockingCopies,
    ) -> None:
        self._name = type(pipe).__name__
        self._step_caching = step_caching
        self.configure(steps, truncation)
        self._device, self._graphs, self.clock = device, graphs, GpuClock(device)
        self._on_step: StepCallback | None = None
        self._text_only = self._exact = False
        self._trace: OperatorTrace | None = None
        self._batch_size = 0
        self.is_guided = False
        """Whether the first step of the last call ran the denoiser for more than the prompts."""
        self._prompt_embeds: Callable[[], Any] = lambda: None
        self._start(0)
        scheduler = pipe.scheduler
        scheduler.set_timesteps = self._wrap_set_timesteps(scheduler, scheduler.set_timesteps)
        scheduler.step = self._wrap_step(scheduler.step)
        if hasattr(pipe, "get_timesteps"):
            pipe.get_timesteps = self._wrap_get_timesteps(pipe.get_timesteps)
        for network in denoisers(pipe):
            network.forward = self._wrap_forward(copies.suspended(self._graphs.wrap(network.forward)))

    @property
    def caches_steps(self) -> bool:
        """Whether the denoiser runs in some steps only, unless a call is exact."""
        return self._step_caching is not None

    def configure(self, steps: int, truncation: int | None) -> None:
        """Take another number of steps from the next call on, with guidance in the first `truncation`."""
        self._steps, self._truncation = steps, truncation
        self._known_half: int | None = None
        self._known_first = False

    def _start(self, stages: int, timesteps: tuple[float, ...] = (), skipped: int = 0) -> None:
        """Begin a loop over the stages of a scheduler, of which image-to-image pipelines have `skipped` the first."""
        self._stages = stages
        self._step = self._calls = self._rows = 0
        self._timesteps = timesteps[skipped:]
        self._conditional_half: int | None = None
        self._conditional_output: Any = None
        self._outputs: dict[int, list[tuple[float, Any]]] = {}  # by index of the call within a step
        caching = None if self._exact else self._step_caching
        guided = self._truncation
        if guided is None and caching:
            left = self._steps * (stages - skipped) / max(1, stages)
            guided = caching.guided_steps(round(left))
        # Heun and other schedulers run several stages per step.
        self._truncated_from = math.inf if guided is None else math.ceil(guided * stages / self._steps)
        self._computed = caching.computed_stages(stages - skipped) if caching and timesteps else None

    @contextmanager
    def running(
        self, batch_size: int, on_step: StepCallback, prompt_embeds: Callable[[], Any], exact: bool = False
    ) -> Iterator[None]:
        """For one call of the pipeline; `exact` turns step caching off.

        `prompt_embeds` returns the embeddings of the prompts (not of the negative prompts), or None before they exist.
        """
        self._exact = exact
        self._start(0)
        self._batch_size, self._on_step, self._prompt_embeds = batch_size, on_step, prompt_embeds
        try:
            yield
        finally:
            self._on_step, self._conditional_output, self._outputs = None, None, {}

    @contextmanager
    def text_only(self) -> Iterator[None]:
        """For a call of the pipeline that ends after the text encoders, before the first step."""
        self._text_only = True
        try:
            yield
        except _Ended:
            pass
        finally:
            self._text_only = False

    @contextmanager
    def tracing(self, batch_size: int) -> Iterator[OperatorTrace]:
        """For a call of the pipeline that ends in its first step, with a trace of the denoiser."""
        self._trace, self._batch_size = OperatorTrace(), batch_size
        try:
            yield self._trace
        except _Ended:
            pass
        finally:
            self._trace = None

    def _wrap_set_timesteps(self, scheduler: Any, set_timesteps: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(set_timesteps)

        @functools.wraps(set_timesteps)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            if self._text_only:
                raise _Ended
            bound = signature.bind(*args, **kwargs)
            is_scm = type(scheduler).__name__ == _SCM
            if "device" in bound.arguments and not is_scm:
                # Pipelines and schedulers read the timestep of every step: on a GPU each read would wait for its queue.
                bound.arguments["device"] = torch.device("cpu")
            if not scheduler.config.get("use_dynamic_shifting"):
                bound.arguments.pop("mu", None)  # FlowMatchEulerDiscrete ignores it then, other schedulers raise
            set_timesteps(*bound.args, **bound.kwargs)
            timesteps = scheduler.timesteps[:-1] if is_scm else scheduler.timesteps
            self._start(len(timesteps), tuple(map(float, timesteps)) if self._step_caching else ())

        return wrapped

    def _wrap_get_timesteps(self, get_timesteps: Callable[..., Any]) -> Callable[..., Any]:
        """Begin again with the last timesteps only, where `strength` skips the first."""

        @functools.wraps(get_timesteps)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = get_timesteps(*args, **kwargs)
            self._start(self._stages, self._timesteps, skipped=self._stages - len(result[0]))
            return result

        return wrapped

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._text_only or self._trace is not None:  # the former: a pipeline that sets its own timesteps
                raise _Ended
            if self._step == 0:
                self._check_guidance()
            result = step(*args, **kwargs)
            self._step, self._calls = self._step + 1, 0
            self.clock.leave()
            self._graphs.step()
            if self._on_step is not None:
                self._on_step()
            return result

        return wrapped

    def _check_guidance(self) -> None:
        """In the first step: refuse to truncate guidance that does not exist or has another form."""
        self.is_guided = self._rows > self._batch_size
        if self._truncation is not None and not self.is_guided:
            raise no_guidance_error(self._name)
        if self._truncated_from < math.inf and self._rows > 2 * self._batch_size:
            raise PipelineError(
                f"Guidance cannot be truncated with {self._name}.",
                f"It runs the denoiser {self._rows / self._batch_size:g} times per step, not twice.",
                "Leave --cfg_truncation_step and --preset out.",
            )

    def _wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.clock.enter()
            self._calls += 1
            bound = signature.bind(*args, **kwargs)
            if self._device.type == "cuda":
                for name, value in bound.arguments.items():
                    if isinstance(value, Tensor) and value.device.type == "cpu":  # the timestep
                        bound.arguments[name] = copy_to_device(value, self._device)
            if self._trace is not None:
                with self._trace:
                    return forward(*bound.args, **bound.kwargs)
            latents = next(iter(bound.arguments.values()))
            doubled = len(latents) == 2 * self._batch_size
            self._rows += len(latents) if self._step == 0 else 0
            if self._step == 0 and self._truncated_from < math.inf:
                self._find_conditional(bound.arguments, doubled)
            guided = self._step < self._truncated_from
            half = slice(0, self._batch_size) if self._conditional_half == 0 else slice(self._batch_size, None)
            if guided or not (doubled or self._calls > 1):
                output = self._compute_or_extrapolate(lambda: forward(*bound.args, **bound.kwargs))
                if not guided:
                    self._conditional_output = output
                return output
            if not doubled:
                return self._conditional_output
            for name, value in bound.arguments.items():
                bound.arguments[name] = self._halved(name, value, half)
            output = self._compute_or_extrapolate(
                lambda: _map_batched(forward(*bound.args, **bound.kwargs), self._batch_size, _doubled)
            )
            if self._computed is None:
                return output
            # Extrapolated from guided steps, the two halves still differ.
            return _map_batched(output, 2 * self._batch_size, lambda rows: _doubled(rows[half]))

        return wrapped

    def _compute_or_extrapolate(self, forward: Callable[[], Any]) -> Any:
        """Run the denoiser, or, in a step that step caching skips, extrapolate linearly from its last two outputs."""
        if self._computed is None:
            return forward()
        outputs, time = self._outputs.setdefault(self._calls, []), self._timesteps[self._step]
        if self._step in self._computed:
            outputs.append((time, forward()))
            del outputs[:-2]
            return outputs[-1][1]
        (earlier, previous), (later, last) = outputs[0], outputs[-1]
        ahead = (time - later) / (later - earlier) if later != earlier else 0.0
        return _extrapolate(last, previous, ahead)

    def _find_conditional(self, arguments: dict[str, Any], doubled: bool) -> None:
        """Find which half of a doubled batch (usually the second) or which of two calls (the first) is the prompt's.

        Once per pipeline, because comparing embeddings waits for the GPU.
        """
        if doubled:
            if self._known_half is None:
                halves = [self._has_prompt(arguments, start) for start in (0, self._batch_size)]
                self._known_half = {(True, False): 0, (False, True): 1}.get((halves[0], halves[1]))
            self._conditional_half = 1 if self._known_half is None else self._known_half
        elif self._calls == 1:
            self._known_first = self._known_first or self._has_prompt(arguments, 0)
        elif not self._known_first and self._has_prompt(arguments, 0):
            raise PipelineError(
                f"Guidance cannot be truncated with {self._name}.",
                "It runs the denoiser for the negative prompt first, so the prompt's output cannot take its place.",
                "Leave --cfg_truncation_step and --preset out.",
            )

    def _has_prompt(self, arguments: dict[str, Any], start: int) -> bool:
        """Whether the rows from `start` on of some argument are the prompts' embeddings."""
        embeds = self._prompt_embeds()
        if embeds is None:
            return False
        candidates = [value[start : start + self._batch_size] for value in arguments.values() if _is_batched(value)]
        return any(_equal(rows, embeds) for rows in candidates)

    def _halved(self, name: str, value: Any, half: slice) -> Any:
        if isinstance(value, dict):
            return {key: self._halved(str(key), item, half) for key, item in value.items()}
        batched = _is_batched(value) and len(value) == 2 * self._batch_size
        return value[half] if batched and not any(word in name for word in _NOT_BATCHED) else value


def _map_batched(output: Any, count: int, change: Callable[[Any], Any]) -> Any:
    """Change every tensor and list in a denoiser's output that has `count` rows."""

    def change_rows(value: Any) -> Any:
        return change(value) if _is_batched(value) and len(value) == count else value

    return tree_map(change_rows, output, is_leaf=lambda value: isinstance(value, list))


def _doubled(rows: Any) -> Any:
    return torch.cat([rows, rows]) if isinstance(rows, Tensor) else [*rows, *rows]


def _extrapolate(last: Any, previous: Any, ahead: float) -> Any:
    def extend(end: Any, start: Any) -> Any:
        return torch.lerp(end.float(), start.float(), -ahead).to(end.dtype) if isinstance(end, Tensor) else end

    return tree_map(extend, last, previous)


def _is_batched(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _equal(rows: Any, embeds: Any) -> bool:
    if isinstance(rows, Tensor) and isinstance(embeds, Tensor):
        return rows.shape == embeds.shape and torch.equal(rows, embeds.to(rows))
    if isinstance(rows, list) and isinstance(embeds, list):
        return len(rows) == len(embeds) and all(map(_equal, rows, embeds))
    return False
