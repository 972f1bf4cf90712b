"""How a diffusers pipeline calls its network, found by watching one call of the pipeline instead of a file per model.

A pipeline knows everything a trainer must know: how latents are packed and normalized, what the network is told of the
noise level, which text embeddings, masks, positions and sizes it is given, and what its output means. The pipeline is
called with a network that records its arguments and a scheduler with two steps: the first step returns latents of the
probe's choice, which the pipeline hands to the network in the second. Latents that hold their own indices show where
each number goes; arguments that change with the latents, the timestep or the caption are bound to them, and the others
are constants. A network whose arguments do not follow these rules is refused with the argument's name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers.guiders import BaseGuidance
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only, tree_unflatten

from muralist.core.errors import UserError, first_line

_CAPTIONS = ("a red car", "a quiet street with nine parked cars and two tall trees in the rain", "")
_DIGIT = 1 << 11  # indices are sent through the VAE's normalization as two digits, which float32 keeps exact
_TOLERANCE = 1e-4
_GUIDANCE_OFF = (1.0, 0.0)  # Z-Image and Krea 2 guide at every scale above 0
CALL_SETTINGS = {
    "output_type": "pt",
    **dict.fromkeys(("num_frames", "frames", "video_length"), 1),
    "use_resolution_binning": False,  # the size is the user's
    **dict.fromkeys(("clean_caption", "enable_prompt_rewrite", "use_pe"), False),  # and so is the caption
    "use_kv_cache": False,  # Qwen-Image 2.1 would compute its text in the first step only
    "sag_scale": 0.0,  # self-attention guidance reads the attention of the pipeline's own network
}
"""Arguments of a pipeline that are the same in training and in its samples."""


class CallEnded(Exception):
    """Ends a pipeline's call early: at its network, or at the VAE's decoder."""


class UnsupportedPipeline(Exception):
    """Says in one sentence what is missing to train a pipeline."""


class _Guided(UnsupportedPipeline):
    """The pipeline calls its network for a second prompt."""


class _Observation(NamedTuple):
    """One call of a pipeline."""

    arguments: dict[str, Any]  # of the network
    latents_shape: torch.Size
    model_output: Tensor  # as the scheduler is given it
    decoded: Tensor  # the input of the VAE's decoder
    mu: float | None  # the shift of the noise levels that the scheduler is given
    first: dict[str, Any]  # arguments of the network in the first step, at the same timestep


class LatentMap(NamedTuple):
    """The pipeline's latents as a function of the VAE's: every number is moved, shifted and scaled."""

    shape: tuple[int, ...]  # of one sample's latents in the pipeline
    vae_shape: tuple[int, ...]  # of one sample's latents in the VAE
    source: Tensor | None  # index in the VAE's latents of each number of the pipeline's; None: the same order
    offset: Tensor  # in the VAE's order, broadcastable: latents = (z - offset) / scale
    scale: Tensor

    def normalize(self, z: Tensor) -> Tensor:
        """Convert the VAE's latents to the pipeline's, [B, *shape]."""
        flat = ((z.float() - self.offset) / self.scale).flatten(1)
        return (flat if self.source is None else flat[:, self.source]).reshape(len(z), *self.shape)

    def to(self, device: torch.device) -> LatentMap:
        """Move the tensors to a device."""
        source = None if self.source is None else self.source.to(device)
        return self._replace(source=source, offset=self.offset.to(device), scale=self.scale.to(device))


@dataclass(frozen=True)
class _Argument:
    """One argument of the network, or one entry of an argument that is a dictionary."""

    name: str
    value: Any  # as the pipeline gives it for one image
    depends: str  # on "latents", "time", "text" or "" (nothing)
    per_row: bool  # whether the first dimension is the image's
    is_list: bool  # whether it is a list with an entry for each image
    factor: float = 1.0  # time: value = factor * timestep + shift
    shift: float = 0.0


@dataclass(frozen=True)
class NetworkCall:
    """The arguments of a network at one image size: which is what, and what the output means."""

    arguments: tuple[_Argument, ...]
    structure: Any
    latents: LatentMap
    input_source: Tensor | None  # the network's order of the latents, where it is not the pipeline's
    input_place: Tensor | None  # where they are in an input that has constants too, such as an empty image's latents
    output_source: Tensor | None
    sign: float  # of the network's output in what the scheduler is given
    output_count: int | None  # how many numbers of an image the network must return; None: as many as a trial showed
    output_at_end: bool  # what the network returns of the latents comes after what it returns of the text
    ragged: bool  # texts of different captions differ in shape: the network is called for one image at a time
    mu: float | None  # the shift that the pipeline asks of a scheduler with `use_dynamic_shifting`

    @property
    def has_lists(self) -> bool:
        """Whether some text argument is a list with an entry for each image."""
        return self.ragged or any(argument.is_list for argument in self.text)

    @property
    def text(self) -> tuple[_Argument, ...]:
        """The arguments that depend on the caption."""
        return tuple(argument for argument in self.arguments if argument.depends == "text")

    def to(self, device: torch.device) -> NetworkCall:
        """Move constants and indices to a device."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        moved = tuple(
            _Argument(**(vars(each) | {"value": [move(v) for v in each.value] if each.is_list else move(each.value)}))
            for each in self.arguments
        )
        sources = {name: move(getattr(self, name)) for name in ("input_source", "input_place", "output_source")}
        return NetworkCall(**(vars(self) | sources | {"arguments": moved, "latents": self.latents.to(device)}))

    def predict(self, network: nn.Module, latents: Tensor, timesteps: Tensor, text: Sequence[Any]) -> Tensor:
        """Return the model output that a scheduler is given for noisy latents [B, *shape] and timesteps [B].

        `text` has an entry for each argument of `self.text`: rows [B, ...], or a list with an entry for each image.
        """
        if self.ragged:
            rows = [slice(row, row + 1) for row in range(len(latents))]
            parts = [
                self._predict(network, latents[row], timesteps[row], values)
                for row, values in zip(rows, zip(*text, strict=True), strict=True)
            ]
            return torch.cat(parts)
        return self._predict(network, latents, timesteps, text)

    def _predict(self, network: nn.Module, latents: Tensor, timesteps: Tensor, text: Sequence[Any]) -> Tensor:
        named, texts = [], iter(text)
        for argument in self.arguments:
            if argument.depends == "latents":
                named.append(self._noisy(argument, latents))
            elif argument.depends == "time":
                named.append(_times(argument, timesteps))
            elif argument.depends == "text":
                named.append(next(texts))
            else:
                named.append(_repeated(argument, len(latents)))
        output = network(**tree_unflatten(named, self.structure))
        return self._model_output(network, output, latents)

    def _noisy(self, argument: _Argument, latents: Tensor) -> Any:
        shape = (argument.value[0] if argument.is_list else argument.value).shape
        flat = latents.flatten(1)
        flat = flat if self.input_source is None else flat[:, self.input_source]
        if self.input_place is not None:
            whole = argument.value.flatten().to(flat).repeat(len(flat), 1)
            flat = whole.index_copy(1, self.input_place, flat)
        if argument.is_list:
            return [row.reshape(shape) for row in flat]
        return flat.reshape(len(latents), *shape[1:])

    def _model_output(self, network: nn.Module, output: Any, latents: Tensor) -> Tensor:
        while not isinstance(output, Tensor):
            if isinstance(output, list) and len(output) == len(latents):
                output = torch.stack([row.flatten() for row in output])
            else:
                output = output[0]
        flat = output.flatten(1)
        if self.output_at_end:
            flat = flat[:, -(self.output_count or 0) :]
        if self.output_count not in (None, flat.shape[1]):
            raise UserError(
                f"{type(network).__name__} cannot be trained yet: it returns {flat.shape[1]:,} numbers for an image where "
                f"{self.output_count:,} were expected.",
                "What the pipeline does with the others is unknown.",
                "Give another --model.path.",
            )
        # Without a source the order is the same; further channels are a learned variance that no sampler uses.
        count = latents[0].numel()
        flat = flat[:, :count] if self.output_source is None else flat[:, self.output_source]
        return (flat * self.sign if self.sign != 1 else flat).reshape(latents.shape)


