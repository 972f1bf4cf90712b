"""What a sweep found: sweep.json, and the same as a table and sentences for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from muralist.errors import UserError
from muralist.runfolder import no_space, write_json
from muralist.sweep.combinations import Combination
from muralist.words import duration


@dataclass(frozen=True)
class Score:
    """The FID of one combination's pictures."""

    combination: Combination
    fid: float
    low: float
    high: float
    images: int
    gpu_seconds: float
    """Time that GPUs worked on the pictures, all together; loading and interruptions do not count."""

    @classmethod
    def of_report(cls, combination: Combination, report: dict[str, Any]) -> Score:
        """What an evaluation's report says."""
        fid = report["scores"]["fid"]
        speeds = report["speed"].values()
        seconds = sum(gpu["images"] / gpu["images_per_second"] for gpu in speeds if gpu["images_per_second"])
        return cls(combination, fid["value"], fid["low"], fid["high"], report["images"]["count"], round(seconds, 1))

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Score:
        """Back from `content`."""
        interval = content["guidance_interval"]
        combination = Combination(
            content["weights"], content["guidance_scale"], (interval[0], interval[1]) if interval else None
        )
        numbers = (content[name] for name in ("fid", "low", "high", "images", "gpu_seconds"))
        return cls(combination, *numbers)

    def content(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "name": self.combination.name,
            **self.combination._asdict(),
            "fid": self.fid,
            "low": self.low,
            "high": self.high,
            "images": self.images,
            "gpu_seconds": self.gpu_seconds,
        }


@dataclass
class Found:
    """Everything that sweep.json holds."""

    path: Path
    model_path: str
    settings: dict[str, Any]
    """What all numbers depend on beside the combination; those of other settings do not compare."""
    scores: dict[Combination, Score] = field(default_factory=dict)
    full: Score | None = None

    @classmethod
    def open(cls, path: Path, model_path: str, settings: dict[str, Any]) -> Found:
        """What an earlier command found; one with other settings is refused."""
        found = cls(path, model_path, settings)
        if not path.is_file():
            return found
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            scores = [Score.parse(content) for content in before["combinations"]]
            full = Score.parse(before["full"]) if before["full"] else None
            earlier = dict(before["settings"])
        except (ValueError, KeyError, TypeError, IndexError):
            raise UserError(
                f"{path} is damaged.", fix="Delete it: pictures and features stay, and the same command measures again."
            ) from None
        if scores and earlier != settings:
            names = [name for name in earlier | settings if settings.get(name) != earlier.get(name)]
            told = "; ".join(f"{name} {earlier.get(name)!s:.16} -> {settings.get(name)!s:.16}" for name in names)
            raise UserError(
                f"{path.parent} holds a sweep with other settings.",
                f"Changed: {told}. Its model was {before.get('model_path')}.",
                "Run the command as it was, or choose another --output_dir.",
            )
        if scores:
            found.scores, found.full = {score.combination: score for score in scores}, full
        return found

    def ranked(self) -> list[Score]:
        """Best first."""
        return sorted(self.scores.values(), key=lambda score: (score.fid, score.combination.order))

    def write(self, finished: bool = False) -> None:
        """Write sweep.json, whole or not at all; only a finished sweep has a winner."""
        ranked = self.ranked()
        winner = None
        if finished:
            alike = [score.combination.name for score in within_noise(ranked)]
            winner = ranked[0].content() | {"flags": ranked[0].combination.flags, "within_noise": alike}
        content = {
            "model_path": self.model_path,
            "settings": self.settings,
            "winner": winner,
            "full": self.full.content() if self.full else None,
            "combinations": [score.content() for score in sorted(ranked, key=lambda score: score.combination.order)],
        }
        try:
            write_json(self.path, content)
        except OSError as error:
            raise no_space(error, self.path) from None


def within_noise(ranked: Sequence[Score]) -> list[Score]:
    """Those that cannot be told from the best: their intervals overlap with its own."""
    best = ranked[0]
    return [score for score in ranked[1:] if score.low <= best.high and best.low <= score.high]


def table(ranked: Sequence[Score], full: Score | None = None, most: int | None = None) -> Table:
    """The best ones, or all; `full` is the best one's result with many pictures."""
    made = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("weights", "guidance", "interval"):
        made.add_column(title)
    for title in ("FID", "95%", "pictures", "GPU time"):
        made.add_column(title, justify="right")
    made.add_column("")
    alike = within_noise(ranked)
    for place, score in enumerate(ranked[:most]):
        made.add_row(*_cells(score), "best" if place == 0 else "within noise" if score in alike else "")
    if full:
        made.add_row(*_cells(full), "full count")
    return made


def _cells(score: Score) -> list[str]:
    _, scale, interval = score.combination
    return [
        score.combination.weights or "-",
        "-" if scale is None else f"{scale:g}",
        f"{interval[0]:g} to {interval[1]:g}" if interval else "-",
        f"{score.fid:.2f}",
        f"{score.low:.2f} to {score.high:.2f}",
        f"{score.images:,}",
        duration(score.gpu_seconds),
    ]


def verdict(ranked: Sequence[Score]) -> list[str]:
    """What to make of the table, in sentences."""
    best, alike = ranked[0], within_noise(ranked)
    said = [f"Best of {len(ranked)}: {best.combination.name}, FID {best.fid:.2f} with {best.images:,} pictures."]
    if alike:
        others = f"{len(alike)} other{'s' if len(alike) > 1 else ''}"
        said.append(
            f"That is within noise of {others}: their 95% intervals overlap. More --num_samples tell them apart."
        )
    scales = {score.combination.guidance_scale or 1.0 for score in ranked}
    scale = best.combination.guidance_scale or 1.0
    if len(scales) > 1 and scale in (min(scales), max(scales)) and scale != 1:
        which, where = ("highest", "higher") if scale == max(scales) else ("lowest", "lower")
        said.append(f"Its guidance is the {which} that was tried: try {where} ones too, in the same folder.")
    return said
