"""The local launcher: ranks in, one exit status out, whatever happens to them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from muralist.launch import launch
from tests.support.runs import finish, start


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    assert launch(python(code), 3) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_one_failure_ends_all_and_gives_its_status(tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    began = time.monotonic()
    assert launch(python(code), 3) == 7
    assert time.monotonic() - began < 20


def test_a_signal_reaches_every_rank_once(tmp_path: Path) -> None:
    rank = (
        "import os, signal, time, sys\n"
        "heard = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        f"open({str(tmp_path)!r} + '/ready' + os.environ['RANK'], 'w').close()\n"
        "while not heard: time.sleep(0.02)\n"
        "time.sleep(0.3)\n"
        "sys.exit(0 if len(heard) == 1 else 9)\n"
    )
    code = f"import sys; from muralist.launch import launch; sys.exit(launch([sys.executable, '-c', {rank!r}], 2))"
    process = start("python", "-c", code)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    finish(process, expect=0, timeout=20)
