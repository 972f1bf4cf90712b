"""What is written about a run: each step once, and on a full disk one sentence instead of a traceback at every line."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest

from muralist.core.errors import UserError
from muralist.train.loggers import JsonlLogger, start_log
from tests.support.disks import PAGE, leave_free, small_disk
from tests.support.runs import train


def test_metrics_are_truncated_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 0.5}) for step in range(1, 8)]
    path.write_text("\n".join([*lines, "[1]", '{"images": 3}', '{"step": 8, "train/lo']))
    metrics = JsonlLogger(path, 5)
    metrics.scalars(6, {"train/loss": 0.25})
    assert path.read_text().endswith('\n{"step": 6, "train/loss": 0.25}\n'), "written at once"
    metrics.flush()
    metrics.close()
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in read] == [1, 2, 3, 4, 5, 6]
    assert [line["train/loss"] for line in read[-2:]] == [0.5, 0.25]


def test_full_disk_keeps_flushed_metrics(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        metrics = JsonlLogger(disk / "metrics.jsonl", 0)
        metrics.scalars(1, {"train/loss": 0.5})
        metrics.flush()
        leave_free(disk, 0)
        with pytest.raises(UserError, match=r"No space left on the disk that holds .*metrics\.jsonl"):
            for step in range(2, 200):
                metrics.scalars(step, {"train/loss": 0.5})
        metrics.close()
        assert json.loads((disk / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


@pytest.mark.parametrize("pages", [0, 4, 8])
def test_run_on_a_full_disk_ends_with_one_error(
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


def test_closed_stdout_loses_no_log_line_and_prints_no_traceback(
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
