"""A quick look at pictures: sheets that show what is there, and what a terminal is sent."""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.cli import main
from muralist.pictures import encode_png
from muralist.terminal_pictures import Ability, ability, drawn, half_blocks


def write_colours(folder: Path, count: int) -> list[tuple[int, int, int]]:
    folder.mkdir(parents=True, exist_ok=True)
    colours = [((37 * n) % 256, (91 * n) % 256, (151 * n) % 256) for n in range(count)]
    for number, colour in enumerate(colours):
        Image.new("RGB", (64, 64 if number % 2 else 32), colour).save(folder / f"{number:04d}.png")
    return colours


def colours_in(sheet: Path) -> set[tuple[int, int, int]]:
    with Image.open(sheet) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}


def test_a_folder_becomes_a_sheet_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    colours = write_colours(tmp_path / "made" / "below", 7)
    (tmp_path / "made" / "broken.png").write_bytes(b"\x89PNG nothing")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["show", str(tmp_path / "made")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"8 of 8 pictures in {tmp_path / 'made'}:", "made-sheet.png"]
    assert set(colours) <= colours_in(tmp_path / "work" / "made-sheet.png")
    assert sorted(path.name for path in (tmp_path / "made").rglob("*")) == sorted(
        ["below", "broken.png", *(f"{number:04d}.png" for number in range(7))]
    )


def test_of_many_pictures_some_are_chosen_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colours = write_colours(tmp_path / "many", 240)
    sheet = tmp_path / "many" / "sheet.png"
    for _ in range(2):  # the second time it lies in the folder, and is not shown in itself
        assert main(["show", str(tmp_path / "many"), "-o", str(sheet)]) == 0
        assert capsys.readouterr().out.startswith("48 of 240 pictures")
        shown = [number for number, colour in enumerate(colours) if colour in colours_in(sheet)]
        assert shown == list(range(2, 240, 5))


def test_a_run_is_shown_by_its_sheet_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_colours(tmp_path / "run" / "samples", 1)
    (tmp_path / "run" / "samples" / "0000.png").rename(tmp_path / "run" / "samples" / "sheet.png")
    assert main(["show", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'samples' / 'sheet.png'}\n"


def test_a_picture_says_how_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"prompt": "a red tram", "seed": "42", "settings": "many"}
    (tmp_path / "tram.png").write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8), facts))
    assert main(["show", str(tmp_path / "tram.png")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "tram.png"), "prompt: a red tram", "seed: 42"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nowhere", "does not exist"), ("empty", "There is no picture in"), ("torn.png", "is a broken image")],
)
def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["show", str(tmp_path / name)]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "way"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1", "TMUX": "/tmp/tmux"}, "blocks"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "blocks"),
        ({"TERM": "linux"}, "none"),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, "none"),
        ({}, "none"),
    ],
)
def test_what_a_terminal_can_draw(environment: dict[str, str], way: Ability) -> None:
    assert ability(environment) == way


def test_half_blocks_hold_two_pixels_each() -> None:
    picture = np.zeros((4, 2, 3), np.uint8)
    picture[0, 0], picture[1, 0], picture[3, 1] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    lines = half_blocks(Image.fromarray(picture), 2, 2).split("\n")
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;0;255;0m▀")
    assert lines[1] == "\x1b[38;2;0;0;0;48;2;0;0;0m▀\x1b[38;2;0;0;0;48;2;0;0;255m▀\x1b[0m"
    assert lines[2:] == [""]


@pytest.mark.parametrize("way", ["kitty", "iterm"])
def test_whole_pictures_arrive_whole(way: Ability) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    text = drawn(Image.fromarray(noise), 100, 40, way)
    pattern = r"\x1b_G([^;]*);([^\x1b]*)\x1b\\" if way == "kitty" else r"\x1b\]1337;([^:]*):([^\x07]*)\x07"
    parts = re.findall(pattern, text)
    assert re.sub(pattern, "", text) == "\n"
    if way == "kitty":
        assert [words.rsplit("m=", 1)[1] for words, _ in parts] == ["1"] * (len(parts) - 1) + ["0"]
        assert all(len(data) <= 4096 for _, data in parts)
    with Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in parts)))) as image:
        assert np.array_equal(np.asarray(image), noise)


def test_in_a_real_terminal_it_is_drawn(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "dark.png")
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "muralist", "show", str(tmp_path / "dark.png")]
    known = {"TERM": "xterm-256color", "COLUMNS": "20", "LINES": "10", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(command, stdout=its, env={**known, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    os.close(its)
    said = b""
    try:
        while part := os.read(mine, 65536):
            said += part
    except OSError:
        pass  # the other side is closed
    assert process.wait(30) == 0
    assert said.count("\x1b[38;2;1;2;3;48;2;1;2;3m▀".encode()) == 14 * 7  # square in cells twice as high as wide
    assert said.decode().splitlines()[-1] == str(tmp_path / "dark.png")
