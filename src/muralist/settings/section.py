"""The base of all settings classes."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from muralist.core.errors import UserError

# A scheme has two letters or more: C:/ is a Windows drive. pathlib turns s3://bucket into s3:/bucket.
_URL = re.compile(r"[a-z][a-z0-9+.-]+://|(s3|gs|gcs|az|abfs|hf|https?|file|memory):/", re.IGNORECASE)
_HUB = "huggingface.co/"

NonIdentity = "does not affect the result of a run"
"""Marks a field, as an annotation."""
Repeatable = "collects the values of all its flags"
"""Marks a list, as an annotation; of other flags that are given twice, the last one counts."""


def refuse_url(value: Any) -> Any:
    """Return a path, or a list of paths, unchanged; refuse a URL, which pathlib would take for a local folder."""
    for path in value if isinstance(value, list) else [value]:
        if not isinstance(path, str) or not (scheme := _URL.match(path)):
            continue
        rest = path[scheme.end() :].lstrip("/")
        fix = "Mount the storage and give the folder's path, or use a local folder and copy it before or afterwards."
        if scheme[0].lower().startswith("file:"):
            fix = f"Give the path without its scheme: /{rest}"
        elif scheme[0].lower().startswith("hf:") or rest.startswith(_HUB):
            name = rest.removeprefix(_HUB)
            fix = f"A model is named by its id, {name}; `hf download {name} --local-dir FOLDER` copies anything else here."
        raise UserError(f"{path} is a URL, and muralist reads and writes local or mounted folders only.", fix=fix)
    return value


LocalPath = AfterValidator(refuse_url)
"""Marks a field that holds a path or several, as an annotation: URLs are refused."""
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of settings: unknown keys are refused; the docstring of each field is its help."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )
