"""Pictures of fast mode are told as such, with their distance to exact mode on the rows that were painted both ways."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from muralist.evaluate.fast_mode import FastMode
from tests.support.evaluating import evaluate, report, scenes, small_clip, write_pictures


def painted_both_ways(folder: Path) -> Path:
    pictures = scenes(4, 0)
    write_pictures(folder, pictures)
    write_pictures(folder / ".exact", np.clip(pictures[:3].astype(int) + 20, 0, 255).astype(np.uint8))
    lines = [
        {"status": "done", "index": row, "copy": 0, "id": f"{row}", "seed": row, "prompt": f"prompt {row}", "gpu": "0",
         "file": f"{row:06d}.png", "key": "", "bytes": 1, "changed": 1, "sha256": "", "seconds": 0.5, "gpu_busy": 0.5}
        | ({"psnr_to_exact": 30.0 + row} if row < 3 else {})
        for row in range(4)
    ]  # fmt: skip
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_report_tells_the_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))
    monkeypatch.delenv("MURALIST_INCEPTION", raising=False)
    images = painted_both_ways(tmp_path / "images")
    clip = small_clip(tmp_path / "clip")
    evaluate("--images", images, "--clip_path", clip, "--output_dir", tmp_path / "out")
    found = report(tmp_path / "out")
    assert found["images"]["count"] == 4  # those of exact mode are no pictures of the table
    distance = found["distance_to_exact_mode"]
    assert distance["pictures"] == 3 and distance["psnr_db"] == {"mean": 31.0, "worst": 30.0}
    scores = found["per_image"]["clip_score"]
    assert distance["clip_score"]["fast"] == pytest.approx(np.mean(scores[:3]), abs=1e-3)
    assert distance["clip_score"]["exact"] != distance["clip_score"]["fast"]
    told = [warning for warning in found["warnings"] if "--preset fast: 31.0 dB (worst 30.0 dB)" in warning]
    assert len(told) == 1 and "CLIP score" in told[0]
    assert "--preset fast: 31.0 dB" in (tmp_path / "out" / "report" / "index.html").read_text()
    assert found["speed"]["0"]["gpu_busy"] == 0.5


def test_other_pictures_have_none(tmp_path: Path) -> None:
    assert not FastMode(write_pictures(tmp_path, scenes(2, 0)))
    assert FastMode(tmp_path).report == {}


def test_features_are_compared_with_the_distance_of_two_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = FastMode(painted_both_ways(tmp_path))
    exact = np.array([[0.0, 0.0], [4.0, 0.0], [8.0, 0.0]])
    monkeypatch.setattr(mode, "_rows", lambda *_: (exact + np.array([0.0, 1.0]), exact))
    mode.compare(object(), None, {}, tmp_path)  # type: ignore[arg-type]
    assert mode.report["inception_distance"] == 1.0
    assert mode.report["inception_distance_of_two_pictures"] == pytest.approx(16 / 3, abs=1e-4)
    assert "in Inception's features 19% of the way between two pictures." in mode.sentence()
