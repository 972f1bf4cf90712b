"""Prompt embeddings: each prompt is encoded once and alone, so that none depends on the other prompts of a batch."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn

from muralist.core.hardware import copy_to_device, copy_to_host
from muralist.generate.pipeline import SampleRequest

_TEXT_ARGUMENTS = ("prompt", "negative_prompt")  # and prompt_2, negative_prompt_3, ...
_TEXT_ENCODER = re.compile(r"text_encoder(_\d+)?")


class _TruncationCounter(logging.Handler):
    """Counts the warnings of pipelines that a prompt was truncated; the user gets one message for all prompts."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record."""
        self.count += "truncated" in record.getMessage()


_TRUNCATIONS = _TruncationCounter(logging.WARNING)


def count_truncations() -> None:
    """Send diffusers' warnings to the counter instead of the terminal."""
    diffusers_logging.set_verbosity_warning()
    diffusers_logging.disable_default_handler()
    diffusers_logging.add_handler(_TRUNCATIONS)  # a logger keeps a handler once


class _Stored(NamedTuple):
    """A tensor on the CPU, and the device it belongs to."""

    value: Tensor
    device: torch.device

    def restore(self) -> Tensor:
        return copy_to_device(self.value, self.device)  # a copy: the pipeline may change it in place


class PromptEmbeddingCache:
    """Replaces a pipeline's `encode_prompt` and keeps the embeddings of each prompt on the CPU.

    The public arguments `prompt_embeds=` and the like differ from pipeline to pipeline; all of them share
    `encode_prompt`.
    """

    def __init__(self, pipe: Any) -> None:
        self._encode: Callable[..., Any] = pipe.encode_prompt
        self._signature = inspect.signature(self._encode)
        self._embeddings: dict[Hashable, Any] = {}
        self._kept: dict[SampleRequest, set[Hashable]] = {}
        self._used: dict[Hashable, None] = {}
        self.truncated: set[str] = set()
        """Prompts that some text encoder did not read to their end."""
        self.prompt_embeds: Any = None
        """The prompts' embeddings of the first call since `begin`: [B, ...], or a list of B."""
        pipe.encode_prompt = functools.wraps(self._encode)(self)

    def begin(self) -> None:
        """Start another batch, or another prompt to be encoded ahead."""
        self.prompt_embeds, self._used = None, {}

    def used(self) -> list[Any]:
        """The stored embeddings that calls since `begin` used, in order."""
        return [self._embeddings[key] for key in self._used]

    def keep_for(self, request: SampleRequest) -> None:
        """Keep the embeddings used since `begin` until the request is dropped."""
        self._kept[request] = set(self._used)

    def retain(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Drop all requests but these; return those for which nothing is kept yet."""
        wanted = dict.fromkeys(requests)
        self._kept = {request: keys for request, keys in self._kept.items() if request in wanted}
        return [request for request in wanted if request not in self._kept]

    def evict(self) -> None:
        """Delete embeddings that are kept for no request."""
        kept = set().union(*self._kept.values())
        self._embeddings = {key: value for key, value in self._embeddings.items() if key in kept}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode prompts as `encode_prompt` does, joined from the results for each prompt alone."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = bound.arguments
        prompts: Any = given.get("prompt")
        has_embeds = any(value is not None for name, value in given.items() if name.endswith("embeds"))
        if not _is_texts(prompts) or has_embeds:
            return self._encode(*args, **kwargs)
        texts = [
            name
            for name, value in given.items()
            if name.startswith(_TEXT_ARGUMENTS) and _is_texts(value) and len(value) == len(prompts)
        ]
        rows = [self._encode_one(given, {name: given[name][index] for name in texts}) for index in range(len(prompts))]
        joined = _join(rows)
        if self.prompt_embeds is None:
            self.prompt_embeds = joined[0] if isinstance(joined, tuple) else joined
        return joined

    def _encode_one(self, given: dict[str, Any], texts: dict[str, str]) -> Any:
        others = {name: value for name, value in given.items() if name not in texts}
        key = (tuple(texts.items()), repr(others))
        if key not in self._embeddings:
            alone = {name: [text] for name, text in texts.items()}
            bound = inspect.BoundArguments(self._signature, {**given, **alone})  # type: ignore[arg-type]
            before = _TRUNCATIONS.count
            self._embeddings[key] = _store(self._encode(*bound.args, **bound.kwargs))
            if _TRUNCATIONS.count > before:
                self.truncated.add(texts["prompt"])
        self._used[key] = None
        return self._embeddings[key]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _store(result: Any) -> Any:
    if isinstance(result, Tensor):
        return _Stored(copy_to_host(result), result.device)
    if isinstance(result, tuple):
        return tuple(map(_store, result))
    return list(map(_store, result)) if isinstance(result, list) else result


def _join(rows: Sequence[Any]) -> Any:
    """Join the results for each prompt into the result for the batch."""
    first = rows[0]
    if isinstance(first, _Stored):
        return torch.cat([row.restore() for row in rows]) if _is_batched(first) else first.restore()
    if isinstance(first, tuple):
        return tuple(_join(parts) for parts in zip(*rows, strict=True))
    if isinstance(first, list):  # one embedding for each prompt
        return [part.restore() if isinstance(part, _Stored) else part for row in rows for part in row]
    return first


def _is_batched(stored: _Stored) -> bool:
    """Whether a prompt's tensor is a row of the batch; others are shared by the batch, such as Flux's text_ids."""
    return stored.value.ndim > 0 and stored.value.shape[0] == 1


def can_batch(one: Any, other: Any) -> bool:
    """Whether the stored embeddings of two prompts can be joined in one batch without changing either."""
    if isinstance(one, _Stored) and isinstance(other, _Stored):
        same_shape = one.value.shape == other.value.shape
        return same_shape and (_is_batched(one) or torch.equal(one.value, other.value))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(can_batch, one, other))
    return bool(one == other)


def text_encoders(pipe: Any) -> list[nn.Module]:
    """The text encoders of a pipeline."""
    components = pipe.components.items()
    return [part for name, part in components if _TEXT_ENCODER.fullmatch(name) and isinstance(part, nn.Module)]


def disable_kv_cache(encoder: Any) -> None:
    """Turn a language model's key-value cache off: embeddings do not need it, and a CUDA graph cannot return it."""
    config: Any = getattr(encoder, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if getattr(config, "use_cache", False):
        config.use_cache = False
