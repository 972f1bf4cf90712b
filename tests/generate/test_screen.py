"""What one sees: bars on terminals of any width, lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from muralist.generate import screen
from muralist.generate.screen import Bars, Count, Lines, Pace, clock, open_screen

COUNTS = {"0": Count(248, 2, 250), "1": Count(125, 0, 250)}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until it is moved."""
    time = [1000.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: time[0])
    return time


def rendered(bars: Bars, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(bars)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def bars(width: int, now: list[float]) -> Bars:
    """Bars half an hour after the start, of which 25 minutes were spent painting."""
    made = Bars(Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True))
    now[0] += 300
    made.show({"0": Count(0, 0, 250), "1": Count(0, 0, 250)}, 0)
    made.show({"0": Count(50, 0, 250), "1": Count(25, 0, 250)}, 0)
    now[0] += 1500
    made.show(COUNTS, 0)
    return made


def test_a_bar_per_gpu_as_in_the_guide(now: list[float]) -> None:
    made = bars(120, now)
    lines = rendered(made, 120)
    now[0] += 60  # while workers end
    made.close()
    assert rendered(made, 120) == lines
    assert len(lines) == 3
    assert re.fullmatch(r"GPU 0: 100%\|#+\| 250/250 \[30:00<00:00, success: 248, failed: 2\]", lines[0])
    # 100 pictures in 25 minutes, 125 to go
    assert re.fullmatch(r"GPU 1:  50%\|#+ +\| 125/250 \[30:00<31:15, success: 125, failed: 0\]", lines[1])
    assert re.fullmatch(
        r"total:  75%\|#+ +\| 375/500 \[30:00<10:25, success: 373, failed: 2, 0\.20 images/s\]", lines[2]
    )
    assert len({line.index("| ") for line in lines if "#| " in line} | {lines[2].index("| ")}) == 1


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int, now: list[float]) -> None:
    made = bars(width, now)
    lines = rendered(made, width)
    made.close()
    assert len(lines) == 3 and max(map(len, lines)) <= width
    assert lines[1].startswith("GPU 1:  50%|##")
    if width >= 60:
        assert "failed" in lines[1] and "31:15" in lines[1]


def test_eight_gpus_and_rows_of_nobody(now: list[float]) -> None:
    made = Bars(Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True))
    made.show({str(gpu): Count(10, 0, 10) for gpu in range(8)} | {"11": Count(0, 0, 0)}, 20)
    lines = rendered(made, 80)
    made.close()
    assert len(lines) == 10
    assert " GPU 0: 100%|" in lines[0] and "GPU 11: 100%|" in lines[8]  # nothing to do is done
    assert " total:  80%|" in lines[9] and "80/100" in lines[9]


def test_a_worker_without_a_model_says_what_it_waits_for(now: list[float]) -> None:
    made = Bars(Console(file=io.StringIO(), width=100, force_terminal=True, no_color=True))
    now[0] += 42
    made.show({"0": Count(0, 0, 5, loading=True), "1": Count(1, 0, 5)}, 0)
    lines = rendered(made, 100)
    made.close()
    assert lines[0].endswith("| 0/5 [00:42<?, loading the model]")
    assert "1/5" in lines[1] and "loading" not in lines[1] and "1/10" in lines[2] and "loading" not in lines[2]


def test_sentences_are_printed_as_they_are(now: list[float]) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, no_color=True)
    made = Bars(console)
    made.say("/data/[red]/images are being filled by somebody else who is busy")
    made.close()
    assert "/data/[red]/images are being filled by somebody else who is busy" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_where_there_is_no_terminal(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines = open_screen()
    assert isinstance(lines, Lines)
    lines.show({"0": Count(0, 0, 10)}, 0)
    lines.show({"0": Count(1, 0, 10)}, 0)
    assert capsys.readouterr().err == ""
    now[0] += 10
    lines.show({"0": Count(4, 1, 10), "3": Count(0, 0, 0)}, 2)
    assert capsys.readouterr().err == (
        "5/12 (success: 4, failed: 1), 0.40 images/s, 18 s left; GPU 0: 5/10, GPU 3: 0/0\n"
    )
    now[0] += 60
    lines.show({"0": Count(4, 1, 10), "3": Count(0, 0, 0)}, 2)
    assert capsys.readouterr().err == ""  # nothing new
    now[0] += 1
    lines.show({"0": Count(9, 1, 10), "3": Count(2, 0, 2)}, 0)
    assert "12/12 (success: 11, failed: 1)" in capsys.readouterr().err
    lines.show({"0": Count(9, 1, 10), "3": Count(2, 0, 2)}, 0)
    assert capsys.readouterr().err == ""  # the end is told once


def test_the_pace_starts_with_the_first_picture(now: list[float]) -> None:
    pace = Pace()
    assert pace.left(Count(0, 0, 10)) is None
    now[0] += 100
    assert pace.rate(2) == 0.0
    now[0] += 4
    assert pace.rate(4) == 0.5 and pace.left(Count(4, 0, 10)) == 12


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0, "00:00"), (1800, "30:00"), (3661, "1:01:01")])
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_no_pace_is_told_where_all_came_at_once(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    Lines().show({"0": Count(1, 0, 1)}, 0)
    assert capsys.readouterr().err == "1/1 (success: 1, failed: 0); GPU 0: 1/1\n"
