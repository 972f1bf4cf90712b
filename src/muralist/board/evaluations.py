"""Evaluations as the board lists them: their scores, and where their page is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from muralist.board.root import Root, read_plain

_LARGEST = 256 << 20
_PAGES = ("report/index.html", "index.html")


class Evaluations:
    """Says of each evaluation what it found; a report that has not changed is not read again."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._known: dict[Path, tuple[int, dict[str, Any] | None]] = {}

    def summary(self, folder: Path) -> dict[str, Any] | None:
        """Scores and the address of the page; None where the file is no report of an evaluation."""
        path = folder / "report.json"
        try:
            status = path.stat()
        except OSError:
            return None
        if folder not in self._known or self._known[folder][0] != status.st_mtime_ns:
            found = _read(path) if status.st_size < _LARGEST else None
            self._known[folder] = status.st_mtime_ns, found
        found = self._known[folder][1]
        if found is None:
            return None
        page = next((folder / name for name in _PAGES if (folder / name).is_file()), None)
        address = self.root.relative(page) if page else None
        return found | {"state": "finished", "changed": round(status.st_mtime), "page": address}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        report = from_json(read_plain(path, _LARGEST))
        scores = {name: _score(score) for name, score in report["scores"].items() if score}
        images, reference = report.get("images") or {}, report.get("reference") or {}
        return {
            "scores": {name: score for name, score in scores.items() if score["value"] is not None},
            "images": images.get("count"),
            "folder": images.get("folder"),
            "reference": reference.get("path"),
            "failures": len(report.get("failures") or []),
            "warnings": [str(warning) for warning in report.get("warnings") or []][:20],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _score(score: dict[str, Any]) -> dict[str, float | None]:
    return {name: _finite(score.get(name)) for name in ("value", "low", "high")}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
