"""`muralist show`: contact sheets, and images in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from muralist.cli import main
from muralist.core.images import encode_png
from muralist.tools.show import render


def write_colors(folder: Path, count: int) -> list[tuple[int, int, int]]:
    folder.mkdir(parents=True, exist_ok=True)
    colors = [((37 * n) % 256, (91 * n) % 256, (151 * n) % 256) for n in range(count)]
    for number, color in enumerate(colors):
        Image.new("RGB", (64, 64 if number % 2 else 32), color).save(folder / f"{number:04d}.png")
    return colors


def colors_in(sheet: Path) -> set[tuple[int, int, int]]:
    with Image.open(sheet) as image:
        return {color for _, color in image.convert("RGB").getcolors(1 << 24) or []}


def test_contact_sheet_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    colors = write_colors(tmp_path / "made" / "below", 7)
    (tmp_path / "made" / "broken.png").write_bytes(b"\x89PNG nothing")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["show", str(tmp_path / "made")]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output == [f"8 of 8 images in {tmp_path / 'made'}:", "made-sheet.png"]
    assert set(colors) <= colors_in(tmp_path / "work" / "made-sheet.png")
    assert sorted(path.name for path in (tmp_path / "made").rglob("*")) == sorted(
        ["below", "broken.png", *(f"{number:04d}.png" for number in range(7))]
    )


def test_images_are_chosen_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colors = write_colors(tmp_path / "many", 240)
    sheet = tmp_path / "many" / "sheet.png"
    for _ in range(2):  # the second time the sheet is in the folder, but not part of itself
        assert main(["show", str(tmp_path / "many"), "-o", str(sheet)]) == 0
        assert capsys.readouterr().out.startswith("48 of 240 images")
        found = colors_in(sheet)
        shown = [number for number, color in enumerate(colors) if color in found]
        assert shown == list(range(2, 240, 5))


def test_run_shows_its_contact_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_colors(tmp_path / "run" / "samples", 1)
    (tmp_path / "run" / "samples" / "0000.png").rename(tmp_path / "run" / "samples" / "sheet.png")
    assert main(["show", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'samples' / 'sheet.png'}\n"


def test_image_metadata_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"prompt": "a red tram", "seed": "42", "settings": "many"}
    (tmp_path / "tram.png").write_bytes(encode_png(np.zeros((4, 4, 3), np.uint8), facts))
    assert main(["show", str(tmp_path / "tram.png")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "tram.png"), "prompt: a red tram", "seed: 42"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nowhere", "does not exist"), ("empty", "There are no images in"), ("torn.png", "is a broken image")],
)
def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["show", str(tmp_path / name)]) == 1
    assert sentence in capsys.readouterr().err


def test_half_blocks_hold_two_pixels_each() -> None:
    image = np.zeros((4, 2, 3), np.uint8)
    image[0, 0], image[1, 0], image[3, 1] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    lines = render(Image.fromarray(image), 2, 2).split("\n")
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;0;255;0m▀")
    assert lines[1] == "\x1b[38;2;0;0;0;48;2;0;0;0m▀\x1b[38;2;0;0;0;48;2;0;0;255m▀\x1b[0m"
    assert len(lines) == 2


def test_drawn_in_a_real_terminal(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "dark.png")
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "muralist", "show", str(tmp_path / "dark.png")]
    known = {"TERM": "xterm-256color", "COLUMNS": "20", "LINES": "10", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(command, stdout=writer, env={**known, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    os.close(writer)
    output = b""
    try:
        while part := os.read(reader, 65536):
            output += part
    except OSError:
        pass  # the other end is closed
    assert process.wait(30) == 0
    assert output.count("\x1b[38;2;1;2;3;48;2;1;2;3m▀".encode()) == 14 * 7  # square in cells twice as high as wide
    assert output.decode().splitlines()[-1] == str(tmp_path / "dark.png")
