"""What one sees while weights are read."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muralist.core import formatting as module
from muralist.core.formatting import loading_progress
from muralist.models.weights import read_weights

WEIGHTS = {"a": torch.arange(3_000_000.0), "b": torch.ones(5, dtype=torch.bool), "none": torch.zeros(0)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_REPORTED_BYTES", 1_000_000)
    monkeypatch.delenv("RANK", raising=False)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by the test itself: before it, pytest puts its own in this place."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.usefixtures("small_files_count")
def test_a_line_in_a_log_and_nothing_of_small_files_and_other_ranks(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module.log, "info", lambda words, *values: said.append(words % values))
    read_weights(file)
    assert said == [f"Loading {file} (0.01 GB)."]
    monkeypatch.setenv("RANK", "1")
    read_weights(file)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(module, "MIN_REPORTED_BYTES", 100_000_000)
    read_weights(file)
    assert len(said) == 1


@pytest.mark.usefixtures("small_files_count")
def test_a_terminal_shows_the_bytes_of_a_file_up_to_the_last(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    read = read_weights(file)
    assert read.keys() == WEIGHTS.keys() and all(torch.equal(read[name], WEIGHTS[name]) for name in WEIGHTS)
    shown = screen.getvalue()
    assert f"Loading {file}" in shown and "12.0/12.0 MB" in shown


@pytest.mark.usefixtures("small_files_count")
def test_a_terminal_shows_the_bytes_of_an_official_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    file = tmp_path / "checkpoint-last.pth"
    torch.save({"model_ema1": {"net.a": WEIGHTS["a"]}}, file)
    assert torch.equal(read_weights(file)["a"], WEIGHTS["a"])
    assert "12.0/12.0 MB" in screen.getvalue()
    with zipfile.ZipFile(file) as archive:
        place = next(entry.header_offset for entry in archive.infolist() if entry.file_size > 1_000_000)
    data = bytearray(file.read_bytes())
    data[place + 5_000_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match="cannot be read: it is truncated, damaged"):
        read_weights(file)


@pytest.mark.usefixtures("small_files_count")
def test_of_a_folder_the_seconds_are_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with loading_progress("the VAE of [some] model", file.parent) as advance:
        assert advance is None
    shown = screen.getvalue()
    assert "Loading the VAE of [some] model" in shown and "0:00:00" in shown and "MB" not in shown
