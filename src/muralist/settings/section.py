"""What the settings of all jobs have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ApartMark:
    """Marks a field that does not shape the result of a run."""


Apart = ApartMark()
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused, and the text under each field becomes its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )
