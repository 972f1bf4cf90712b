"""What the board answers over HTTP, what it never answers, and `muralist board` as a person starts it."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from muralist.cli import main
from tests.support.boards import PROMPTS, Board, ledger_line, running_board, write_generation, write_run
from tests.support.evaluations import write_evaluation
from tests.support.runs import finish, start


def test_everything_under_the_root_is_listed(board: Board, results: Path) -> None:
    told = board.get("/api/overview").json()
    assert told["name"] == "results" and told["root"] == str(results)
    runs = {run["id"]: run for run in told["run"]}
    assert list(runs) == ["best", "first", "group/second"], "best is a link to first"
    assert board.get("/api/curves?run=best").json()["rows"] == 100
    assert board.get("/files/best/samples/step_0000010/gpu_0_sample.png").status == 200
    first = runs["first"]
    assert (first["state"], first["step"], first["steps"], first["images"]) == ("finished", 100, 100, 400)
    assert first["loss"] == 0.01 and first["sparkline"][0] == 1.0 and first["sparkline"][-1] == 0.01
    assert [(one["id"], one["state"]) for one in told["generation"]] == [("scenes", "finished")]
    (evaluation,) = told["evaluation"]
    assert evaluation["scores"]["fid"] == {"value": 20.0, "low": 19.5, "high": 20.5}
    assert evaluation["page"] == "scenes/evaluation/report/index.html"


def test_unchanged_answers_are_304(board: Board) -> None:
    for path in ("/api/overview", "/api/samples?run=first", "/thumb?path=scenes/row-0.png", "/main.js"):
        first = board.get(path)
        again = board.get(path, if_none_match=first.headers["etag"])
        assert (first.status, again.status, again.body) == (200, 304, b"")


def test_large_answers_are_compressed(board: Board) -> None:
    whole, small = board.get("/plotly.min.js"), board.get("/plotly.min.js", accept_encoding="gzip, br")
    assert gzip.decompress(small.body) == whole.body and len(small.body) < 0.4 * len(whole.body)
    told = board.get("/api/curves?run=first", accept_encoding="gzip")
    assert told.headers["content-encoding"] == "gzip" and b'"rows":100,' in gzip.decompress(told.body)


def test_the_sample_grid_and_its_images(board: Board) -> None:
    grid = board.get("/api/samples?run=first").json()
    assert grid["prompts"] == PROMPTS and grid["steps"] == [10, 20, 30] and grid["errors"] == []
    assert grid["files"][1] == [f"gpu_0_sample{further}.png" for further in ("", "_2", "_3", "_4")]
    facts = board.get("/api/facts?path=first/samples/step_0000020/gpu_0_sample_2.png").json()
    assert facts == {"prompt": PROMPTS[1], "seed": "43", "step": "20", "width": 24, "height": 24}
    whole = board.get("/files/first/samples/step_0000020/gpu_0_sample_2.png")
    assert whole.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(whole.body)).getpixel((0, 0)) == (120, 50, 90)


def test_settings_and_the_end_of_the_log(board: Board, results: Path, tmp_path: Path) -> None:
    assert board.get("/api/settings?run=first").json() == {"epochs": 1}
    told = board.get("/api/log?run=first").json()
    assert told["is_whole"] and told["text"].endswith("\nFinished at step 100.\n")
    assert board.get("/api/settings?run=scenes").status == board.get("/api/log?run=scenes").status == 404, "not a run"

    run = write_run(tmp_path / "run", checkpoints=0)
    (run / "config.yaml").write_text(
        "optim: {learning_rate: 8.0e-05, betas: [0.9, [1]]}\nday: 2026-11-18\n1: {2: null}\n"
    )
    (run / "logs" / "train.log").write_text(
        "".join(f"line {number} \N{GREEK SMALL LETTER ALPHA}\n" for number in range(9999)) + "cut"
    )
    bomb = write_run(tmp_path / "bomb", checkpoints=0)
    (bomb / "config.yaml").write_text(
        "a: &a [x,x]\n" + "".join(f"{b}: &{b} [*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    )
    with running_board(tmp_path, tmp_path / "cache") as other:
        told = other.get("/api/settings?run=run").json()
        assert told == {"optim.learning_rate": 8e-5, "optim.betas": [0.9, "[1]"], "day": "2026-11-18", "1.2": None}
        log = other.get("/api/log?run=run").json()
        assert not log["is_whole"] and len(log["text"]) < 1 << 16
        assert re.fullmatch(r"(line \d+ \u03b1\n)+", log["text"]) and "line 9998 " in log["text"]
        assert other.get("/api/settings?run=bomb").json() == {}


def test_thumbnails_fit_and_small_images_are_sent_unchanged(board: Board) -> None:
    answer = board.get("/thumb?path=scenes/row-0.png&side=192")
    small = Image.open(io.BytesIO(answer.body))
    assert answer.headers["content-type"] == "image/webp" and small.size == (192, 144)
    assert board.get("/thumb?path=scenes/row-0.png&side=100").body[:4] == b"RIFF"
    sample = board.get("/thumb?path=first/samples/step_0000010/gpu_0_sample.png")
    assert sample.body == board.get("/files/first/samples/step_0000010/gpu_0_sample.png").body


def test_an_evaluations_page_runs_in_a_sandbox(board: Board) -> None:
    page = board.get("/files/scenes/evaluation/report/index.html")
    assert page.body == b"<script>1</script>"
    assert page.headers["content-security-policy"].startswith("sandbox allow-scripts")
    own = board.get("/")
    assert "script-src 'self';" in own.headers["content-security-policy"] and b"http" not in own.body


OUTSIDE = [
    *("../secret.png", "leak.png", "away/secret.png", "first/../../secret.png", "{root}/../secret.png", "/etc/passwd"),
    *("notes.txt", "first/metrics.jsonl", "first", "", "a\0b.png", "x" * 5000 + ".png", "%2e%2e/secret.png"),
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_the_root_and_no_other_kind_of_file_is_served(board: Board, results: Path, path: str) -> None:
    path = path.replace("{root}", str(results))
    readers = ("/thumb?path=", "/api/facts?path=", "/files/", "/")
    for address in (*(f"{reader}{quote(path, safe='')}" for reader in readers), f"/files/{quote(path)}"):
        answer = board.get(address)
        assert answer.status in (404, 200 if address == "/" else 404), address
        assert b"root:" not in answer.body and b"PNG" not in answer.body and b"private" not in answer.body


@pytest.mark.parametrize(
    "address",
    ["/files/../secret.png", "/files/..%2fsecret.png", "/../secret.png", "//etc/passwd", "/files//etc/passwd"],
)
def test_dots_in_an_address_are_refused(board: Board, address: str) -> None:
    assert board.get(address).status == 404


@pytest.mark.parametrize("run", ["..", "away", ".hidden", "/etc", "nowhere", "first/metrics.jsonl", "%00"])
def test_folders_outside_are_not_read(board: Board, run: str) -> None:
    for name in ("curves?run", "samples?run", "settings?run", "log?run", "generation?folder"):
        assert board.get(f"/api/{name}={run}").status == 404


def test_links_inside_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = write_run(tmp_path / "secret")
    write_evaluation(secret / "evaluation")
    write_generation(secret / "images")
    (secret / "heartbeats").mkdir()
    (secret / "heartbeats" / "rank_0.json").write_text('{"left": "failed", "message": "classified"}')
    root = tmp_path / "results"
    run, sampled = write_run(root / "run", checkpoints=0), write_run(root / "sampled", checkpoints=1)
    for link, target in {
        run / "metrics.jsonl": secret / "metrics.jsonl",
        run / "samples": secret / "samples",
        run / "heartbeats": secret / "heartbeats",
        run / "logs": secret / "logs",
        sampled / "logs" / "train.log": secret / "logs" / "train.log",
        sampled / "config.yaml": secret / "config.yaml",
        sampled / "samples" / "step_0000010" / "gpu_0_prompt.txt": secret / "config.yaml",
        sampled / "samples" / "step_0000020": secret / "samples" / "step_0000020",
        root / "images" / "ledger.jsonl": secret / "images" / "ledger.jsonl",
        root / "scores" / "report.json": secret / "evaluation" / "report.json",
    }.items():
        link.parent.mkdir(exist_ok=True)
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    os.mkfifo(root / "scores" / "pipe.png")
    with running_board(root, tmp_path / "cache") as board:
        told = board.get("/api/overview").json()
        assert told["evaluation"] == [] and [run["id"] for run in told["run"]] == ["run", "sampled"]
        assert told["run"][0]["loss"] is None
        for name in ("run", "sampled"):
            assert board.get(f"/api/log?run={name}").json()["text"] == ""
        assert board.get("/api/settings?run=sampled").json() == {}
        assert board.get("/api/curves?run=run").json()["rows"] == 0
        assert board.get("/api/samples?run=run").json()["steps"] == []
        grid_found = board.get("/api/samples?run=sampled").json()
        assert grid_found["steps"] == [10] and grid_found["prompts"][0] == ""
        assert board.get("/api/generation?folder=images").json()["done"] == 0
        assert board.get("/thumb?path=scores/pipe.png").status == 404


def test_only_get_is_answered(board: Board) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = board.get("/api/overview", method=method)
        assert answer.status == 405 and answer.headers["allow"] == "GET"
    assert "access-control-allow-origin" not in board.get("/api/overview", origin="http://evil.example").headers


def test_other_host_names_are_refused(board: Board) -> None:
    for host in ("evil.example", "evil.example:8420", "localhost.evil.example", ""):
        assert board.get("/api/overview", host=host).status == 421, host
    for host in ("localhost:8420", "127.0.0.1", "[::1]:8420"):
        assert board.get("/api/overview", host=host).status == 200, host


def test_invalid_parameters_are_refused(board: Board) -> None:
    for path in ("/api/curves?run=first&x=time", "/api/curves?run=first&have=a.b.c", "/api/images?folder=scenes&count=0",
                 "/api/images?folder=scenes&begin=-1", "/api/curves"):  # fmt: skip
        assert board.get(path).status == 422, path
    assert board.get("/api/docs").status == board.get("/openapi.json").status == board.get("/docs").status == 404


def test_a_damaged_file_does_not_hide_others(tmp_path: Path) -> None:
    deep, root = "[" * 100_000, tmp_path / "results"
    write_run(root / "good")
    odd = write_run(root / "odd")
    (odd / "heartbeats").mkdir()
    (odd / "heartbeats" / "rank_0.json").write_text(deep)
    (root / "evaluation").mkdir()
    (root / "evaluation" / "report.json").write_text('{"scores": {"fid": {"value": 3.5}}, "images": {"count": NaN}}')
    images = write_generation(root / "images", rows=2, failed=())
    (images / "lock").write_text(deep)
    strange = [{"changed": "x"}, {"index": 1e3}, {"gpu": {}}, {"file": 7}, {"copy": True}, {"width": float("nan")}]
    with (images / "ledger.jsonl").open("a") as ledger:
        ledger.write(deep + "\n" + "".join(ledger_line(2 + row, **more) for row, more in enumerate(strange)))
    with running_board(root, tmp_path / "cache") as board:
        told = board.get("/api/overview").json()
        assert [run["id"] for run in told["run"]] == ["good", "odd"]
        assert [one["id"] for one in told["generation"]] == ["images"]
        assert [(one["scores"]["fid"]["value"], one["images"]) for one in told["evaluation"]] == [(3.5, None)]
        assert board.get("/api/generation?folder=images").json()["done"] == 3, "the last line has all that counts"
        images = board.get("/api/images?folder=images").json()["images"]
        assert [(one["index"], one["width"]) for one in images] == [(0, 32), (1, 32), (7, None)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist."),
        (["file"], "file is a file, not a folder"),
        ([".", "--host", "192.0.2.1"], "Cannot listen on 192.0.2.1"),
        ([".", "--port", "70000"], "--port is '70000': expected an integer at least 0 and below 65536"),
    ],
)
def test_impossible_settings_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["board", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_extra_is_named(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "muralist.board.app")
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["board", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"muralist: `muralist board` needs {package}, not installed here.",
        "Run `pip install 'muralist[board]'`.",
    ]


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
