"""What is written about a run: each step once, and on a full disk one sentence instead of a traceback at every line."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from muralist.errors import UserError
from muralist.train.monitors import MetricsFile, start_log
from tests.support.disks import PAGE, leave_free, small_disk
from tests.support.runs import train


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 0.5}) for step in range(1, 8)]
    path.write_text("\n".join([*lines, "[1]", '{"images": 3}', '{"step": 8, "train/lo']))
    metrics = MetricsFile(path, 5)
    metrics.scalars(6, {"train/loss": 0.25})
    metrics.flush()
    metrics.close()
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in read] == [1, 2, 3, 4, 5, 6]
    assert [line["train/loss"] for line in read[-2:]] == [0.5, 0.25]


def test_a_full_disk_keeps_what_was_flushed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        metrics = MetricsFile(disk / "metrics.jsonl", 0)
        metrics.scalars(1, {"train/loss": 0.5})
        metrics.flush()
        leave_free(disk, 0)
        with pytest.raises(UserError, match=r"No space left on the disk that holds .*metrics\.jsonl"):
            for step in range(2, 200):
                metrics.scalars(step, {"train/loss": 0.5})
        metrics.close()
        assert json.loads((disk / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_lines_can_be_watched_as_they_come(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics.scalars(1, {"train/loss": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 0.5}\n'
    metrics.close()


@pytest.mark.parametrize("pages", [0, 4, 8])
def test_a_run_on_a_full_disk_ends_with_one_sentence(
    photo_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], pages: int
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        leave_free(disk, pages * PAGE)
        train("--data_path", photo_folder, "--max_steps", "12", "--results_dir", disk / "results", expect=1)
        said = capfd.readouterr()
    assert "No space left" in said.err or "A checkpoint needs" in said.err
    assert str(disk) in said.err
    for text in (said.out, said.err):
        assert "Traceback" not in text
        assert "Logging error" not in text


def test_a_reader_who_leaves_costs_no_line_of_the_log_and_brings_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # `muralist train ... | head -1`
    with monkeypatch.context() as patched, io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as unread:
        patched.setattr(sys, "stdout", unread)
        start_log(tmp_path / "train.log", 0)
        for line in ("step 1", "step 2"):
            logging.getLogger("muralist").info(line)
    start_log(None, 0)
    assert [line[-6:] for line in (tmp_path / "train.log").read_text().splitlines()] == ["step 1", "step 2"]
    assert capfd.readouterr().err == ""
