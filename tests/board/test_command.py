"""`muralist board` as a person starts it."""

from __future__ import annotations

import importlib.util
import re
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from muralist.cli import main
from tests.support.boards import write_run
from tests.support.runs import finish, start


def test_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", str(tmp_path / "nowhere")]) == 1
    assert f"{tmp_path / 'nowhere'} does not exist." in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["board", str(tmp_path / "file")]) == 1
    assert "is a file, not a folder" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert main(["board", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "muralist: `muralist board` needs uvicorn, not installed here.",
        "Run `pip install 'muralist[board]'`.",
    ]


def test_a_foreign_address_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", str(tmp_path), "--host", "192.0.2.1"]) == 1
    assert "Cannot listen on 192.0.2.1" in capsys.readouterr().err
    assert main(["board", str(tmp_path), "--port", "70000"]) == 1
    assert "--port is '70000': expected an integer at least 0 and below 65536" in capsys.readouterr().err


@pytest.mark.slow
def test_the_address_is_printed_and_ctrl_c_exits(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("muralist", "board", tmp_path, "--port", port, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert process.stdout is not None
        said = process.stdout.readline()
    found = re.fullmatch(r"(http://127\.0\.0\.1:(\d+)/) shows (.*) \(port (\d+) is taken\)\. Ctrl\+C ends it\.\n", said)
    assert found, said
    assert int(found[2]) > port and int(found[4]) == port and found[3] == str(tmp_path)
    with urllib.request.urlopen(f"{found[1]}api/overview", timeout=30) as answer:
        assert b'"id":"run"' in answer.read()
    process.send_signal(signal.SIGINT)
    assert finish(process, expect=0, timeout=30) == ""
