"""Pictures from JiT: a run, a checkpoint, an export, or a file of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from muralist.diffusion.solvers import time_grid
from muralist.errors import UserError
from muralist.generate.card import CardClock, Copying
from muralist.generate.painter import TRIAL_STEPS, Beat, Order, Pending, Way, overflowed
from muralist.generate.recorded import Recorders
from muralist.generate.tuned import Tuning, choose_by_rules, tuned
from muralist.models.jit import JiT
from muralist.models.jit_family import JiTFamily, Objective
from muralist.models.weights import (
    CONFIG_FILE,
    Which,
    infer_jit_config,
    jit_arguments,
    read_config,
    read_description,
    read_jit_folder,
    read_weights,
)
from muralist.pictures import to_pixels
from muralist.settings import GenerateSettings, ObjectiveSettings, SampleSettings

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def read_family(path: Path, description: Mapping[str, Any], which: Which) -> JiTFamily:
    """The model's size, classes and objective; of weights made elsewhere, the official ones and class numbers."""
    if description:
        return _family(description["model"], description["img_size"], description, 0)
    config = read_config(path) if (path / CONFIG_FILE).is_file() else infer_jit_config(read_weights(path, which))
    return _family("JiT", config["input_size"], config, config["num_classes"])


def _family(name: str, img_size: int, facts: Mapping[str, Any], classes: int) -> JiTFamily:
    numbers = [str(number) for number in range(classes)] if classes > 1 else []
    given = facts.get("objective")
    names = facts.get("label_names", numbers)
    try:
        objective = TypeAdapter(Objective).validate_python(given) if given else None
        names = TypeAdapter(list[str]).validate_python(names)
    except ValidationError as error:
        first = error.errors()[0]
        said = f"{'.'.join(map(str, first['loc'])) or 'label_names'}: {first['msg']}"
        raise UserError("What the model's files say of its classes and its objective is damaged.", f"{said}.") from None
    return JiTFamily(name, img_size, names, objective or Objective.from_settings(ObjectiveSettings(), img_size))


class JiTPainter:
    """A JiT network on one device; prompts are names or numbers of classes."""

    def __init__(self, family: JiTFamily, network: nn.Module, settings: GenerateSettings) -> None:
        self._family, self._network = family, network
        self._precision, self._autocast = settings.dtype, _AUTOCAST[settings.dtype]
        if self._autocast is not None:
            _convert_products(network, self._autocast)
        device = next(network.parameters()).device
        self._clock = CardClock(device)
        self._tuning = Tuning.of(settings.compile, device)
        if self._tuning.compiled:
            choose_by_rules()
            network.compile(dynamic=False)
        self._recorders = Recorders.of(self._tuning.compiled and self._tuning.recorded, device)
        self._passes = self._recorders.before(network.__call__)
        self._sampling = _sampling(settings)
        # A second of a core for a hundred pictures of 256 px, in which the card would have nothing to do.
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="noise")
        self._noise: dict[int, Future[Tensor]] = {}  # by seed

    @classmethod
    def load(cls, settings: GenerateSettings, device: torch.device) -> JiTPainter:
        """Read the weights."""
        path = Path(settings.model_path)
        family = read_family(path, read_description(path), settings.weights)
        if (path / CONFIG_FILE).is_file():
            config, weights = read_jit_folder(path)
        else:
            weights = read_weights(path, settings.weights)
            config = infer_jit_config(weights)
        with torch.device("meta"):
            network = JiT(**jit_arguments(config))
        # Copied: a file's tensors may begin anywhere, and on a CPU the last bits of a product depend on where.
        network.to_empty(device=device).load_state_dict(weights)
        return cls(family, network.eval().requires_grad_(False), settings)

    def batches(self) -> bool:
        """Always: a picture depends on its slot alone."""
        return True

    def prepare(self, orders: Sequence[Order]) -> None:
        """There is no text to encode, but noise to be drawn, while the device is at work on others."""
        seeds = {order.seed for order in orders}
        for seed in self._noise.keys() - seeds:
            self._noise.pop(seed).cancel()
        for seed in seeds - self._noise.keys():
            self._noise[seed] = self._drawer.submit(self._family.sample_noise, [seed])

    def cut_short(self, prompt: str) -> bool:
        """A name of a class is read whole."""
        return False

    def paint(
        self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL
    ) -> list[np.ndarray]:
        """Pictures of the one size that the model has."""
        return self.begin(orders, size, beat, way).wait()

    def begin(self, orders: Sequence[Order], size: tuple[int, int], beat: Beat, way: Way = Way.USUAL) -> Pending:
        """The same, handed to the device."""
        side = self._family.img_size
        if size != (side, side):
            raise UserError(  # a row's own mistake: the size of the command was looked at before
                f"This JiT model makes pictures of {side} x {side} pixels, not {size[0]} x {size[1]}.",
                fix="Leave height and width out, also in the table.",
            )
        sampling = self._sampling if way is not Way.TRIAL else self._sampling.model_copy(update={"steps": TRIAL_STEPS})
        device = next(self._network.parameters()).device
        prompts = [order.prompt for order in orders]
        eager = way is Way.TRIAL  # or a graph would be compiled for every batch size that is tried
        noise = self._noise_of([order.seed for order in orders])
        self._clock.enter()
        with (
            tuned(self._tuning, device, eager),
            self._recorders.on(not eager),
            torch.autocast(device.type, self._autocast, enabled=self._autocast is not None),
        ):
            network = _Beating(self._network, self._passes, beat)
            images = self._family.sample_from(network, noise, prompts, sampling, self._tuning.compiled)
        pixels, whole = to_pixels(images).contiguous(), images.isfinite().all()
        self._clock.leave()
        copying = Copying(pixels, whole, self._clock.batch(), overflowed(self._precision))
        if way is not Way.USUAL:
            self._clock.forget()
        return copying

    def _noise_of(self, seeds: Sequence[int]) -> Tensor:
        if not all(seed in self._noise for seed in seeds):  # asked for without `prepare`
            return self._family.sample_noise(seeds)
        try:
            return torch.cat([self._noise[seed].result() for seed in seeds])
        except Exception:
            self._noise.clear()  # or the next try would find the same error
            raise

    def made_with(self) -> dict[str, str]:
        """Compiled pictures differ from others in their last bits."""
        return {"compiled": "yes"} if self._tuning.compiled else {}


class _Beating(nn.Module):
    """A network that gives a sign of life at every call, outside what is compiled."""

    def __init__(self, network: nn.Module, passes: Callable[..., Tensor], beat: Beat) -> None:
        super().__init__()
        self.network, self.passes, self.beat = network, passes, beat

    def forward(self, *inputs: Tensor) -> Tensor:
        self.beat()
        return self.passes(*inputs)


def _convert_products(network: nn.Module, dtype: torch.dtype) -> None:
    """Weights of matrix products in the type that autocast would convert them to at every call: the same pictures."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(dtype)


def _sampling(settings: GenerateSettings) -> SampleSettings:
    """Guidance is on in its interval, until the cut."""
    low, high = settings.guidance_interval
    sampling = SampleSettings(
        steps=settings.num_inference_steps,
        guidance=settings.guidance_scale,
        interval=(low, high),
        official_last_step=settings.official_last_step,
    )
    if settings.cfg_truncation_step is None:
        return sampling
    # A time out of the sampler's own grid: k / n may be rounded to the next number above it.
    end = min(high, time_grid(sampling.steps)[min(settings.cfg_truncation_step, sampling.steps)])
    changes = {"interval": (low, end)} if end > low else {"guidance": 1.0}
    return sampling.model_copy(update=changes)
