"""Folders as `muralist evaluate` leaves them, with small images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HOSTILE = 'A sign <script>document.title = "owned"</script> & "quotes" </figure>'


def content(folder: Path, count: int, shift: float = 0.0) -> dict[str, Any]:
    """What a report.json says; `shift` makes one run differ from another."""
    prompts = [f"A red car number {number}" if number % 2 else f"A blue house {number}" for number in range(count)]
    prompts[1] = HOSTILE
    return {
        "fid": 20.0 + shift,
        "scores": {
            "fid": {"value": 20.0 + shift, "low": 19.5 + shift, "high": 20.5 + shift, "note": "few images"},
            "precision": {"value": 0.5 + shift / 100, "low": 0.4, "high": 0.6, "note": ""},
            "clip_score": {"value": 30.0, "low": 29.0, "high": 31.0, "note": ""},
        },
        "missing": [{"metric": name, "reason": "no weights were given"} for name in ("cmmd", "recall")],
        "images": {"folder": str(folder / "images"), "count": count, "unreadable": ["half.png"]},
        "reference": {"path": "data/reference", "count": 5000},
        "settings": {"inception_weights": "inception.pth", "sizes": {"batch": 8}},
        "per_image": {
            "file": [f"{number:04d}_seed{number + 42}.png" for number in range(count)],
            "prompt": prompts,
            "clip_score": [25.0 + number / 10 + shift for number in range(count)],
        },
        "failures": [{"id": "lost", "seed": 7, "prompt": "<b>Nothing</b>", "error": "out of memory", "gpu": "1"}],
        "speed": {"0": {"images": 9, "images_per_second": 1.5}, "1": {"images": 8, "images_per_second": 1.25}},
        "warnings": ["FID of so few images says little."],
        "versions": {"torch": "2.13.0"},
        "seconds": 61.0,
    }


def write_evaluation(folder: Path, count: int = 12, shift: float = 0.0, **changes: Any) -> Path:
    """Write an evaluation and its images; `changes` replace parts of its report."""
    (folder / "images").mkdir(parents=True)
    report = content(folder, count, shift) | changes
    for number in range(count):
        image = np.full((24, 32, 3), (number * 20 % 256, 90, 200 - number * 10 % 200), np.uint8)
        Image.fromarray(image).save(folder / "images" / f"{number:04d}_seed{number + 42}.png")
    (folder / "report.json").write_text(json.dumps(report))
    return folder
