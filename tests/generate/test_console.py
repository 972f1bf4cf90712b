"""The progress display: bars on terminals of any width, lines elsewhere, a record for the board."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from muralist.generate import console
from muralist.generate.console import (
    ProgressBars,
    ProgressLines,
    WorkerProgress,
    open_display,
)
from muralist.generate.output_dir import OutputDir

WORKERS = {"0": WorkerProgress(248, 2, 250), "1": WorkerProgress(125, 0, 250)}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is moved."""
    time = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: time[0])
    return time


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)


def rendered(bars: ProgressBars, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(bars)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def bars(width: int, now: list[float]) -> ProgressBars:
    """Bars half an hour after the start, of which five minutes were spent loading."""
    display = ProgressBars(terminal(width))
    now[0] += 300
    display.update({"0": WorkerProgress(0, 0, 250), "1": WorkerProgress(0, 0, 250)}, 0)
    display.update({"0": WorkerProgress(50, 0, 250), "1": WorkerProgress(25, 0, 250)}, 0)
    now[0] += 1500
    display.update(WORKERS, 0)
    return display


def test_format_of_the_bars(now: list[float]) -> None:
    display = bars(120, now)
    lines = rendered(display, 120)
    now[0] += 60  # while workers exit
    display.close()
    assert rendered(display, 120) == lines
    assert len(lines) == 3
    assert re.fullmatch(r"GPU 0: 100%\|#+\| 250/250 \[30:00<00:00, success: 248, failed: 2\]", lines[0])
    # 100 images in 25 minutes, 125 to go
    assert re.fullmatch(r"GPU 1:  50%\|#+ +\| 125/250 \[30:00<31:15, success: 125, failed: 0\]", lines[1])
    assert re.fullmatch(
        r"total:  75%\|#+ +\| 375/500 \[30:00<10:25, success: 373, failed: 2, 0\.20 images/s\]", lines[2]
    )


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int, now: list[float]) -> None:
    display = bars(width, now)
    lines = rendered(display, width)
    display.close()
    assert len(lines) == 3 and max(map(len, lines)) <= width
    assert lines[1].startswith("GPU 1:  50%|")
    if width >= 80:
        assert "###" in lines[1] and "failed: 0]" in lines[1] and "31:15" in lines[1]


def test_eight_gpus_unassigned_samples_and_a_worker_that_loads(now: list[float]) -> None:
    display = ProgressBars(terminal(100))
    now[0] += 42
    workers = {str(gpu): WorkerProgress(10, 0, 10) for gpu in range(8)}
    workers |= {"11": WorkerProgress(0, 0, 0), "12": WorkerProgress(0, 0, 5, loading=True)}
    display.update(workers, 15)
    lines = rendered(display, 100)
    display.close()
    assert len(lines) == 10  # GPU 11 has no samples
    assert " GPU 0: 100%|" in lines[0] and "[00:42<00:00, " in lines[0]
    assert lines[8].startswith("GPU 12:   0%|") and lines[8].endswith("| 0/5 [00:42<?, loading the model]")
    assert " total:  80%|" in lines[9] and "80/100" in lines[9] and "loading" not in lines[9]


def test_text_is_printed_without_markup_or_wrapping(now: list[float]) -> None:
    console = terminal(40)
    display = ProgressBars(console)
    display.print("/data/[red]/images are being filled by somebody else who is busy")
    display.close()
    assert "/data/[red]/images are being filled by somebody else who is busy" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_without_a_terminal(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = open_display(OutputDir(Path("none")))
    assert isinstance(lines, ProgressLines)
    lines.update({"0": WorkerProgress(0, 0, 10)}, 0)
    lines.update({"0": WorkerProgress(1, 0, 10)}, 0)
    assert capsys.readouterr().err == ""
    now[0] += 10
    lines.update({"0": WorkerProgress(4, 1, 10), "3": WorkerProgress(0, 0, 0)}, 2)
    assert capsys.readouterr().err == (
        "5/12 (success: 4, failed: 1), 0.40 images/s, 18 s left; GPU 0: 5/10, GPU 3: 0/0\n"
    )
    now[0] += 60
    lines.update({"0": WorkerProgress(4, 1, 10), "3": WorkerProgress(0, 0, 0)}, 2)
    assert capsys.readouterr().err == ""  # nothing new
    now[0] += 1
    lines.update({"0": WorkerProgress(9, 1, 10), "3": WorkerProgress(2, 0, 2)}, 0)
    assert "12/12 (success: 11, failed: 1)" in capsys.readouterr().err
    lines.update({"0": WorkerProgress(9, 1, 10), "3": WorkerProgress(2, 0, 2)}, 0)
    assert capsys.readouterr().err == ""  # the end is printed once
    ProgressLines().update({"0": WorkerProgress(1, 0, 1)}, 0)
    assert capsys.readouterr().err == "1/1 (success: 1, failed: 0); GPU 0: 1/1\n"  # no rate of one image


def test_the_rate_counts_from_the_first_image(now: list[float]) -> None:
    display = ProgressLines()
    now[0] += 100
    assert display._rate("0", 0) == display._rate("0", 2) == 0.0
    now[0] += 4
    assert display._rate("0", 4) == 0.5


def test_progress_is_recorded_every_second_while_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = OutputDir(tmp_path / "images")
    output.create()
    display = ProgressLines(output)
    display.update({"0": WorkerProgress(1, 0, 8), "1": WorkerProgress(0, 1, 8)}, 2)
    record = {"workers": {"0": [1, 0, 8], "1": [0, 1, 8]}, "unassigned": 2}
    assert json.loads(output.progress.read_text()) == record
    display.update({"0": WorkerProgress(2, 0, 8), "1": WorkerProgress(0, 1, 8)}, 1)
    assert json.loads(output.progress.read_text()) == record
    monkeypatch.setattr(console, "_RECORD_INTERVAL", 0.0)
    display.update({"0": WorkerProgress(2, 0, 8), "1": WorkerProgress(0, 1, 8)}, 1)
    assert json.loads(output.progress.read_text())["workers"]["0"] == [2, 0, 8]
    output.recover()
    assert not output.progress.exists()
    output.close()
    display.update({"0": WorkerProgress(8, 0, 8)}, 0)
    assert not output.work.exists()
