"""What an evaluation left in its `report.json`, read back: tolerant of what is missing, strict about what is damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from muralist.data.paths import exists
from muralist.errors import UserError

REPORT = "report.json"
_SEED = re.compile(r"_seed(\d+)$")  # generate calls a picture ID_seedN


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)


class Score(_Part):
    """One number and its interval."""

    value: Number = None
    low: Number = None
    high: Number = None
    note: str | None = None

    @property
    def has_interval(self) -> bool:
        """Whether both ends of the interval are known."""
        return self.low is not None and self.high is not None


class Missing(_Part):
    """A number that was not measured."""

    metric: str = ""
    reason: str = ""


class Images(_Part):
    """The pictures that were scored."""

    folder: str | None = None
    count: int | None = None
    unreadable: list[Any] = []
    sizes: dict[str, int] = {}  # how many of which height and width


class Reference(_Part):
    """What they were compared with."""

    path: str | None = None
    count: int | None = None
    sizes: dict[str, int] = {}


class PerImage(_Part):
    """What is known of every picture, as columns."""

    file: list[str] = []
    prompt: list[str | None] | None = None
    clip_score: list[Number] | None = None

    @model_validator(mode="after")
    def _equally_long(self) -> PerImage:
        for name in ("prompt", "clip_score"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.file):
                raise ValueError(f"{len(self.file)} files but {len(column)} of {name}")
        return self


class Failure(_Part):
    """A prompt without a picture."""

    id: str | None = None
    seed: str | None = None
    prompt: str | None = None
    error: str | None = None
    gpu: str | None = None


class Speed(_Part):
    """How fast one GPU was."""

    images: int | None = None
    images_per_second: Number = None
    gpu_busy: Number = None


class Results(_Part):
    """One evaluation."""

    fid: Number = None
    scores: dict[str, Score | None] = {}
    missing: list[Missing] = []
    images: Images = Images()
    reference: Reference | None = None
    settings: dict[str, Any] = {}
    per_image: PerImage = PerImage()
    failures: list[Failure] = []
    speed: dict[str, Speed] = {}
    warnings: list[str] = []
    versions: dict[str, Any] = {}
    seconds: Number = None


class Run:
    """One evaluation under the name it has beside others."""

    def __init__(self, name: str, folder: Path, results: Results) -> None:
        self.name, self.folder, self.results = name, folder, results
        self.files = results.per_image.file
        self.clip_scores: Sequence[float | None] = results.per_image.clip_score or [None] * len(self.files)
        self.prompts = [prompt or "" for prompt in results.per_image.prompt or [""] * len(self.files)]
        self.scores = {name: score for name, score in results.scores.items() if score and score.value is not None}
        if results.fid is not None and "fid" not in self.scores:
            self.scores["fid"] = Score(value=results.fid)

    def path(self, index: int) -> Path:
        """Where a picture is; its folder is as seen from where evaluate ran, or from the evaluation itself."""
        folder = Path(self.results.images.folder or ".")
        near = self.folder / folder / self.files[index]
        return near if exists(near) else folder / self.files[index]

    def key(self, index: int) -> tuple[str, str]:
        """What a picture shares with those of other runs that were asked for the same: its prompt and seed."""
        stem = Path(self.files[index]).stem
        seed = _SEED.search(stem)
        return self.prompts[index] or stem, seed[1] if seed else stem


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read some evaluations; each is called by as much of its path as tells it from the others."""
    results = [_read(folder) for folder in folders]
    names = _names([folder.absolute() for folder in folders])
    return [Run(*run) for run in zip(names, folders, results, strict=True)]


def _read(folder: Path) -> Results:
    path = folder / REPORT
    again = "Give folders that `muralist evaluate` wrote."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"There is no {REPORT} in {folder}.", fix=again) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", fix=again) from None
    except (ValueError, RecursionError) as error:
        reason = f"It is not JSON: {error}."
        raise UserError(f"{path} is damaged.", reason, "Run the evaluation again.") from error
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        reason = f"In it, {where} is not as it should be: {first['msg']}."
        raise UserError(f"{path} is damaged, or no report of an evaluation.", reason, again) from None


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [[part for part in folder.parts if part != folder.anchor] for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number} {'/'.join(part)}" for number, part in enumerate(parts, start=1)]
