"""Test the FID curve: selection of checkpoints, the figure, and that page and figure match the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripts import draw_fid_curve
from scripts.halve_inception import halve

from bench import cifar_fid
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


def checkpoint(images: int, fid: float) -> dict[str, Any]:
    return {
        "step": images // 256,
        "images": images,
        "seconds of steps": images / 3800,
        "val/loss": 0.1487,
        "fid": fid,
        "fid, 95%": [fid - 3, fid + 3],
        "kid": fid / 1000,
        "generated images": 5000,
        "reference images": 4000,
    }


MEASURED = {
    "model": "JiT-S/2 at 32 px",
    "total batch": 256,
    "inception in 16 bits": True,
    "solver steps": 10,
    "guidance": 1.5,
    "hardware": {"gpu": "NVIDIA H200"},
    "versions": {"torch": "2.11.0+cu130"},
    "seconds of all": 345.0,
    "checkpoints": [checkpoint(25_600, 310.0), checkpoint(102_400, 140.0), checkpoint(409_600, 62.0)],
}


def test_checkpoints_are_spaced_geometrically() -> None:
    assert cifar_fid.spread(list(range(100, 3300, 100)), 6) == [100, 200, 400, 800, 1600, 3200]
    assert cifar_fid.spread([100, 200, 300], 6) == [100, 200, 300]
    assert cifar_fid.spread([100], 6) == [100]
    assert cifar_fid.spread([100, 200, 300], 1) == [300]


def test_training_progress_at_a_checkpoint() -> None:
    lines = [
        {"step": step, "images": 256 * step, "time": 1000 + 0.1 * step, "train/samples_per_second": 2560.0}
        for step in range(1, 251)
    ]
    lines[99]["val/loss"], lines[199]["val/loss"], lines[249]["val/loss"] = 0.3, 0.2, 0.1
    assert cifar_fid.measured_steps(lines, 100) == [100, 200]  # the last step is not a regular checkpoint
    assert cifar_fid.along(lines, 200, began=950.0) == {
        "step": 200,
        "images": 51_200,
        "seconds since the command": 70.0,
        "seconds of steps": 20.0,
        "val/loss": 0.2,
    }


def test_figure_is_to_scale() -> None:
    drawn = draw_fid_curve.draw(MEASURED)
    circles = [line.split('"') for line in drawn.splitlines() if line.startswith("<circle")]
    x, y = [float(parts[1]) for parts in circles], [float(parts[3]) for parts in circles]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # each has seen four times as many images
    assert y[0] < y[1] < y[2]
    floor = draw_fid_curve.HEIGHT - draw_fid_curve.BOTTOM
    assert (floor - y[0]) / (floor - y[2]) == pytest.approx(310 / 62, abs=0.02)  # FID is drawn from 0
    assert all(f">{text}</text>" in drawn for text in ("310", "62", "25,600", "409,600", "0", "300"))
    assert "5,000 images per point, bars are 95% intervals; NVIDIA H200, torch 2.11.0+cu130" in drawn


def with_section(page: str) -> str:
    text = draw_fid_curve.section(MEASURED)
    return draw_fid_curve.replace_section(page, draw_fid_curve.HEADING, draw_fid_curve.NEXT, text)


def test_section_is_inserted_once() -> None:
    page = "# Page\n\n## Before\n\ntext\n\n## Limits of the metrics\n\n- many\n"
    once = with_section(page)
    assert with_section(once) == once
    before, after = once.split(draw_fid_curve.section(MEASURED))
    assert before + after == page and after.startswith("## Limits of the metrics\n")
    assert "*FID falls from 310.0 to 62.0: JiT-S/2 at 32 px on 4,000 images of CIFAR-10, batch 256," in once
    assert draw_fid_curve.HALVED in once
    assert draw_fid_curve.HALVED not in draw_fid_curve.section(MEASURED | {"inception in 16 bits": False})
    assert "| 102,400 | 27 s | 0.1487 | 140.0 (137.0 to 143.0) | 0.1400 |" in once


def test_page_and_figure_match_the_record() -> None:
    measured = json.loads(draw_fid_curve.RECORD.read_text())
    assert (DOCS / draw_fid_curve.FIGURE).read_text() == draw_fid_curve.draw(measured), "draw_fid_curve.py docs"
    assert draw_fid_curve.section(measured) in (DOCS / draw_fid_curve.PAGE).read_text()
    fids = [row["fid"] for row in measured["checkpoints"]]
    assert fids == sorted(fids, reverse=True) and fids[-1] < fids[0] / 2


def test_halved_weights(tmp_path: Path) -> None:
    third = torch.tensor([[1 / 3]])
    torch.save(
        {"a.conv.weight": third, "a.bn.bias": third[0], "a.bn.num_batches_tracked": torch.tensor(3)}, tmp_path / "w.pth"
    )
    halve(tmp_path / "w.pth", tmp_path / "carried" / "half.safetensors")
    found = load_file(tmp_path / "carried" / "half.safetensors")
    assert found.pop("a.bn.num_batches_tracked") == 3 and found.keys() == {"a.conv.weight", "a.bn.bias"}
    assert torch.equal(found["a.conv.weight"], third.half()) and torch.equal(found["a.bn.bias"], third[0])
