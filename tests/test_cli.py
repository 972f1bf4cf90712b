"""What a person sees of errors: a few lines on stderr, a non-zero status, a traceback only when asked for."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from muralist import __version__, cli
from muralist.cli import COMMANDS, main
from muralist.core.errors import UserError, closest_match, report_errors
from tests.conftest import REPOSITORY
from tests.support.runs import finish, start

RESULT = "bench/results/train_speed_h200.json"


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(run, "TrainSettings"))


def test_usage_is_shown_to_whoever_asks_or_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        said = capsys.readouterr()
        assert all(f"muralist {command}" in said.out for command in COMMANDS)
        assert said.err == ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("written", "meant"), [("trian", "train"), ("Train", "train"), ("exprt", "export"), ("qqq", None)]
)
def test_an_unknown_command_names_the_nearest(
    written: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written, "--data_path", "x"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"Unknown command '{written}'." in said.err
    assert ("Did you mean" in said.err) == (meant is not None)
    assert meant is None or f"Did you mean {meant}?" in said.err
    assert "`muralist --help`" in said.err


def test_an_error_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(monkeypatch, UserError("It rained.", fix="Take an umbrella."))
    assert main(["train"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "muralist: It rained.\nTake an umbrella.\n")
    for words in (["train", "--debug"], ["--debug", "train"]):
        assert main(words) == 1
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "in run" in err
        assert err.endswith("muralist: It rained.\nTake an umbrella.\n")


def test_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(monkeypatch, PermissionError(13, "Permission denied", "/results/x"))
    assert main(["train"]) == 1
    err = capsys.readouterr().err
    assert "muralist: Permission denied: /results/x" in err
    assert "Traceback" not in err
    assert main(["train", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_its_own_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    assert main(["train"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_bug_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_real_processes_end_with_a_status() -> None:
    for command in (["muralist", "train"], ["python", "train.py"]):
        said = finish(start(*command, "--data_path", "x", "--img_size", "63"), expect=1)
        assert "cannot be divided into patches" in said
        assert "Traceback" not in said
        assert "Traceback" in finish(start(*command, "--img_size", "63", "--debug"), expect=1)
        assert "--enable_condition" in finish(start(*command, "--help"))


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["estimate", "--from", RESULT],
        ["launch", "--nproc", "1", "estimate", "--from", RESULT],
    ],
)
def test_a_closed_output_ends_a_command_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "muralist", *words]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=REPOSITORY, check=False)
    finally:
        os.close(writer)
    # 0 where all work was done before the output was flushed.
    assert ended.returncode in (0, 141) and ended.stderr == b""


def test_nearest_is_a_sentence_or_nothing() -> None:
    assert closest_match("batchsize", ["batch_size", "epochs"]) == "Did you mean batch_size?"
    assert closest_match("JIT-B/4", ["JiT-B/4", "JiT-L/4"]) == "Did you mean JiT-B/4?"
    assert closest_match("zzz", ["batch_size"]) == ""
    assert closest_match("x", []) == ""


def test_an_error_survives_the_way_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(UserError("what.", "why.", "fix.")))
    assert (type(copy), copy.what, copy.why, copy.fix) == (UserError, "what.", "why.", "fix.")
    assert str(copy) == "what. why. fix."


def test_a_flag_that_must_be_given_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--output_dir", "o", "--model_path", "m"]) == 1
    told = capsys.readouterr().err
    assert "--prompts_csv is missing." in told and "CSV, TSV, JSONL or Parquet table" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["0,1"],
            "--gpu_ids is '0,1': expected one or more integers at least 0.\nPut blanks between values: --gpu_ids 0 1",
        ),
        (["0", "x"], "--gpu_ids is '0 x': expected one or more integers at least 0.\n"),
    ],
)
def test_a_list_of_numbers_says_how_it_is_written(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--images", "a", "--output_dir", "b", "--gpu_ids", *given]) == 1
    assert f"muralist: {told}" in capsys.readouterr().err


def test_another_broken_pipe_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert report_errors(run) == 1  # the output is open: it was a pipe to a worker or a service
    assert "Broken pipe" in capsys.readouterr().err


def test_a_command_started_without_stdout_succeeds() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m muralist --version >&-', shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        "train --data_path driving_world --model HunyuanDiT --img_size 32 --model.path {missing} --dry_run",
        "evaluate --images {here} --reference {missing}.npz --output_dir {here}/out",
        "report {missing}",
    ],
)
def test_a_path_that_does_not_exist_is_not_found(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    assert main(words.format(missing=tmp_path / "modle", here=tmp_path).split()) == 1
    said = capsys.readouterr().err
    assert "was not found" in said and "Errno" not in said
    assert ".npz" in words or "Did you mean model?" in said
