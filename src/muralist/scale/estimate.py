"""Time, cost and energy of a training, how it scales and what fits, from a measured speed: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from muralist.models import variants
from muralist.scale.cards import Card, card_of
from muralist.scale.communication import GPUS, PCIE, Links, Scaling, scale
from muralist.scale.measured import Measured
from muralist.scale.memory import Need, activation_bytes, state_bytes
from muralist.settings import EstimateSettings

SCENARIOS = ("conservative", "medium", "optimistic")
_GRADIENT = 2  # bytes of a gradient on its way: bf16
_USUAL_MEMORY = 80e9


@dataclass(frozen=True)
class Bill:
    """What a budget of tokens takes."""

    tokens: float
    seconds: float
    gpu_hours: float
    cost: float | None
    kilowatt_hours: float | None


@dataclass(frozen=True)
class Scenario:
    """One row of guide 1's table."""

    name: str
    tokens_per_second: float
    """Of all GPUs."""
    bills: list[Bill]


@dataclass(frozen=True)
class Estimate:
    """Everything that can be said of a training before it starts."""

    measured: Measured
    model: str
    img_size: int
    batch_size: int
    gpus: int
    card: Card | None
    scenarios: list[Scenario]
    links: Links
    gradients: float
    scaling: list[Scaling]
    """For 1 to 1024 GPUs, at the middle speed."""
    memory: float
    guessed_memory: bool
    """Whether neither the settings nor the card's data sheet tell it."""
    needs: dict[str, Need]
    """By strategy."""

    @property
    def step_seconds(self) -> float:
        """A step on one GPU, at the middle speed."""
        return self.scaling[0].compute


def flops_per_token(model: str, img_size: int) -> float:
    """Operations of training on one token."""
    letter, patch = variants.parse_name(model)
    return 3 * variants.forward_flops(letter, patch, img_size) / variants.tokens_per_image(patch, img_size)


def bill(tokens: float, speed: float, gpus: int, price: float | None, watts: float | None) -> Bill:
    """Time, cost and energy of a token budget at a speed of all GPUs together."""
    seconds = tokens / speed
    hours = gpus * seconds / 3600
    return Bill(tokens, seconds, hours, hours * price if price else None, hours * watts / 1000 if watts else None)


def estimate(settings: EstimateSettings, measured: Measured, budgets: list[float]) -> Estimate:
    """The whole of it; `budgets` are in tokens."""
    model, side = settings.model or measured.model, settings.img_size or measured.img_size
    batch = settings.batch_size or measured.batch_size
    letter, patch = variants.parse_name(model)
    variants.check_image_size(patch, side)
    card = card_of(measured.gpu)
    # Another model is taken to reach the same part of the matmul rate.
    factor = flops_per_token(measured.model, measured.img_size) / flops_per_token(model, side)
    parameters = variants.parameter_count(letter, patch, 1)
    gradients = float(_GRADIENT * parameters)
    inside = settings.link * 1e9 if settings.link else card.link if card else PCIE
    links = Links(inside, settings.network / 8 * 1e9, settings.gpus_per_node)
    tokens = batch * variants.tokens_per_image(patch, side)

    def at(speed: float, gpus: int) -> Scaling:
        """What so many GPUs make of one GPU's speed; the measurement may itself be of several."""
        compute = tokens / (speed * factor)
        return scale(compute * scale(compute, gradients, measured.gpus, links).efficiency, gradients, gpus, links)

    watts = settings.watts or (card.watts if card else None)
    scenarios = []
    for name, speed in zip(SCENARIOS, measured.per_gpu(), strict=True):
        row = at(speed, settings.gpus)
        together = row.speedup * tokens / row.compute
        bills = [bill(budget, together, settings.gpus, settings.price, watts) for budget in budgets]
        scenarios.append(Scenario(name, together, bills))
    same = (model, side) == (measured.model, measured.img_size)
    per_image = (same and measured.image_bytes) or activation_bytes(model, side, bf16=True, compiled=True)
    ddp, fsdp2 = (state_bytes(strategy, parameters, 0, settings.gpus) for strategy in ("ddp", "fsdp2"))  # type: ignore[arg-type]
    middle = measured.per_gpu()[1]
    return Estimate(
        measured=measured,
        model=model,
        img_size=side,
        batch_size=batch,
        gpus=settings.gpus,
        card=card,
        scenarios=scenarios,
        links=links,
        gradients=gradients,
        scaling=[at(middle, gpus) for gpus in GPUS],
        memory=settings.memory * 1e9 if settings.memory else card.memory if card else _USUAL_MEMORY,
        guessed_memory=not (settings.memory or card),
        needs={"ddp": Need(parameters, ddp, per_image), "fsdp2": Need(parameters, fsdp2, per_image)},
    )
