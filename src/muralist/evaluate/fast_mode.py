"""How far pictures of `generate --preset fast` are from those of exact mode: on the rows that it painted both ways."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from muralist.data import ledger_lines
from muralist.evaluate import metrics
from muralist.evaluate.extractors import Extractor
from muralist.evaluate.features import compute_aloud, hash_files, hash_texts

_EXACT = ".exact"  # the folder beside the pictures, which generate writes
_PSNR = "psnr_to_exact"


class FastMode:
    """The pictures of a folder that exist both ways, and what is known of their distance."""

    def __init__(self, folder: Path) -> None:
        known = {line["file"]: line for line in ledger_lines.read_lines(folder / "ledger.jsonl")}
        pairs = [(folder / name, folder / _EXACT / name) for name in known if Path(name).name == name]
        self._fast = [fast for fast, exact in pairs if fast.is_file() and exact.is_file()]
        self._exact = [folder / _EXACT / fast.name for fast in self._fast]
        self._prompts = [known[fast.name]["prompt"] for fast in self._fast]
        told = [known[fast.name].get(_PSNR) for fast in self._fast]
        self.report: dict[str, Any] = {}
        distances = [float(value) for value in told if isinstance(value, int | float) and math.isfinite(value)]
        if distances:
            self.report = {
                "pictures": len(self._fast),
                "psnr_db": {"mean": round(float(np.mean(distances)), 2), "worst": min(distances)},
            }

    def __bool__(self) -> bool:
        return bool(self.report)

    def compare(
        self,
        inception: Extractor | None,
        clip: tuple[Extractor, Extractor] | None,
        devices: dict[str, str],
        cache: Path,
    ) -> None:
        """Add the distance in Inception's features and both CLIP scores, where there are weights."""
        if inception is not None and (rows := self._rows(inception, devices, cache)):
            fast, exact = rows
            apart = np.linalg.norm(fast - exact, axis=1).mean()
            others = np.linalg.norm(exact[:, None] - exact[None], axis=2).sum() / max(1, len(exact) * (len(exact) - 1))
            self.report["inception_distance"] = round(float(apart), 4)
            self.report["inception_distance_of_two_pictures"] = round(float(others), 4)
        if clip is not None and (rows := self._rows(clip[0], devices, cache)):
            words = compute_aloud(clip[1], hash_texts(self._prompts), devices, cache, "prompts").rows
            means = (float(metrics.clip_scores(part, words).mean()) for part in rows)
            self.report["clip_score"] = dict(zip(("fast", "exact"), (round(mean, 3) for mean in means), strict=True))

    def _rows(self, extractor: Extractor, devices: dict[str, str], cache: Path) -> tuple[np.ndarray, np.ndarray] | None:
        """Features of both; None where one cannot be read."""
        found = compute_aloud(
            extractor, hash_files([*self._fast, *self._exact]), devices, cache, "pictures painted both ways"
        )
        rows, half = found.rows.astype(np.float64), len(self._fast)
        return None if found.unreadable else (rows[:half], rows[half:])

    def sentence(self) -> str:
        """For the page and the terminal."""
        return "".join(self._words())

    def _words(self) -> Iterator[str]:
        near = self.report["psnr_db"]
        yield f"These pictures were made by --preset fast: {near['mean']:.1f} dB (worst {near['worst']:.1f} dB) from exact "
        yield f"mode on the {self.report['pictures']} that were painted both ways"
        if others := self.report.get("inception_distance_of_two_pictures"):
            part = 100 * self.report["inception_distance"] / others
            yield f", in Inception's features {part:.0f}% of the way between two pictures"
        if scores := self.report.get("clip_score"):
            yield f", CLIP score {scores['fast']:.2f} against {scores['exact']:.2f}"
        yield "."
