"""Prompts as users give them: --prompt, standard input, columns by name and comments, by real commands."""

from __future__ import annotations

import csv
import io
import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data.ledger_reader import read_lines
from muralist.generate import command
from muralist.generate.output_dir import OutputDir
from muralist.generate.ranks import RankCoordinator
from muralist.settings import GenerateSettings
from tests.support.generating import made_by, read_images
from tests.support.pipelines import build_pipeline
from tests.support.runs import environment, finish, fork
from tests.support.worker_pools import ModelThreadPool

Capture = pytest.CaptureFixture[str]
SMALL = ["--height", "32", "--width", "32", "--num_inference_steps", "2", "--dtype", "fp32", "--batch_size", "2"]
PROMPTS = ["a red car, parked", 'a sign: "STOP"\nin two lines', "ein Käfer 🚗"]


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline("wan21", tmp_path_factory.mktemp("pipelines"))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads of this process."""
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)
    for name in ("", "muralist"):  # as in a process of its own: another command may have set up its log here
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


def generate(model: Path, output: Path, *more: object, expect: int = 0) -> dict[str, bytes]:
    words = ["generate", "--model_path", model, "--output_dir", output, *SMALL, *more]
    assert main([str(word) for word in words]) == expect
    return read_images(output)


def rows(output: Path) -> list[tuple[str, int, str]]:
    """Id, seed and prompt of each image."""
    lines = sorted(read_lines(output / "ledger.jsonl"), key=lambda line: line["index"])
    return [(line["id"], line["seed"], line["prompt"]) for line in lines]


def write_csv(path: Path, cells: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]))
        writer.writeheader()
        writer.writerows(cells)


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Let this process read these bytes from its standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def pipe_into(data: bytes, *words: object) -> tuple[int, str]:
    """Run a real command with these bytes on its standard input."""
    found = subprocess.run(
        [sys.executable, "-m", "muralist", *map(str, words)], input=data, capture_output=True,
        env=environment(), timeout=300, check=False,
    )  # fmt: skip
    return found.returncode, found.stderr.decode()


@pytest.mark.usefixtures("threads")
def test_prompts_of_the_command_line_make_the_images_of_a_table(
    wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    flags = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], PROMPTS[2]]
    ran = fork("muralist", "generate", "--model_path", wan, "--output_dir", tmp_path / "flags", *SMALL, *flags)
    told = finish(ran)
    assert "3 images, 32 x 32, from --prompt with WanPipeline" in told
    assert rows(tmp_path / "flags") == [(f"00000{i + 1}", 42 + i, prompt) for i, prompt in enumerate(PROMPTS)]
    table = tmp_path / "prompts.csv"
    write_csv(table, [{"prompt": prompt} for prompt in PROMPTS])
    made = read_images(tmp_path / "flags")
    feed(monkeypatch, table.read_bytes())
    piped = generate(wan, tmp_path / "piped", "--prompts_csv", "-", "--gpu_ids", 0, 1, 2)
    assert "3 images, 32 x 32, from standard input (CSV) with" in capsys.readouterr().err
    assert piped == made and len(set(made.values())) == 3
    # Where rows come from is not part of what they are.
    generate(wan, tmp_path / "flags", "--prompts_csv", table)
    assert "Nothing to do: 3 of 3 images" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_standard_input_that_is_interrupted_resumes_with_the_same_bytes(
    wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = "# a comment\n" + "".join(f"car {row} in the rain\n\n" for row in range(24))
    table = tmp_path / "prompts.txt"
    table.write_text(lines)
    broken = tmp_path / "broken"
    words = ["generate", "--model_path", wan, "--output_dir", broken, *SMALL, "--num_inference_steps", 8]
    whole = generate(wan, tmp_path / "whole", "--num_inference_steps", 8, "--prompts_csv", table)
    with table.open("rb") as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", "muralist", *map(str, words), "--prompts_csv", "-"], stdin=pipe,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
        )  # fmt: skip
    while made_by(broken, 0) < 3:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert "Interrupted." in finish(process, expect=130)
    before = read_images(broken)
    assert 3 <= len(before) < 24
    feed(monkeypatch, lines.replace("car 0", "bus 0").encode())
    generate(wan, broken, "--num_inference_steps", 8, "--prompts_csv", "-", expect=1)
    assert "Row 1 of the table is not the one from which" in capsys.readouterr().err and read_images(broken) == before
    status, told = pipe_into(lines.encode(), *words, "--prompts_csv", "-")
    assert status == 0 and "standard input (lines): 1 comment and 24 blank lines were skipped." in told
    assert read_images(broken) == whole and len(whole) == 24


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_columns_by_name(suffix: str, wan: Path, tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / f"table.{suffix}"
    cells = [
        {"SKU": "x1", "Text": "a car", "number": 7, "prompt": "no", "id": 1},
        {"SKU": "x2", "Text": "a bus", "number": 9, "prompt": "no", "id": 2},
    ]
    if suffix == "csv":
        write_csv(table, cells)
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(cells), table)
    else:
        table.write_text("".join(json.dumps(row) + "\n" for row in cells))
    flags = ["--prompts_csv", table, "--prompt_column", "text", "--seed_column", "Number", "--id_column", "sku"]
    made = generate(wan, tmp_path / "images", *flags)
    assert set(made) == {"x1_seed7.png", "x2_seed9.png"}
    assert rows(tmp_path / "images") == [("x1", 7, "a car"), ("x2", 9, "a bus")]
    assert f"Unused columns of {table}: id, prompt." in capsys.readouterr().err
    generate(wan, tmp_path / "images", *flags)
    assert "Nothing to do: 2 of 2 images" in capsys.readouterr().err
    # Another column is another row: refused, as a changed table is.
    generate(wan, tmp_path / "images", *flags, "--prompt_column", "prompt", expect=1)
    assert "Changed: prompt 'a car' -> 'no'." in capsys.readouterr().err
    generate(wan, tmp_path / "new", *flags, "--id_column", "skuu", expect=1)
    told = capsys.readouterr().err
    assert f"There is no column skuu in {table}." in told and "Did you mean sku?" in told
    assert "Give --id_column the name of a column." in told and not (tmp_path / "new").exists()


@pytest.mark.usefixtures("threads")
def test_comments_and_blank_lines_of_text_files(wan: Path, tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "prompts.txt"
    table.write_text("# people\n\na car\n   # more\na bus # not a comment\n\\# hashtag\n\n")
    generate(wan, tmp_path / "images", "--prompts_csv", table)
    assert rows(tmp_path / "images") == [
        ("000001", 42, "a car"), ("000002", 43, "a bus # not a comment"), ("000003", 44, "# hashtag"),
    ]  # fmt: skip
    told = capsys.readouterr().err
    assert rf"{table}: 2 comments and 2 blank lines were skipped. Write \# for a prompt that begins with #." in told


@pytest.mark.usefixtures("threads")
def test_a_folder_made_when_such_lines_were_prompts_is_refused(wan: Path, tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "prompts.txt"
    table.write_text("a car\n\\#1 fan\na bus\n")  # the rows of an earlier version for "a car", "#1 fan", "a bus"
    made = generate(wan, tmp_path / "images", "--prompts_csv", table)
    table.write_text("a car\n#1 fan\na bus\n")
    assert generate(wan, tmp_path / "images", "--prompts_csv", table, expect=1) == made
    told = " ".join(capsys.readouterr().err.split())
    assert "Changed: prompt '#1 fan' -> 'a bus'; lines of .txt tables that begin with # are comments" in told
    table.write_text("a car\n\\#1 fan\na bus\n")
    generate(wan, tmp_path / "images", "--prompts_csv", table)
    assert "Nothing to do: 3 of 3 images" in capsys.readouterr().err


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\xef\xbb\xbfa car\r\na bus\r\n", "lines"),
        (b'\n{"prompt": "a car"}\n{"prompt": "a bus"}\n', "JSONL"),
        (b'{"caption": "a car", "x": 1}\n{"caption": "a bus"}', "JSONL"),
        (b'id,"Prompt"\n1,a car\n2,a bus\n', "CSV"),
        (b"caption\na car\na bus\n", "CSV"),
        (b"n\tprompt\n1\ta car\n2\ta bus\n", "TSV"),
    ],
)
def test_the_format_of_standard_input(
    data: bytes, found: str, wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    feed(monkeypatch, data)
    generate(wan, tmp_path / "images", "--prompts_csv", "-", "--seed_start", 5)
    assert f"2 images, 32 x 32, from standard input ({found}) with" in capsys.readouterr().err
    assert [row[1:] for row in rows(tmp_path / "images")] == [(5, "a car"), (6, "a bus")]


def settings(output: Path, **given: Any) -> GenerateSettings:
    return GenerateSettings(output_dir=str(output), model_path="none", **given)


def test_ranks_do_not_share_standard_input(tmp_path: Path) -> None:
    output = OutputDir(tmp_path / "images")
    ranks = RankCoordinator.from_environment({"WORLD_SIZE": "4", "RANK": "1"}, output, 1, 1.0)
    with pytest.raises(UserError, match="--prompts_csv - under a launcher of 4 ranks") as refused:
        command._Command.prepare(settings(output.root, prompts_csv="-"), output, ranks, None)
    assert "Save the prompts to a file" in refused.value.fix


@pytest.mark.parametrize("data", [b"", b" \n\n"])
def test_standard_input_without_prompts_is_refused(data: bytes, wan: Path, tmp_path: Path) -> None:
    words = ("generate", "--model_path", wan, "--output_dir", tmp_path / "images", "--prompts_csv", "-")
    status, told = pipe_into(data, *words)
    assert status == 1 and "Standard input is empty: there is no prompt." in told and "Traceback" not in told
    assert not (tmp_path / "images").exists()


def test_doctor_reads_standard_input_once(wan: Path, tmp_path: Path) -> None:
    words = ["doctor", "generate", "--model_path", wan, "--output_dir", tmp_path / "images", *SMALL]
    found = subprocess.run(
        [sys.executable, "-m", "muralist", *map(str, words), "--prompts_csv", "-"], input=b"a car\na bus\n",
        capture_output=True, env=environment(), timeout=300, check=False,
    )  # fmt: skip
    assert "2 rows, 2 of them read, such as 'a car'" in found.stdout.decode(), found
    assert b"is empty" not in found.stdout + found.stderr


def test_a_closed_standard_input_is_refused(wan: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "muralist", "generate", "--model_path", str(wan), "--output_dir",
             str(tmp_path / "images"), "--prompts_csv", "-"]  # fmt: skip
    found = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True, env=environment(), timeout=300, check=False
    )
    assert found.returncode == 1 and b"standard input, which is closed." in found.stderr, found
