"""Text is encoded once, and every prompt alone: what a prompt means to the model never depends on its neighbours."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor

from muralist.copies import to_device, to_host
from muralist.generate.painter import Order

_TEXTS = ("prompt", "negative_prompt")  # and prompt_2, negative_prompt_3 ...
_ENCODER = re.compile(r"_get_\w+_prompt_embeds")
_TEXTS_TO_KEEP = 2  # a prompt and the negative one


class _Ears(logging.Handler):
    """Counts how often a pipeline says that it cut a text short, which the user is told once for all prompts."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Hear it."""
        self.count += "truncated" in record.getMessage()


_EARS = _Ears(logging.WARNING)


def hear_of_cuts() -> None:
    """Take what diffusers has to say, in place of the terminal."""
    diffusers_logging.set_verbosity_warning()
    diffusers_logging.disable_default_handler()
    diffusers_logging.add_handler(_EARS)  # once: a logger has no handler twice


class _Kept(NamedTuple):
    """An embedding on the CPU, and where it belongs."""

    value: Tensor
    device: torch.device

    def back(self) -> Tensor:
        return to_device(self.value, self.device)  # a copy: what the pipeline does to it is not kept


class TextMemory:
    """Stands before a pipeline's encode_prompt and remembers, on the CPU, what it said of each prompt."""

    def __init__(self, encode: Callable[..., Any]) -> None:
        self._encode = encode
        self._signature = inspect.signature(encode)
        self._rows: dict[Hashable, Any] = {}
        self._kept_for: dict[Order, set[Hashable]] = {}  # an order's keys
        self._touched: dict[Hashable, None] = {}
        self.cut: set[str] = set()
        """Prompts of which some text encoder did not read the end."""
        self.positive: Any = None
        """What the first call since `begin` said of the prompts themselves: embeddings [B, ...], or a list of B."""

    def attach(self, pipe: Any) -> None:
        """Put this in the place of the pipeline's method."""
        pipe.encode_prompt = functools.wraps(self._encode)(self)

    def begin(self) -> None:
        """Another picture, or another prompt to be encoded ahead."""
        self.positive, self._touched = None, {}

    def touched(self) -> list[Any]:
        """What was said of each prompt since `begin`, in the order of asking."""
        return [self._rows[key] for key in self._touched]

    def keep_for(self, order: Order) -> None:
        """Keep what was used since `begin` until the order is done with."""
        self._kept_for[order] = set(self._touched)

    def still_wanted(self, orders: Sequence[Order]) -> list[Order]:
        """Be done with all but these; those of them for which nothing is kept yet."""
        wanted = dict.fromkeys(orders)
        self._kept_for = {order: keys for order, keys in self._kept_for.items() if order in wanted}
        return [order for order in wanted if order not in self._kept_for]

    def forget_others(self) -> None:
        """Forget what is kept for no order."""
        kept = set().union(*self._kept_for.values())
        self._rows = {key: row for key, row in self._rows.items() if key in kept}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What encode_prompt would say, put together from what it says of every prompt alone."""
        bound = self._signature.bind(*arguments, **named)
        bound.apply_defaults()
        given: dict[str, Any] = bound.arguments
        prompts: Any = given.get("prompt")
        if not _is_texts(prompts) or any(value is not None for name, value in given.items() if name.endswith("embeds")):
            return self._encode(*arguments, **named)
        texts = [
            name
            for name, value in given.items()
            if name.startswith(_TEXTS) and _is_texts(value) and len(value) == len(prompts)
        ]
        said = [self._row(given, {name: given[name][index] for name in texts}) for index in range(len(prompts))]
        whole = _join(said)
        if self.positive is None:
            self.positive = whole[0] if isinstance(whole, tuple) else whole
        return whole

    def _row(self, given: dict[str, Any], texts: dict[str, str]) -> Any:
        rest = {name: value for name, value in given.items() if name not in texts}
        key = (tuple(texts.items()), repr(rest))
        if key not in self._rows:
            alone = {name: [text] for name, text in texts.items()}
            bound = inspect.BoundArguments(self._signature, {**given, **alone})  # type: ignore[arg-type]
            heard = _EARS.count
            self._rows[key] = _put_away(self._encode(*bound.args, **bound.kwargs))
            if _EARS.count > heard:
                self.cut.add(texts["prompt"])
        self._touched[key] = None
        return self._rows[key]


def remember_few_texts(pipe: Any) -> Callable[[], None]:
    """Let a pipeline's text encoders keep the last two answers: the negative prompt of most tables is always the same.

    Returns what makes them forget.
    """
    memories: list[dict[str, Any]] = []
    for name in filter(_ENCODER.fullmatch, dir(type(pipe))):
        memories.append({})
        setattr(pipe, name, _remembering(getattr(pipe, name), memories[-1]))

    def forget() -> None:
        for memory in memories:
            memory.clear()

    return forget


def _remembering(encode: Callable[..., Any], kept: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(encode)
    def answer(*arguments: Any, **named: Any) -> Any:
        key = repr((arguments, named))  # texts, numbers, devices and precisions
        said = kept.pop(key) if key in kept else encode(*arguments, **named)
        kept[key] = said
        if len(kept) > _TEXTS_TO_KEEP:
            del kept[next(iter(kept))]
        return said

    return answer


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _put_away(said: Any) -> Any:
    if isinstance(said, Tensor):
        return _Kept(to_host(said), said.device)
    if isinstance(said, tuple):
        return tuple(map(_put_away, said))
    return list(map(_put_away, said)) if isinstance(said, list) else said


def _join(said: Sequence[Any]) -> Any:
    """One answer for a batch out of answers for its prompts."""
    first = said[0]
    if isinstance(first, _Kept):
        return torch.cat([row.back() for row in said]) if _is_row(first) else first.back()
    if isinstance(first, tuple):
        return tuple(_join(parts) for parts in zip(*said, strict=True))
    if isinstance(first, list):  # of as many embeddings as prompts
        return [part.back() if isinstance(part, _Kept) else part for row in said for part in row]
    return first


def _is_row(kept: _Kept) -> bool:
    """Whether an embedding of one prompt is one row of a batch; what is not is shared, such as Flux's text_ids."""
    return kept.value.ndim > 0 and kept.value.shape[0] == 1


def joinable(one: Any, other: Any) -> bool:
    """Whether what was said of two prompts can stand in one batch without changing either."""
    if isinstance(one, _Kept) and isinstance(other, _Kept):
        same_shape = one.value.shape == other.value.shape
        return same_shape and (_is_row(one) or torch.equal(one.value, other.value))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(joinable, one, other))
    return bool(one == other)
