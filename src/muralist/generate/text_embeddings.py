"""Prompts become embeddings: each prompt encoded alone and stored, its tokens counted, its shapes predicted."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedTokenizerBase

from muralist.core.hardware import copy_to_device, copy_to_host
from muralist.generate.pipeline import Requests, SampleRequest, Truncation

_TOKENS_PADDED_TO = 32  # a multiple of it, where a mask hides the padding: few lengths, so that batches fill
_TEXT_ARGUMENTS = ("prompt", "negative_prompt")  # and prompt_2, negative_prompt_3, ...
_TEXT_ENCODER = re.compile(r"text_encoder(_\d+)?")
_COUNTING_OPTIONS = ("add_special_tokens", "is_split_into_words")  # of a tokenizer: those that change the number


class EncoderShapes:
    """Predicts the shapes of text encoders' outputs, which take a second pass over a table no time to compute."""

    def __init__(self, encoders: Sequence[Any]) -> None:
        self._encoders = list(encoders)
        self._outputs: list[tuple[torch.Size, Any]] = []  # the shape of the token ids, and a meta output

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note the outputs of all encoders that run meanwhile."""
        found: dict[int, tuple[torch.Size, Any]] = {}

        def note(place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                output = forward(*args, **kwargs)
                found[place] = _token_ids(args, kwargs).shape, tree_map_only(Tensor, _to_meta, output)
                return output

            return run

        with self._replaced(note):
            yield
        self._outputs = [found[place] for place in sorted(found)] if len(found) == len(self._encoders) else []

    @contextmanager
    def predicted(self) -> Iterator[None]:
        """Replace the encoders, if all of them ran while `recorded`: they return zeros, stored once per tensor."""

        def predict(place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                (before, output), ids = self._outputs[place], _token_ids(args, kwargs)

                def zeros(value: Tensor) -> Tensor:
                    same = sum(1 for mine, theirs in zip(value.shape[:2], before, strict=False) if mine == theirs)
                    zero = torch.zeros((), dtype=value.dtype, device=ids.device)
                    return zero.expand(*ids.shape[:same], *value.shape[same:])

                return tree_map_only(Tensor, zeros, output)

            return run

        with self._replaced(predict) if self._outputs else nullcontext():
            yield

    @contextmanager
    def _replaced(self, wrap: Callable[[int, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        originals = [encoder.forward for encoder in self._encoders]
        for place, (encoder, forward) in enumerate(zip(self._encoders, originals, strict=True)):
            encoder.forward = wrap(place, forward)
        try:
            yield
        finally:
            for encoder, forward in zip(self._encoders, originals, strict=True):
                encoder.forward = forward


def _token_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    ids: Tensor = args[0] if args else kwargs["input_ids"]
    return ids


def _to_meta(value: Tensor) -> Tensor:
    return value.to("meta")


class TokenCounter:
    """Counts the tokens of prompts that a pipeline's tokenizers truncate.

    Not every pipeline warns of truncation, so the tokenizers' public `__call__` is wrapped, by a subclass of each
    tokenizer's class: a truncated text is tokenized a second time, in full.
    """

    def __init__(self, pipe: Any) -> None:
        self.truncated: dict[str, Truncation] = {}
        """By prompt, of all prompts and negative prompts encoded so far."""
        self._texts: tuple[str, ...] = ()  # those being encoded; the first is a prompt
        self._max_length: int | None = None
        # Tokens of a prompt template that the pipeline drops after encoding, before it keeps max_sequence_length.
        dropped = getattr(pipe, "prompt_template_encode_start_idx", 0)
        self._dropped = dropped if isinstance(dropped, int) else 0
        for name, component in pipe.components.items():
            tokenizer = getattr(component, "tokenizer", component)  # a processor has one
            if isinstance(tokenizer, PreTrainedTokenizerBase):
                encoder = "text_encoder" + name.removeprefix("tokenizer") if name.startswith("tokenizer") else name
                self._wrap(tokenizer, encoder, type(getattr(pipe, encoder, None)).__name__)

    @contextmanager
    def counting(self, texts: Sequence[str], max_length: int | None = None) -> Iterator[None]:
        """Attribute what is tokenized to these prompts; the pipeline keeps `max_length` tokens, if that is known."""
        before = self._texts, self._max_length
        self._texts, self._max_length = tuple(texts), max_length
        try:
            yield
        finally:
            self._texts, self._max_length = before

    def _wrap(self, tokenizer: Any, encoder: str, kind: str) -> None:
        original = type(tokenizer)

        def call(this: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = original.__call__(this, text, *args, **kwargs)
            texts = [text] if isinstance(text, str) else text
            if self._texts and _is_texts(texts):
                ids = result["input_ids"]
                rows = ids if isinstance(text, list) or isinstance(ids, Tensor) else [ids]
                options = {name: value for name, value in kwargs.items() if name in _COUNTING_OPTIONS}
                for each, row in zip(texts, rows, strict=False):
                    if not len(row):
                        continue  # an empty text of a tokenizer without special tokens
                    # A padding token at either end means that the text was shorter than the window.
                    padded = this.pad_token_id is not None and this.pad_token_id != this.eos_token_id
                    if padded and this.pad_token_id in (int(row[0]), int(row[-1])):
                        continue
                    tokens = len(original.__call__(this, each, *args, **options)["input_ids"])
                    self._record(each, encoder, kind, tokens, len(row))
            return result

        tokenizer.__class__ = type(original.__name__, (original,), {"__call__": call})

    def _record(self, text: str, encoder: str, kind: str, tokens: int, read: int) -> None:
        longest = self._max_length or read
        if self._dropped and min(tokens, read) - self._dropped > longest:  # not truncated, but sliced afterwards
            tokens, read = tokens - self._dropped, longest
        elif tokens > read > longest:  # the window was extended by the length of a prompt template
            tokens, read = tokens - (read - longest), longest
        if tokens > read:
            counts = {"class": kind, "tokens": tokens, "limit": read}
            self.truncated.setdefault(self._prompt_of(text), {})[encoder] = counts

    def _prompt_of(self, text: str) -> str:
        """Find the prompt in a tokenized text, which may be in lower case and inside a template."""
        squeezed = _squeeze(text)
        found = [prompt for prompt in self._texts if _squeeze(prompt) in squeezed]
        return max(found, key=len, default=self._texts[0])


def _squeeze(text: str) -> str:
    return " ".join(text.lower().split())


@dataclass(frozen=True)
class _Stored:
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

    def __init__(self, pipe: Any, tokens: TokenCounter, length_step: int = 1) -> None:
        self._tokens = tokens
        self._length_step = length_step  # the network itself pads texts to multiples of so many tokens
        self.is_available = hasattr(pipe, "encode_prompt")
        """Some old pipelines encode text elsewhere; they generate one image at a time."""
        self._embeddings: dict[Hashable, Any] = {}
        self._kept: dict[SampleRequest, set[Hashable]] = {}
        self._used: dict[Hashable, None] = {}
        self.prompt_embeds: Any = None
        """The prompts' embeddings of the first call since `begin`: [B, ...], or a list of B."""
        self.varies = False
        """Whether embeddings are as long as the prompt: in a batch they are padded, if a mask can say so."""
        self._shapes: list[list[Any]] | None = None
        if self.is_available:
            self._encode: Callable[..., Any] = pipe.encode_prompt
            self._signature = inspect.signature(self._encode)
            pipe.encode_prompt = functools.wraps(self._encode)(self)

    def begin(self) -> None:
        """Start another batch, or another prompt to be encoded ahead."""
        self.prompt_embeds, self._used = None, {}

    def used(self) -> list[Any]:
        """The stored embeddings that calls since `begin` used, in order."""
        return [self._embeddings[key] for key in self._used]

    def prepare(self, requests: Requests, encode: Callable[[SampleRequest], Any]) -> None:
        """Keep the embeddings of these requests only; those that are missing come from a call of `encode`."""
        wanted = dict.fromkeys(requests)
        self._kept = {request: keys for request, keys in self._kept.items() if request in wanted}
        for request in wanted:
            if request not in self._kept:
                encode(request)
                self._kept[request] = set(self._used)
        self.evict()

    @contextmanager
    def shapes_only(self) -> Iterator[list[list[Any]]]:
        """For a call of the pipeline that neither reads nor stores embeddings.

        Yields a list that gets, for each call of `encode_prompt`, the shapes of every prompt's embeddings.
        """
        self._shapes = []
        try:
            yield self._shapes
        finally:
            self._shapes = None

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
        each = [{name: given[name][index] for name in texts} for index in range(len(prompts))]
        if self._shapes is not None:
            results = [self._encode_alone(given, alone) for alone in each]
            self._shapes.append([self._batch_shapes(result) for result in results])
            return _join([tree_map_only(Tensor, _to_host, results[0])] * len(prompts))  # rows of one shape
        rows = [self._encode_one(given, alone) for alone in each]
        if self.varies and self._has_mask(rows[0]) and len(rows) > 1:
            joined: Any = tuple(map(torch.cat, zip(*(_padded(*_join([row])) for row in rows), strict=True)))
        else:
            joined = _join(rows)
        if self.prompt_embeds is None:
            self.prompt_embeds = joined[0] if isinstance(joined, tuple) else joined
        return joined

    def _batch_shapes(self, result: Any) -> Any:
        """The shapes of a prompt's embeddings as they are in a batch; a list has [tokens, width] of each prompt."""
        if self._has_mask(result):
            result = _padded(*result)

        def shape(value: Tensor) -> tuple[int, ...]:
            first = -(-len(value) // self._length_step) * self._length_step if value.ndim == 2 else len(value)
            return first, *value.shape[1:]

        return tree_map_only(Tensor, shape, result)

    def _encode_one(self, given: dict[str, Any], texts: dict[str, str]) -> Any:
        others = {name: value for name, value in given.items() if name not in texts}
        key = (tuple(texts.items()), repr(others))
        if key not in self._embeddings:
            with self._tokens.counting((texts["prompt"], *texts.values()), given.get("max_sequence_length")):
                self._embeddings[key] = tree_map_only(Tensor, _to_host, self._encode_alone(given, texts))
        self._used[key] = None
        return self._embeddings[key]

    def _has_mask(self, result: Any) -> bool:
        """Whether a result is embeddings and their mask, as of Qwen-Image; None is a mask that hides nothing."""
        return "prompt_embeds_mask" in self._signature.parameters and isinstance(result, tuple) and len(result) == 2

    def _encode_alone(self, given: dict[str, Any], texts: dict[str, str]) -> Any:
        alone = {name: [text] for name, text in texts.items()}
        bound = inspect.BoundArguments(self._signature, {**given, **alone})  # type: ignore[arg-type]
        return self._encode(*bound.args, **bound.kwargs)


def _to_host(value: Tensor) -> _Stored:
    return _Stored(copy_to_host(value), value.device)


def _padded(embeds: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pad a prompt's embeddings [1, tokens, width] to a multiple of tokens, as the pipeline does for the longest.

    A mask is given even where nothing is padded: attention without one uses other kernels.
    """
    missing = -embeds.shape[1] % _TOKENS_PADDED_TO
    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device) if mask is None else mask
    return functional.pad(embeds, (0, 0, 0, missing)), functional.pad(mask, (0, missing))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _join(rows: Sequence[Any]) -> Any:
    """Join the results for each prompt into the result for the batch."""
    first = rows[0]
    if isinstance(first, _Stored):
        return torch.cat([row.restore() for row in rows]) if _is_batched(first) else first.restore()
    if isinstance(first, tuple):
        return tuple(_join(parts) for parts in zip(*rows, strict=True))
    if isinstance(first, list) and all(isinstance(part, _Stored) and part.value.ndim > 2 for part in first):
        return [_join(layers) for layers in zip(*rows, strict=True)]  # Bria Fibo: hidden states of every layer
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


def has_other_mask(one: Any, other: Any) -> bool:
    """Whether the stored embeddings of two prompts contain masks that differ."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return any(
        isinstance(mine, _Stored)
        and bool(((mine.value == 0) | (mine.value == 1)).all())
        and not torch.equal(mine.value, theirs.value)
        for mine, theirs in pairs
    )


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
