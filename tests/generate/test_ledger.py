"""The ledger: intact lines are read back, however it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muralist.core.errors import UserError
from muralist.data import ledger_reader
from muralist.generate import ledger
from muralist.generate.ledger import Header, Shard
from muralist.generate.plan import Sample
from muralist.settings import GenerateSettings

HEADER = Header({"model": "tiny", "negative_prompt": "schön", "steps": 4}, 8, {"torch": "2.13"})
any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too


def sample(row: int, prompt: str = "a car") -> Sample:
    return Sample(row, row, 0, f"{row + 1:06d}", 42 + row, prompt, "", 16, 16, f"{row + 1:06d}_seed{42 + row}.png")


def test_the_header_is_read_back_with_a_digest_of_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.start(path, HEADER)
    assert Header.read(path) == HEADER
    assert "schön" in path.read_text(encoding="utf-8")
    assert Header({**HEADER.settings, "steps": 5}, 8).digest != HEADER.digest
    assert Header(HEADER.settings, 2).digest == HEADER.digest
    assert Header.read(tmp_path / "none") is None


@pytest.mark.parametrize(
    "first", [b"", b"\n", b"{}\n", b"[1]\n", b"null\n", b"\xff\xfe\n", b'{"format": "muralist ledger"}\n',
              b'{"format": "muralist ledger", "version": 2, "settings": {}, "batch_size": 1}\n', b'{"status": "done"}\n']
)  # fmt: skip
def test_a_wrong_first_line_is_refused(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(first)
    with pytest.raises(UserError, match="is not a ledger that this muralist can read.*--overwrite"):
        Header.read(tmp_path / "ledger.jsonl")


@settings(max_examples=40)
@given(prompts=st.lists(any_text, min_size=1, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=4))
def test_torn_writes_lose_only_their_own_lines(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], cuts: list[int]
) -> None:
    """After each kill, some bytes of a line are left behind; every complete line is there."""
    folder = tmp_path_factory.mktemp("torn")
    path, shards = folder / "ledger.jsonl", folder / ".ledger"
    ledger.start(path, HEADER)
    for row, prompt in enumerate(prompts):
        shard = Shard(shards / f"gpu{row % 2}.jsonl", HEADER.digest)
        shard.failed(sample(row, prompt), prompt, "0", 0.1)
        shard.close()
        if row < len(cuts):
            torn = json.dumps({"status": "done", "index": 99, "prompt": prompt * 20}).encode()[: cuts[row]]
            with (shards / f"gpu{row % 2}.jsonl").open("ab") as file:
                file.write(torn)
    ledger.merge(path, shards)
    ledger.merge(path, shards)
    lines = list(ledger_reader.read_lines(path))
    assert sorted((line["index"], line["prompt"], line["error"]) for line in lines) == [
        (row, prompt, prompt) for row, prompt in enumerate(prompts)
    ]
    assert Header.read(path) == HEADER
    assert b"\n\n" not in path.read_bytes() and not list(shards.iterdir())
    offsets = [offset for offset, _ in ledger_reader.lines_with_offsets(path)]
    assert list(ledger_reader.read_lines_at(path, reversed(offsets))) == lines[::-1]


def test_an_interrupted_merge_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.start(path, HEADER)
    shard = Shard(tmp_path / ".ledger" / "gpu0.jsonl", HEADER.digest)
    for row in range(3):
        shard.failed(sample(row), "no", "0", 0.1)
    shard.close()
    kept = (tmp_path / ".ledger" / "gpu0.jsonl").read_bytes()
    ledger.merge(path, tmp_path / ".ledger")
    complete = path.read_bytes()
    path.write_bytes(complete[:-50])  # the last line is torn, and the shard is still there
    (tmp_path / ".ledger" / "gpu0.jsonl").write_bytes(kept)
    ledger.merge(path, tmp_path / ".ledger")
    assert [line["index"] for line in ledger_reader.read_lines(path)] == [0, 1, 0, 1, 2]


def test_incomplete_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.start(path, HEADER)
    with path.open("ab") as file:
        file.write(b'{"status": "done"}\n{"status": "done", "index": 0}\n[]\n3\n"x"\n' + b"[" * 100_000 + b"\n")
    assert list(ledger_reader.read_lines(path)) == []


def test_a_file_is_intact_by_size_and_time_or_by_its_bytes(tmp_path: Path) -> None:
    import hashlib
    import os

    path = tmp_path / "a.png"
    path.write_bytes(b"image!!")
    line = {"bytes": 7, "changed": path.stat().st_mtime_ns, "sha256": hashlib.sha256(b"image!!").hexdigest()}
    assert ledger.is_intact(path, line)
    os.utime(path, ns=(1, 1))
    assert ledger.is_intact(path, line)  # copied elsewhere
    path.write_bytes(b"ima\0e!!")
    assert not ledger.is_intact(path, line)
    path.write_bytes(b"imag")
    assert not ledger.is_intact(path, line)
    path.unlink()
    assert not ledger.is_intact(path, line)


@pytest.mark.parametrize("written", ["EulerDiscrete", "eulerdiscrete", "EulerDiscreteScheduler"])
def test_a_scheduler_name_is_normalized(written: str) -> None:
    """Older ledgers have it as it was typed."""
    asked = GenerateSettings(prompts_csv="p.csv", output_dir="o", model_path="m", scheduler="eulerDiscrete")
    before = Header.parse(Header({"scheduler": written}, 1).line())
    assert before.settings == {"scheduler": asked.scheduler}
    assert before.digest == Header({"scheduler": asked.scheduler}, 1).digest
    assert asked.scheduler != GenerateSettings(**(asked.model_dump() | {"scheduler": "DDIM"})).scheduler
