"""The base of all settings classes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonIdentity = "does not affect the result of a run"
"""Marks a field, as an annotation."""
Repeatable = "collects the values of all its flags"
"""Marks a list, as an annotation; of other flags that are given twice, the last one counts."""
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused; the docstring of each field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )
