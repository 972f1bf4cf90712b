"""Coverage-guided fuzzing of the parsers that are ours: `python -m tests.fuzz.coverage_guided TARGET [SECONDS]`.

Atheris changes the input towards lines that were not run before. A parser gives an answer or a `UserError`; anything else
stops the run and leaves the input in a file crash-*, which belongs into a test beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["muralist", "yaml", "csv", "json"]):
    from muralist.core.errors import UserError
    from muralist.core.slurm import first_host
    from muralist.data.ledger_reader import parse_line
    from muralist.data.packed import EncodedManifest, Manifest
    from muralist.data.prompts import open_prompt_table
    from muralist.data.sources.hydit_index import open_index
    from muralist.generate.output_dir import Header
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
    from muralist.settings.load import load, read_yaml, to_yaml

PLACE = Path(tempfile.mkdtemp(prefix="muralist-fuzz-"))
SEEDS: dict[str, list[bytes]] = {
    "table": [
        b"\0id,prompt,seed\na,\"x\"\"y\",5\n",
        b"\1id\tprompt\n\"STOP\" sign\tb\n",
        b'\2{"prompt": "a", "seed": 7, "height": 8, "width": 8}\n',
        b"\3a car\r\ntwo",
        b'\4{"annotations": [{"image_id": 5, "caption": "x"}]}',
    ],
    "ledger": [
        b'{"status": "failed", "index": 0, "copy": 0, "id": "a", "seed": 5, "prompt": "p", "file": "f", "gpu": "0", '
        b'"key": "k", "error": "e"}',
        b'{"format": "muralist ledger", "version": 1, "settings": {}, "batch_size": 1}',
    ],
    "config": [b"model: {name: JiT-B/4}\ndata:\n  path: [a, b]\nepochs: 5\nseed: 0x1f\n", b"--seed\0" b"5\0--batch_size=4"],
    "index": [b'{"arrow_files": ["a"], "cum_length": [3], "indices": {"512x768": [0]}, "group_length": {"512x768": 1}}'],
    "hosts": [b"gpu[07-09,12],cpu1"],
    "manifest": [
        b'{"format": "muralist packed images", "version": 1, "img_size": [8, 8], "rows_per_batch": 4, "label_names": [], '
        b'"files": [{"name": "00000.arrow", "rows": 1, "bytes": 2, "sha256": ""}], "broken": 0, "source": "", '
        b'"source_fingerprint": ""}'
    ],
}  # fmt: skip


def _written(name: str, data: bytes) -> Path:
    path = PLACE / name
    path.write_bytes(data)
    return path


def table(data: bytes) -> None:
    """Prompt tables: what is taken can be read again in any order."""
    kind = ("csv", "tsv", "jsonl", "txt", "json")[data[0] % 5 if data else 0]
    found = open_prompt_table(str(_written(f"table.{kind}", data[1:])))
    rows = found.rows(range(len(found)))
    assert found.rows(range(len(found))[::-1]) == rows[::-1]
    assert not any({"/", "\0", "\\"} & set(row.id) or row.id.startswith(".") for row in rows)


def ledger(data: bytes) -> None:
    """Lines of a ledger, and its first."""
    if line := parse_line(data):
        assert isinstance(line["index"], int) and "/" not in line["gpu"]
    with suppress(ValueError, RecursionError):  # what `Header.read` takes for damage
        Header.parse(data.decode(errors="replace"))


def config(data: bytes) -> None:
    """Settings from YAML or from flags: what is taken is written and read back as it was."""
    if data.startswith(b"--"):
        settings = load(TrainSettings, data.decode(errors="replace").split("\0"), TRAIN_FLAT_NAMES)
    else:
        settings = load(TrainSettings, ["--config", str(_written("config.yaml", data))], TRAIN_FLAT_NAMES)
    assert read_yaml(TrainSettings, _written("again.yaml", to_yaml(settings).encode())) == settings


def index(data: bytes) -> None:
    """HunyuanDiT's index files."""
    open_index(_written("index.json", data), 8)


def hosts(data: bytes) -> None:
    """SLURM's node lists."""
    text = data.decode(errors="replace")
    assert len(first_host(text)) <= len(text)


def manifest(data: bytes) -> None:
    """Manifests of packed folders."""
    _written("manifest.json", data)
    for kind in (Manifest, EncodedManifest):
        with suppress(UserError):
            assert kind.read(PLACE).images > 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    "table": table,
    "ledger": ledger,
    "config": config,
    "index": index,
    "hosts": hosts,
    "manifest": manifest,
}


def main(target: str, seconds: str = "180") -> None:
    """Fuzz one parser for some seconds."""

    def once(data: bytes) -> None:
        with suppress(UserError):
            TARGETS[target](data)

    corpus = PLACE / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(SEEDS[target]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-max_len=4096", "-timeout=20"], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
