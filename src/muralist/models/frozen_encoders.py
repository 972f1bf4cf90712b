"""Data that were encoded ahead of training, and the frozen encoders of a pipeline, which then leave the GPU.

Text encoders only serve samples then. A pipeline's `encode_prompt` is replaced, while samples are made, by one that
remembers its results for each prompt. Prompts of a batch are encoded one by one where the pipeline gives every prompt
the same shape, so that a sample does not depend on its neighbors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

from muralist.core.errors import UserError
from muralist.data.packed import LatentSource, TextTensors
from muralist.models.pipeline_probe import NetworkCall

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PipelineEncoders:
    """The frozen components of a pipeline at one image size, for `muralist pack --encode`."""

    call: NetworkCall
    posterior: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
    text_arguments: Callable[[str], list[Any]]

    def encode_images(self, images: Tensor) -> Tensor:
        """Return mean and deviation, or the latents alone, of images in [-1, 1]: [B, 2 or 1, ...]."""
        mean, std = self.posterior(images, len(self.call.latents.vae_shape))
        return torch.stack([mean] if std is None else [mean, std], dim=1)

    def encode_captions(self, captions: Sequence[str]) -> list[dict[str, Any]]:
        """Return the text arguments of the network for each caption, by name."""
        found = [self.text_arguments(caption) for caption in captions]
        return [
            {each.name: value[0] if each.is_list else value for each, value in zip(self.call.text, values, strict=True)}
            for values in found
        ]


class PromptEmbeddings:
    """What a pipeline's text encoders return for prompts, kept in host memory."""

    def __init__(self, pipe: Any, encoders: Sequence[nn.Module], run_on: Callable[[torch.device], None]) -> None:
        """`run_on` tells the pipeline on which device its text is encoded."""
        self._pipe, self._encoders, self._run_on = pipe, encoders, run_on
        self._encode: Callable[..., Any] | None = getattr(pipe, "encode_prompt", None)
        self._signature = inspect.signature(self._encode) if self._encode else None
        self._known: dict[str, Any] = {}
        self.device = self.encoder_device = _CPU
        """Where the pipeline runs, and where its text encoders are."""

    def move_encoders(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move the text encoders to a device."""
        for encoder in self._encoders:
            nn.Module.to(encoder, device, dtype)  # diffusers' own `to` logs a warning
        self.encoder_device = device

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Let the pipeline's calls meanwhile encode each prompt once.

        A pipeline without `encode_prompt` gets its text encoders back meanwhile.
        """
        away = self.encoder_device
        if self._encode is None:
            self.move_encoders(self.device)
        else:
            self._pipe.encode_prompt = self._encode_prompts
        try:
            yield
        finally:
            if self._encode is None:
                self.move_encoders(away)
            else:
                del self._pipe.encode_prompt

    def _encode_prompts(self, *args: Any, **kwargs: Any) -> Any:
        assert self._signature is not None
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        lists = {name: value for name, value in given.items() if isinstance(value, list) and "prompt" in name}
        count = len(next(iter(lists.values()), []))
        if count > 1 and all(len(value) == count for value in lists.values()):
            rows = [{**given, **{name: value[row : row + 1] for name, value in lists.items()}} for row in range(count)]
            try:
                return _join([self._recall(row) for row in rows])
            except ValueError:
                pass  # texts of several lengths, which the pipeline pads
        return self._recall(given)

    def _recall(self, given: Mapping[str, Any]) -> Any:
        assert self._encode is not None
        if tree_any(lambda value: isinstance(value, Tensor), dict(given)):
            return self._encode(**given)
        key = repr({name: value for name, value in given.items() if name != "device"})
        if key not in self._known:
            here = {"device": self.encoder_device} if "device" in given else {}
            self._run_on(self.encoder_device)
            try:
                found = self._encode(**{**given, **here})
            finally:
                self._run_on(self.device)
            self._known[key] = tree_map_only(Tensor, lambda value: value.to(_CPU), found)
        return tree_map_only(Tensor, lambda value: value.to(self.device), self._known[key])


def _join(rows: Sequence[Any]) -> Any:
    """Join the results of single prompts to those of a batch; ValueError if they do not fit."""
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(_join(values) for values in zip(*rows, strict=True))
    if isinstance(first, list) and all(isinstance(row, list) and len(row) == 1 for row in rows):
        return [row[0] for row in rows]
    if isinstance(first, Tensor) and all(isinstance(row, Tensor) and row.shape == first.shape for row in rows):
        if first.ndim and len(first) == 1:
            return torch.cat(list(rows))
        if all(torch.equal(row, first) for row in rows):  # the same for all images, such as positions
            return first
    if all(row is None for row in rows):
        return None
    raise ValueError("the results of single prompts cannot be joined")


def unconditional_text(
    call: NetworkCall, empty: list[Any], guided_calls: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> list[Any]:
    """Return what a pipeline gives its network where samples are guided away from; `empty` encodes the prompt "".

    Most encode an empty negative prompt as any prompt. SDXL has zeros instead, and Sana and Lumina 2 leave out the words
    that they put before every prompt. `guided_calls` returns the arguments of the network in one step with the prompt "".
    """
    found = _other_than(empty, call, guided_calls({}))
    if found is None or any(leaf.any() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)):
        # Kandinsky 5 has words of its own for a negative prompt that is not given; EasyAnimate cannot do without one.
        found = _other_than(empty, call, guided_calls({"negative_prompt": [""]}))
    shapes = [[leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, Tensor)] for values in (empty, found)]
    return empty if found is None or (shapes[0] != shapes[1] and not call.ragged) else found