def _times(argument: _Argument, timesteps: Tensor) -> Tensor:
    values = timesteps * argument.factor + argument.shift
    rest = argument.value.shape[1:] if argument.value.ndim else ()
    return values.view(-1, *[1] * len(rest)).expand(-1, *rest).contiguous()


def _repeated(argument: _Argument, rows: int) -> Any:
    value = argument.value
    if argument.is_list:
        return value * rows
    return value.expand(rows, *value.shape[1:]).contiguous() if argument.per_row and rows > 1 else value


class PipelineProbe:
    """A pipeline whose network and scheduler are replaced, so that its calls can be watched."""

    def __init__(self, pipe: Any, network: nn.Module, times: tuple[float, float, float]) -> None:
        """`network` is the pipeline's network, on the meta device; `times` are timesteps at which it is called."""
        self.pipe, self.network, self.times = pipe, network, times
        self._signature = inspect.signature(network.forward)
        self._parameters = inspect.signature(type(pipe).__call__).parameters
        self._guidance = _GUIDANCE_OFF[0]
        self._shapes: dict[Any, list[torch.Size]] = {}
        self._exact_output = True  # whether the network itself said what shape its output has
        self._more_tokens = 0  # that it returns before those of the image

    def network_call(self, size: tuple[int, int]) -> NetworkCall:
        """Find how the network is called for images of this height and width."""
        name = type(self.pipe).__name__
        try:
            return self._network_call(size)
        except UnsupportedPipeline as error:
            raise UserError(f"{name} cannot be trained yet: {error}", fix="Give another --model.path.") from None
        except UserError:
            raise
        except NameError as error:  # diffusers does without some packages until they are used
            raise UserError(
                f"{name} cannot be called: {first_line(error)}.",
                "It needs a package that is not installed.",
                f"Install the package: `pip install {error.name}`.",
            ) from error
        except Exception as error:  # whatever a pipeline raises for this size, or for being called like this
            raise UserError(
                f"{name} cannot be trained on images of {size[0]} x {size[1]} pixels: {first_line(error)}.",
                "A trial call of the pipeline failed.",
                "Give another --img_size (height and width), or another --model.path.",
            ) from error

    def network_arguments(self, caption: str, size: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments that the pipeline gives its network for one image."""
        return self._run([caption], size, stop_at_network=True).arguments

    def text_arguments(self, call: NetworkCall, caption: str, size: tuple[int, int]) -> list[Any]:
        """Encode a caption as the pipeline does: the network's arguments of `call.text`, for one image."""
        by_name = dict(_flatten(self.network_arguments(caption, size))[0])
        return [by_name[argument.name] for argument in call.text]

    def recorder(self, calls: list[dict[str, Any]], count: int) -> Callable[..., Any]:
        """Return a stand-in for the network that adds the arguments of its calls to a list, and ends the last call."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = self._signature.bind(*args, **kwargs).arguments
            calls.append(dict(_flatten(given)[0]))
            if len(calls) == count:
                raise CallEnded
            return self._fake_output(given)

        return forward

    def _network_call(self, size: tuple[int, int]) -> NetworkCall:
        short, long, empty = _CAPTIONS
        for self._guidance in _GUIDANCE_OFF:
            with suppress(_Guided):
                first = self._run([short], size)
                if len(next(iter(first.arguments.values()))) == 1:
                    break
        else:
            raise UnsupportedPipeline("its guidance cannot be turned off.")
        shape = first.latents_shape[1:]
        count = shape.numel()
        ramp = torch.arange(count, dtype=torch.float32).view(1, *shape)
        base = self._run([short], size, ramp, self.times[0], torch.zeros(1, *shape))
        moved = self._run([short], size, ramp + 1, self.times[0], torch.ones(1, *shape))
        later = self._run([short], size, ramp, self.times[1], ramp // _DIGIT)
        latest = self._run([short], size, ramp, self.times[2], ramp % _DIGIT)
        others = [self._run([caption], size, ramp, self.times[0], ramp) for caption in (long, empty)]
        pair = self._run([short, long], size, ramp.repeat_interleave(2, 0), self.times[0], ramp.repeat_interleave(2, 0))

        leaves, structure = _flatten(base.arguments)
        first_step = dict(_flatten(base.first)[0])
        views = [dict(_flatten(each.arguments)[0]) for each in (moved, later, latest, *others, pair)]
        for view in views[:-1]:  # beside a longer text, one may have a mask that it has not alone
            if unsteady := sorted(view.keys() ^ dict(leaves).keys()):
                raise UnsupportedPipeline(f"its network is given the argument {unsteady[0]} in some calls only.")
        arguments, ragged, input_source, input_place = [], False, None, None
        for name, value in leaves:
            at_moved, at_later, at_latest, at_long, at_empty, at_pair = (view.get(name) for view in views)
            depends = [
                kind
                for kind, changed in (
                    ("latents", _differ(value, at_moved)),
                    ("time", _differ(value, at_later)),
                    ("text", _differ(value, at_long) or _differ(value, at_empty)),
                )
                if changed
            ]
            if len(depends) > 1:
                raise UnsupportedPipeline(f"its network's argument {name} depends on {' and '.join(depends)} at once.")
            kind = depends[0] if depends else ""
            if kind != "latents" and _differ(value, first_step.get(name)):
                raise UnsupportedPipeline(f"its network's argument {name} depends on the sampler's next step.")
            is_list = isinstance(value, list) and len(value) == 1 and isinstance(at_pair, list) and len(at_pair) == 2
            per_row = is_list or (isinstance(value, Tensor) and value.ndim > 0 and _rows(value, at_pair) == 2)
            argument = _Argument(name, value, kind, per_row, is_list)
            if kind == "latents":
                input_source, input_place = self._input_map(name, value, at_moved, count)
            elif kind == "time":
                argument = _fit_time(argument, (at_later, at_latest), self.times)
            elif kind == "text" and not is_list:
                ragged |= not per_row or _shape(value) != _shape(at_long) or _shape(value) != _shape(at_empty)
            arguments.append(argument)
        kinds = [argument.depends for argument in arguments]
        if kinds.count("latents") != 1 or "time" not in kinds:
            raise UnsupportedPipeline("its network is not given the latents and a timestep each as one argument.")
        sign, output_source = _output_map(base.model_output, count)
        output_count, output_at_end = self._guessed_output(lambda: self._run([short], size, ramp), base)
        latents = _latent_map(tuple(shape), base.decoded, moved.decoded, later.decoded, latest.decoded)
        return NetworkCall(
            tuple(arguments), structure, latents, input_source, input_place, output_source, sign, output_count,
            output_at_end, ragged, base.mu,
        )  # fmt: skip

    def _guessed_output(self, run: Callable[[], _Observation], base: _Observation) -> tuple[int | None, bool]:
        """Say how many numbers the network must return, if its config alone says so, and whether those at the end count.

        A network that also returns the text's tokens, as that of Qwen-Image 2.1, returns more.
        """
        if self._exact_output:
            return None, False
        leaf = next(value for value in tree_leaves(base.arguments) if isinstance(value, Tensor))
        count = self._shape_by_config(leaf.shape).numel() // len(leaf)
        self._more_tokens = 1
        try:
            longer, shorter = run().model_output.abs(), base.model_output.abs()
        except Exception:  # whatever a pipeline raises of an output of another shape
            return count, False
        finally:
            self._more_tokens = 0
        return count, longer.shape == shorter.shape and bool((longer > shorter).all())

    @staticmethod
    def _input_map(name: str, value: Any, moved: Any, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Which latent is where in the network's input; the rest of the input does not change with the latents."""
        flat, other = ((each[0] if isinstance(each, list) else each).float().flatten().cpu() for each in (value, moved))
        place = (flat != other).nonzero().flatten()
        source = flat[place]
        if not torch.equal(source.sort().values, torch.arange(count, dtype=torch.float32)):
            raise UnsupportedPipeline(f"its network's argument {name} is not the latents alone.")
        return _unless_identity(source.long()), None if len(place) == len(flat) else place

    def _run(
        self,
        captions: list[str],
        size: tuple[int, int],
        latents: Tensor | None = None,
        time: float | None = None,
        final: Tensor | None = None,
        stop_at_network: bool = False,
    ) -> _Observation:
        """Call the pipeline; it hands `latents` and `time` to the network, and `final` to the VAE's decoder."""
        seen: dict[str, Any] = {"shape": torch.Size()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            if seen.get("called"):  # a second time before a step
                raise _Guided
            given = self._signature.bind(*args, **kwargs).arguments
            # Copies: Kandinsky 5 writes the next step's latents into the tensor that the network was given.
            seen["called"], seen["arguments"] = True, tree_map_only(Tensor, torch.clone, dict(given))
            seen.setdefault("first", seen["arguments"])
            if stop_at_network:
                raise CallEnded
            return self._fake_output(seen["arguments"])

        def step(model_output: Tensor, sample: Tensor, mu: float | None) -> Tensor:
            first, seen["called"] = "output" not in seen, False
            seen["output"], seen["shape"], seen["mu"] = model_output, sample.shape, mu
            result = latents if first else final
            # In float32, whatever the text encoders' precision is: bf16 does not hold indices.
            return sample if result is None else result.to(sample.device)

        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen["decoded"] = z
            raise CallEnded

        height, width = size
        settings: dict[str, Any] = {"prompt": captions, "height": height, "width": width, **CALL_SETTINGS}
        settings |= {"guidance_scale": self._guidance, "pag_scale": 0.0}
        settings = {key: value for key, value in settings.items() if key in self._parameters}
        with (
            self._replaced(forward, step, decode, self.times[0] if time is None else time),
            nullcontext() if stop_at_network else self._float32_text(),
            torch.no_grad(),
        ):
            try:
                self.pipe(**settings, generator=[torch.Generator().manual_seed(0) for _ in captions])
            except CallEnded:
                pass
        if "arguments" not in seen or not (stop_at_network or "decoded" in seen):
            raise UnsupportedPipeline("its call does not reach a network, a scheduler and a VAE's decoder.")
        output, decoded = (seen.get(name, torch.empty(0)).float().cpu() for name in ("output", "decoded"))
        return _Observation(seen["arguments"], seen["shape"], output, decoded, seen.get("mu"), seen["first"])

    @contextmanager
    def _replaced(self, forward: Any, step: Any, decode: Any, time: float) -> Iterator[None]:
        pipe = self.pipe
        scheduler, bar = pipe.scheduler, dict(getattr(pipe, "_progress_bar_config", {}))
        pipe.set_progress_bar_config(disable=True)
        pipe.scheduler = _two_step_scheduler(scheduler, time, step)
        self.network.forward, pipe.vae.decode = forward, decode  # type: ignore[method-assign]
        guiders = [part for part in pipe.components.values() if isinstance(part, BaseGuidance) and part._enabled]
        for guider in guiders:
            guider.disable()
        try:
            yield
        finally:
            for guider in guiders:
                guider.enable()
            del self.network.forward, pipe.vae.decode
            pipe.scheduler, pipe._progress_bar_config = scheduler, bar

    @contextmanager
    def _float32_text(self) -> Iterator[None]:
        """Let text embeddings be float32: latents get their dtype, and bf16 does not hold indices."""
        encode = getattr(self.pipe, "encode_prompt", None)
        if encode is None:
            yield
            return

        def widened(*args: Any, **kwargs: Any) -> Any:
            return tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, encode(*args, **kwargs))

        before = vars(self.pipe).get("encode_prompt")  # one that remembers prompts
        self.pipe.encode_prompt = functools.wraps(encode)(widened)
        try:
            yield
        finally:
            del self.pipe.encode_prompt
            if before is not None:
                self.pipe.encode_prompt = before

    def _fake_output(self, arguments: Mapping[str, Any]) -> Any:
        """Numbers that tell their own places, in the shape of the network's output."""
        first = next(iter(arguments.values()))
        rows = first if isinstance(first, list) else [first]
        leaves = tree_leaves(dict(arguments))
        key = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves)
        if key not in self._shapes:  # even on the meta device, a network takes a while
            found = self._output_shapes(arguments)
            self._exact_output = found is not None
            self._shapes[key] = found or [self._shape_by_config(row.shape) for row in rows]
        shapes = self._shapes[key]
        if self._more_tokens:
            shapes = [torch.Size([shape[0], shape[1] + self._more_tokens, *shape[2:]]) for shape in shapes]
        outputs = []
        for shape in shapes:
            batch = 1 if isinstance(first, list) else shape[0]
            numbers = torch.arange(1, 1 + shape.numel() // batch, dtype=torch.float32, device=rows[0].device)
            outputs.append(numbers.repeat(batch).view(shape))
        return _NetworkOutput([outputs if isinstance(first, list) else outputs[0]])

    def _shape_by_config(self, shape: torch.Size) -> torch.Size:
        """The shape of the output by the network's config: as the input, with its own number of channels."""
        config: Any = self.network.config
        channels, own = config.get("in_channels"), config.get("out_channels")
        given = isinstance(own, int) and len(shape) > 1 and shape[1] == channels
        return torch.Size([shape[0], own, *shape[2:]]) if given else shape

    def _output_shapes(self, arguments: Mapping[str, Any]) -> list[torch.Size] | None:
        def to_meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to("meta")
            if isinstance(value, list | tuple):
                return type(value)(to_meta(each) for each in value)
            return {key: to_meta(each) for key, each in value.items()} if isinstance(value, dict) else value

        try:
            output = type(self.network).forward(self.network, **{k: to_meta(v) for k, v in arguments.items()})
        except Exception:  # a network that reads values on the way, such as the lengths of texts
            return None
        while not isinstance(output, Tensor):
            if isinstance(output, list) and all(isinstance(row, Tensor) for row in output):
                return [row.shape for row in output]
            output = output[0]
        return [output.shape]


def _two_step_scheduler(scheduler: Any, time: float, on_step: Callable[[Tensor, Tensor, float | None], Tensor]) -> Any:
    """A copy of a scheduler whose schedule is two steps at one timestep, and which scales nothing."""
    base = type(scheduler)
    signature = inspect.signature(base.step)

    class TwoSteps(base):  # type: ignore[misc, valid-type]
        init_noise_sigma = 1.0
        mu: float | None = None

        @functools.wraps(base.set_timesteps)
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            super().set_timesteps(*args, **kwargs)
            own: Any = self
            own.timesteps = torch.tensor([time, time]).to(own.timesteps)
            own.num_inference_steps, own.mu = 2, kwargs.get("mu")

        @functools.wraps(base.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs).arguments  # the sample is not everywhere the third
            output = given["model_output"]
            if given.get("per_token_timesteps") is not None:
                output = -output  # FlowMatchEuler counts such steps from data to noise, as LTXConditionPipeline does
            latents = on_step(output, given["sample"], self.mu)
            return (latents, latents) if kwargs.get("return_dict") is False else _StepOutput(latents, latents)

        def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
            return sample

    TwoSteps.__name__ = base.__name__
    watched = copy.copy(scheduler)
    watched.__class__ = TwoSteps
    return watched


class _NetworkOutput(tuple[Any, ...]):
    """An output that is read as output[0] or as output.sample."""

    @property
    def sample(self) -> Any:
        return self[0]


class _StepOutput(NamedTuple):
    prev_sample: Tensor
    pred_original_sample: Tensor


def _flatten(arguments: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], Any]:
    """Arguments by name, entries of dictionaries by their path; a list stays one value."""
    leaves: Any  # paths of keys, and values
    leaves, structure = tree_flatten_with_path(dict(arguments), is_leaf=lambda value: isinstance(value, list | tuple))
    return [(".".join(str(entry.key) for entry in path), value) for path, value in leaves], structure


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) != len(other) or any(_differ(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or not torch.equal(one, other)
    return type(one) is not type(other) or bool(one != other)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _rows(value: Tensor, at_pair: Any) -> int:
    """How many rows a value has for two images."""
    return len(at_pair) if isinstance(at_pair, Tensor) and at_pair.ndim and len(value) == 1 else 0


def _fit_time(argument: _Argument, others: Sequence[Any], times: tuple[float, float, float]) -> _Argument:
    """Fit value = factor * timestep + shift to two timesteps, and check it at a third."""
    given = (argument.value, *others)
    values = [each.double().flatten().cpu() if isinstance(each, Tensor) else None for each in given]
    if any(value is None or not torch.equal(value, value[:1].expand_as(value)) for value in values):
        raise UnsupportedPipeline(f"its network's argument {argument.name} is not one number for each timestep.")
    first, second, third = (float(value[0]) for value in values)  # type: ignore[index]
    factor = (first - second) / (times[0] - times[1])
    shift = first - factor * times[0]
    if abs(factor * times[2] + shift - third) > _TOLERANCE * max(1.0, abs(third)):
        raise UnsupportedPipeline(f"its network's argument {argument.name} is not linear in the timestep.")
    factor, shift = _simple(factor), _simple(shift)
    return _Argument(**(vars(argument) | {"factor": factor, "shift": shift}))


def _simple(number: float) -> float:
    """The decimal number that was meant: 0.001 instead of 0.0010000000149."""
    return float(f"{number:.5g}") if abs(number) > 1e-7 else 0.0


def _output_map(model_output: Tensor, count: int) -> tuple[float, Tensor | None]:
    """The sign and the places of the network's output in what the scheduler is given; outputs count from 1."""
    flat = model_output.float().flatten()
    sign = -1.0 if flat[0] < 0 else 1.0
    source = (flat * sign).long() - 1
    if flat.numel() != count or bool((source < 0).any()) or not torch.equal((source + 1).float() * sign, flat):
        raise UnsupportedPipeline("its scheduler is given something else than the network's output.")
    return sign, _unless_identity(source)


def _latent_map(shape: tuple[int, ...], zero: Tensor, one: Tensor, high: Tensor, low: Tensor) -> LatentMap:
    """Invert the path from the last latents to the VAE's decoder: z = scale * latents[place] + offset."""
    offset, scale = zero[0].double(), (one - zero)[0].double()
    if bool((scale == 0).any()):
        raise UnsupportedPipeline("the VAE's decoder is given numbers that are not latents.")
    digits = [((value[0].double() - offset) / scale) for value in (high, low)]
    place = (digits[0].round() * _DIGIT + digits[1].round()).flatten().long()  # of each number of z in the latents
    if place.numel() < (count := torch.Size(shape).numel()):  # CogVideoX 1.5 pads its latents to two frames
        raise UnsupportedPipeline(f"it denoises {count:,} numbers, of which the VAE decodes {place.numel():,}.")
    if place.numel() != count or not torch.equal(place.sort().values, torch.arange(len(place))):
        raise UnsupportedPipeline("the VAE's latents are not the pipeline's, in another order.")
    source = torch.empty_like(place)
    source[place] = torch.arange(len(place))
    return LatentMap(shape, tuple(zero.shape[1:]), _unless_identity(source), _squeezed(offset), _squeezed(scale))


def _squeezed(values: Tensor) -> Tensor:
    """A number for each channel, or one for all, where the others are the same."""
    channels = values.flatten(1)[:, :1].view(-1, *[1] * (values.ndim - 1))
    if not torch.allclose(values, channels.expand_as(values), rtol=1e-6, atol=1e-7):
        return values.float()
    return channels[:1].float() if torch.allclose(channels, channels[:1], rtol=1e-6, atol=1e-7) else channels.float()


def _unless_identity(source: Tensor) -> Tensor | None:
    return None if torch.equal(source, torch.arange(len(source), device=source.device)) else source
