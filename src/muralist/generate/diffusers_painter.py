"""Pictures from any text-to-image or text-to-video pipeline in diffusers layout."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from muralist import compiled_code
from muralist.errors import UserError, nearest
from muralist.generate.adapters import add_adapters, check_adapters
from muralist.generate.card import Copying, Ease
from muralist.generate.carried import carry
from muralist.generate.fp8 import Fp8Linear, exactly, use_fp8
from muralist.generate.guidance import DENOISERS, DenoisingLoop
from muralist.generate.noise import own_noise
from muralist.generate.painter import TRIAL_STEPS, Beat, CannotPaint, Finished, Order, Pending, Way, overflowed
from muralist.generate.recorded import Recorders
from muralist.generate.shortcuts import shortcut_of
from muralist.generate.text import TextMemory, hear_of_cuts, joinable, remember_few_texts
from muralist.generate.text_encoders import keep_no_cache, text_encoders, whole_masks
from muralist.generate.tuned import Tuning, repeated_blocks, tune, tuned
from muralist.models.fp8_products import can_fp8
from muralist.settings import GenerateSettings
from muralist.settings.generate import scheduler_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SHARE_OF_CARD = 0.6  # a model larger than this leaves too little room for its activations
_SHORT, _LONG = "a", "one of many words " * 12
_NO_NEGATIVE = " "  # pipelines with true_cfg_scale guide only where a negative prompt is given


class DiffusersPainter:
    """A pipeline on one device."""

    def __init__(self, pipe: Any, settings: GenerateSettings, device: torch.device, tuning: Tuning) -> None:
        assert settings.height and settings.width and settings.guidance_scale != "auto", "settled by check_model"
        self._pipe, self._size = pipe, (settings.height, settings.width)
        self._name = type(pipe).__name__
        self._takes = inspect.signature(pipe.__call__).parameters
        self._check_kind()
        self._steps = settings.num_inference_steps
        self._guidance = self._guidance_arguments(settings.guidance_scale)
        self._frames = self._frame_arguments(settings)
        self._precision = settings.dtype
        self._device, self._tuning = device, tuning
        self._fast = settings.preset == "fast"
        shortcut = shortcut_of(self._name) if self._fast else None
        self._in_8_bits: list[Fp8Linear] = []
        if shortcut is not None and shortcut.fp8 and can_fp8(device):
            self._in_8_bits = use_fp8(block for network in _networks(pipe) for block in repeated_blocks(network))
        self._recorders, self._ease = Recorders.of(tuning.recorded, device), Ease(device)
        self._loop = DenoisingLoop(
            pipe, self._steps, settings.cfg_truncation_step, shortcut, device, self._recorders, self._ease
        )
        self._tuned = tune(pipe, tuning, device)
        for encoder in text_encoders(pipe):
            keep_no_cache(encoder)
            encoder.forward = self._ease.paused(self._recorders.before(encoder.forward))
        if getattr(pipe, "vae", None) is not None:
            pipe.vae.decode = self._ease.paused(pipe.vae.decode)
        self._forget_few_texts = remember_few_texts(pipe)
        self._text: TextMemory | None = None
        if hasattr(pipe, "encode_prompt"):
            self._text = TextMemory(pipe.encode_prompt)
            self._text.attach(pipe)

    @classmethod
    def load(
        cls,
        settings: GenerateSettings,
        device: torch.device,
        folder: Path | None = None,
        parts: dict[str, Any] | None = None,
        tuning: Tuning | None = None,
    ) -> DiffusersPainter:
        """Read a pipeline's folder and bring it to a device; `parts` are used in place of those in the folder."""
        folder, dtype = folder or Path(settings.model_path), DTYPES[settings.dtype]
        for library in (diffusers_logging, transformers_logging):
            library.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        hear_of_cuts()  # and not the user: every long prompt of ten thousand would be announced
        try:
            pipe: Any = DiffusionPipeline.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **(parts or {})
            )
        except (OSError, ValueError, AttributeError, ImportError, RuntimeError, SafetensorError) as error:
            said = " ".join(str(error).split())[:300]
            raise UserError(
                f"The pipeline in {folder} cannot be loaded.", f"The reason: {said}", "Check that the folder is whole."
            ) from error
        pipe.set_progress_bar_config(disable=True)
        modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        for module in modules:
            module.eval().requires_grad_(False)
        if settings.scheduler is not None:
            pipe.scheduler = another_scheduler(pipe.scheduler, settings.scheduler)
        add_adapters(pipe, check_adapters(settings.lora))
        offloaded = device.type == "cuda" and _wants_offload(pipe, settings, device)
        tuning = tuning or Tuning.of(settings.compile, device)
        if not offloaded:  # first: weights are rounded and laid out anew where that is fast
            if device.type == "cuda":
                with compiled_code.readied(tuning.compiled):
                    carry(modules, device)
            pipe.to(device)
        painter = cls(pipe, settings, device, tuning)
        if offloaded:
            # Last: offloading wraps the parts' calls, and takes its wrapping off again, so it must be outermost.
            pipe.enable_model_cpu_offload(gpu_id=device.index or 0)
            painter._recorders.give_up()  # weights that come and go are not where they were recorded
            painter._ease.end()  # and are not to be page-locked on their way
        return painter

    def _check_kind(self) -> None:
        needed = [
            name
            for name, parameter in self._takes.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name != "prompt"
        ]
        if "prompt" not in self._takes or needed:
            why = f"It needs {', '.join(needed)}." if needed else "It takes no prompt."
            raise UserError(f"{self._name} does not make pictures from text alone.", why, "Give another --model_path.")
        if getattr(self._pipe, "scheduler", None) is None:
            raise UserError(
                f"{self._name} is several pipelines in one.",
                "generate knows those with one scheduler.",
                "Give another --model_path.",
            )

    def _guidance_arguments(self, scale: float) -> dict[str, Any]:
        """How this pipeline is told the scale; one whose network has the scale as an input needs no second pass."""
        if "true_cfg_scale" not in self._takes:
            return {"guidance_scale": scale}
        network = getattr(self._pipe, "transformer", None)
        if getattr(getattr(network, "config", None), "guidance_embeds", False):
            return {"guidance_scale": scale, "true_cfg_scale": 1.0}
        return {"true_cfg_scale": scale}

    def _frame_arguments(self, settings: GenerateSettings) -> dict[str, int]:
        frames = settings.num_frames
        if "num_frames" not in self._takes and frames > 1:
            raise UserError(
                f"{self._name} makes pictures, not clips of {frames} frames.", fix="Leave --num_frames out."
            )
        return {"num_frames": frames}

    def batches(self) -> bool:
        """Whether texts of any length are embeddings of one shape."""
        return self._batches

    @cached_property
    def _batches(self) -> bool:
        if self._text is None:
            return False
        short, long = (self._said_of(Order(text, text, 0)) for text in (_SHORT, _LONG))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was said is on its way to the host
        self._text.forget_others()
        self._forget_few_texts()  # these were encoded before it was known how
        return bool(short) and joinable(short, long)

    @property
    def _compiled(self) -> bool:
        """Where embeddings are as long as the text, every length would be a graph of its own."""
        return self._tuning.compiled and self.batches()

    def made_with(self) -> dict[str, str]:
        """How numbers are computed, where that shows in a picture's last bits."""
        told = {"compiled": "yes"} | self._tuned if self._compiled else self._tuned
        return told | ({"products": "fp8"} if self._in_8_bits else {})

    def prepare(self, orders: Sequence[Order]) -> None:
        """Encode the text of these, and forget the rest."""
        if self._text is None:
            return
        eager = not self._compiled
        self._loop.clock.enter()
        with self._running(eager):
            for order in self._text.still_wanted(orders):
                self._said_of(order)
                self._text.keep_for(order)
        self._text.forget_others()
        self._loop.clock.leave()

    @contextmanager
    def _running(self, eager: bool) -> Iterator[None]:
        """For calls of the pipeline; an `eager` one neither compiles nor records, and reads text to the same bit."""
        with tuned(self._tuning, self._device, eager), self._recorders.on(not eager), whole_masks(self._compiled):
            yield

    def cut_short(self, prompt: str) -> bool:
        """Whether the pipeline said so when it encoded the prompt."""
        return self._text is not None and prompt in self._text.cut

    def _said_of(self, order: Order) -> list[Any]:
        """The text encoders' answers for an order, by a call of the pipeline that ends before its first step."""
        assert self._text is not None
        self._text.begin()
        with self._loop.text_only():
            self._call([order], self._size, self._steps)
        return self._text.touched()

    def paint(
        self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL
    ) -> list[np.ndarray]:
        """Pictures, or clips."""
        return self.begin(orders, size, beat, way).wait()

    def begin(self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL) -> Pending:
        """Pictures, or clips; one at a time where `batches` says no."""
        if len(orders) > 1 and not self.batches():
            return Finished([picture for order in orders for picture in self.paint([order], size, beat, way)])
        text, exact = self._text, way is Way.EXACT
        # A trial would compile a graph for every batch size that is tried; so would an exact picture in fast mode.
        eager = not self._compiled or way is Way.TRIAL or (exact and self._fast)
        if text is not None:
            text.begin()
        self._loop.clock.enter()
        with (
            self._running(eager),
            exactly(self._in_8_bits if exact else ()),
            self._loop.watched(len(orders), beat, lambda: text.positive if text is not None else None, exact),
        ):
            output = self._call(orders, size, TRIAL_STEPS if way is Way.TRIAL else self._steps)
            pictures = self._pictures(output, size)
        if way is not Way.USUAL:
            self._loop.clock.forget()
        if text is not None:
            text.forget_others()
        return pictures

    def _call(self, orders: Sequence[Order], size: tuple[int, int], steps: int) -> Any:
        generators = [torch.Generator("cpu").manual_seed(order.seed) for order in orders]
        # Lists made anew: some pipelines write into them.
        arguments: dict[str, Any] = {
            "prompt": [order.prompt for order in orders],
            "height": size[0],
            "width": size[1],
            "num_inference_steps": steps,
            "generator": generators,
            "output_type": "pt",
            "use_resolution_binning": False,  # it would make another size than asked for
            "clean_caption": False,  # it would depend on what else is installed
            **self._guidance,
            **self._frames,
        }
        if self._guidance.get("true_cfg_scale") != 1.0:
            empty = _NO_NEGATIVE if "true_cfg_scale" in self._guidance else ""
            arguments["negative_prompt"] = [order.negative_prompt or empty for order in orders]
        try:
            with own_noise(generators), self._ease.on():
                return self._pipe(**{name: value for name, value in arguments.items() if name in self._takes})
        except ValueError as error:
            if "height" in str(error) and "width" in str(error):
                raise self._wrong_size(size, " ".join(str(error).split())) from None
            raise

    def _pictures(self, output: Any, size: tuple[int, int]) -> Pending:
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            raise UserError(
                "The model's safety checker took offence and made the picture black.",
                fix="Change the prompt, or take safety_checker out of model_index.json.",
            )
        values: Any = output.frames if hasattr(output, "frames") else output.images
        values = (values if isinstance(values, torch.Tensor) else torch.stack(list(values))).float()
        made = tuple(values.shape[-2:])
        if made != size:
            raise self._wrong_size(size, f"It makes {made[0]} x {made[1]} of that.")
        if values.ndim == 5 and values.shape[1] == 1:
            values = values[:, 0]
        pixels = (values * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
        whole = values.isfinite().all()
        self._loop.clock.leave()
        return Copying(pixels, whole, self._loop.clock.batch(), overflowed(self._precision))

    def _wrong_size(self, size: tuple[int, int], why: str) -> UserError:
        step = self._size_step
        sides = [max(step, round(side / step) * step) for side in size]
        # A size that one row of the table asks for is that row's mistake.
        kind = CannotPaint if size == self._size else UserError
        return kind(
            f"{self._name} cannot make pictures of {size[0]} x {size[1]} pixels.",
            why,
            f"Both sides must be multiples of {step}: {sides[0]} x {sides[1]} will do.",
        )

    @property
    def _size_step(self) -> int:
        """Pixels that one token of the network covers."""
        factor: Any = getattr(self._pipe, "vae_scale_factor", None)
        factor = factor or getattr(self._pipe, "vae_scale_factor_spatial", 8)
        network = _networks(self._pipe)[0]
        patch = network.config.get("patch_size", 1)
        packed = "guidance_embeds" in network.config or "all_patch_size" in network.config
        return int(factor) * (2 if packed else patch[-1] if isinstance(patch, (list, tuple)) else int(patch or 1))


def _networks(pipe: Any) -> list[Any]:
    return [network for name in DENOISERS if (network := getattr(pipe, name, None)) is not None]


def another_scheduler(scheduler: Any, wanted: str) -> Any:
    """A scheduler of another kind with the same noise; the name may leave out the word Scheduler."""
    fitting = {kind.__name__: kind for kind in scheduler.compatibles if "dummy" not in kind.__module__} | {
        type(scheduler).__name__: type(scheduler)
    }
    for name, kind in fitting.items():
        if scheduler_name(name) == scheduler_name(wanted):
            return kind.from_config(scheduler.config)
    short = sorted(name.removesuffix("Scheduler") for name in fitting)
    raise UserError(
        f"The scheduler {wanted} does not fit this model.", f"These do: {', '.join(short)}.", nearest(wanted, short)
    )


def _wants_offload(pipe: Any, settings: GenerateSettings, device: torch.device) -> bool:
    if settings.cpu_offload != "auto":
        return settings.cpu_offload
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    held = sum(weight.numel() * weight.element_size() for part in parts for weight in part.parameters())
    return held > _SHARE_OF_CARD * torch.cuda.get_device_properties(device).total_memory