def _other_than(empty: list[Any], call: NetworkCall, calls: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return the text arguments of the first row of some calls that are not those of the empty prompt."""
    noisy = next(argument.name for argument in call.arguments if argument.depends == "latents")
    for arguments in calls:
        rows = len(arguments[noisy])
        for row in range(rows):
            values = [_row(arguments.get(each.name), row, rows, each.is_list) for each in call.text]
            if not all(map(_alike, values, empty)):
                return values
    return None


def _row(value: Any, row: int, rows: int, is_list: bool) -> Any:
    """Return the part of one of several images in a text argument, as a batch of one image would have it."""
    one = slice(row, row + 1)
    if rows == 1 or is_list:
        return value if rows == 1 else value[one]
    return tree_map_only(Tensor, lambda part: part[one] if part.ndim and len(part) == rows else part, value)


def _alike(one: Any, other: Any) -> bool:
    """Whether two text arguments are equal but for what a text encoder rounds otherwise in another batch."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    close = 1e-2 * float(other.float().abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-2, atol=close)


def stored_texts(call: NetworkCall, text: TextTensors, examples: Sequence[Any]) -> list[list[Any]]:
    """Return the text arguments of each image from stored ones, in the dtypes of `PipelineProbe.text_arguments`."""
    columns = []
    for argument, value in zip(call.text, examples, strict=True):
        example = value[0] if argument.is_list else value
        rows = [row.to(example.dtype) if isinstance(row, Tensor) else row for row in text[argument.name]]
        columns.append([[row] for row in rows] if argument.is_list else rows)
    return [list(values) for values in zip(*columns, strict=True)]


def check_stored(source: LatentSource, call: NetworkCall) -> None:
    """Refuse encoded data for other arguments of the network than the installed diffusers gives it."""
    manifest, names = source.manifest, {argument.name for argument in call.text}
    shape = tuple(manifest.tensors["latents"].shape[2:])
    if names != set(manifest.texts) or shape != call.latents.vae_shape:
        raise UserError(
            f"{source.folder} does not hold what the pipeline gives its network.",
            f"It has latents of {shape} and {', '.join(manifest.texts)}; now they are {call.latents.vae_shape} and "
            f"{', '.join(sorted(names))}. Another version of diffusers may have encoded it.",
            "Encode the data set again with `muralist pack --encode`.",
        )
