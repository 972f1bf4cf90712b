"""What GPUs are sold with: memory, power limit, and the speed of the link to their neighbours, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    memory: float
    """Bytes."""
    watts: float
    link: float
    """Bytes per second that a GPU sends to others of its machine: half of what is advertised for both directions."""


CARDS = [
    Card("B200", 180e9, 1000.0, 900e9),
    Card("H200", 141e9, 700.0, 450e9),
    Card("H100", 80e9, 700.0, 450e9),
    Card("A100", 80e9, 400.0, 300e9),
    Card("V100", 32e9, 300.0, 150e9),
    Card("L40S", 48e9, 350.0, 25e9),
    Card("RTX 4090", 24e9, 450.0, 25e9),
]


def card_of(gpu: str) -> Card | None:
    """The card a GPU's full name speaks of."""
    return next((card for card in CARDS if card.name in gpu), None)
