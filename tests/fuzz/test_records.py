"""What commands leave for each other, damaged: ledgers, locks, signs of life, statistics and reports."""

from __future__ import annotations

import io
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muralist.core import liveness
from muralist.core.errors import UserError
from muralist.core.run_dir import FileLock
from muralist.data.ledger_reader import parse_line, read_lines
from muralist.data.prompts import open_prompt_table
from muralist.evaluate import inputs
from muralist.evaluate.inception import FEATURES
from muralist.evaluate.page import write_report
from muralist.evaluate.report import read_runs
from muralist.generate.output_dir import Header, OutputDir, Shard, is_intact, merge_shards, start_ledger, write_failures
from muralist.generate.plan import Plan
from muralist.train import watchdog
from muralist.train.dataset import _read_shapes
from tests.fuzz.damage import NONSENSE, damaged, damaged_json, examples, json_bytes, listing, nonsense, refused_or

SETTINGS = {"model": "tiny", "fingerprint": "x", "height": 8}
DONE = {
    "status": "done", "index": 0, "copy": 0, "id": "a", "seed": 5, "prompt": "a car", "negative_prompt": "", "height": 8,
    "width": 8, "file": "a_seed5.png", "gpu": "0", "seconds": 0.5, "settings": "x", "key": "k", "bytes": 3, "sha256": "x",
    "changed": 1,
}  # fmt: skip
FAILED = {name: value for name, value in DONE.items() if name not in ("bytes", "sha256", "changed")} | {
    "status": "failed", "index": 1, "error": "no memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: Any) -> Plan:
    table = tmp_path_factory.mktemp("plan") / "table.csv"
    table.write_text("id,prompt,seed\na,a car,5\nb,a dog,6\n")
    return Plan(open_prompt_table(str(table)), 1, 0, "", (8, 8), "png")


def _use(root: Path, plan: Plan, lines: bytes, header: bytes | None = None) -> None:
    """Everything that commands do with a ledger that somebody gave them; nothing outside its folder may change."""
    folder = OutputDir(root / "output")
    folder.create()
    (root / "bystander.txt").write_text("keep me")
    folder.ledger.write_bytes((header or Header(SETTINGS, 1).line().encode()) + lines)
    (folder.work / "gpu0.jsonl").write_bytes(lines)
    found = refused_or(lambda: Header.read(folder.ledger))
    if isinstance(found, Header):
        refused_or(lambda: folder.check_settings(SETTINGS, found))
        refused_or(lambda: f"{found.batch_size + 1} {found.digest} {found.made_with.items()} {found.one_at_a_time}")
    folder.has_images()
    folder.recover()
    refused_or(lambda: folder.finished(plan))
    refused_or(lambda: write_failures(folder, ["0"]))
    refused_or(lambda: inputs.read_ledger(folder.root))
    folder.clear()
    assert {name.split("/")[0] for name in listing(root)} == {"output", "bystander.txt"}
    assert (root / "bystander.txt").read_text() == "keep me"


@examples(44)
@given(data=st.data())
def test_damaged_ledgers_are_used_or_refused(plan: Plan, data: st.DataObject, tmp_path_factory: Any) -> None:
    lines = b"".join(json_bytes(line) + b"\n" for line in (DONE, FAILED))
    _use(tmp_path_factory.mktemp("ledger"), plan, data.draw(damaged(lines)))


@examples(66)
@given(lines=nonsense([DONE, FAILED, DONE]))
def test_random_ledger_lines_are_used_or_ignored(plan: Plan, lines: Any, tmp_path_factory: Any) -> None:
    lines = lines if isinstance(lines, list) else [lines]
    _use(tmp_path_factory.mktemp("ledger"), plan, b"".join(json_bytes(line) + b"\n" for line in lines))


def test_every_field_of_a_line_may_hold_anything(plan: Plan, tmp_path: Path) -> None:
    lines = [line | {name: value} for line in (DONE, FAILED) for name in line for value in NONSENSE]
    _use(tmp_path, plan, b"".join(json_bytes(line) + b"\n" for line in lines))


@examples(33)
@given(data=damaged_json({"format": "muralist ledger", "version": 1, **asdict(Header(SETTINGS, 2, {"torch": "2"}))}))
def test_damaged_first_lines_are_refused(plan: Plan, data: bytes, tmp_path_factory: Any) -> None:
    _use(tmp_path_factory.mktemp("ledger"), plan, json_bytes(DONE) + b"\n", data.replace(b"\n", b" ") + b"\n")


_facts = st.text(st.characters(codec="utf-8"), max_size=20)


@examples(16)
@given(prompt=_facts, reason=_facts, seed=st.integers(0, 2**62))
def test_ledger_round_trip(plan: Plan, prompt: str, reason: str, seed: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("shard")
    sample = plan.sample(0)._replace(prompt=prompt, seed=seed)
    image = folder / "a.png"
    image.write_bytes(b"abc")
    shard = Shard(folder / "work" / "gpu0.jsonl", "x")
    shard.done(sample, image, "sha", "0", 0.5, None)
    shard.failed(sample, reason, "0", 0.5)
    shard.close()
    start_ledger(folder / "ledger.jsonl", Header(SETTINGS, 1))
    merge_shards(folder / "ledger.jsonl", folder / "work")
    done, failed = read_lines(folder / "ledger.jsonl")
    assert (done["prompt"], done["seed"], done["key"]) == (prompt, seed, sample.key)
    assert failed["error"] == reason and is_intact(image, done)


@examples(16)
@given(data=damaged_json({"host": "other", "pid": 5, "job": "", "heartbeat": 1e12}))
def test_damaged_locks_still_name_an_owner(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "lock"
    path.write_bytes(data)
    with path.open("a+", errors="replace") as file:
        lock = FileLock(file, path, UserError)
        owner = lock._owner()
        assert lock.owner_name() == (f"process {owner['pid']:d} on {owner['host']}" if owner else "another process")


RECORD = {
    "rank": 1, "host": "h", "process": 5, "doing": "waiting", "step": 3, "for_seconds": 2, "left": "", "message": "m",
    "written": "now", "beat": 4, "launch": "//", "born": "1", "space": "s",
}  # fmt: skip


@examples(33)
@given(data=damaged_json(RECORD))
def test_damaged_heartbeats_are_read_or_ignored(data: bytes, tmp_path_factory: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(liveness.time, "sleep", lambda seconds: None)
    path = tmp_path_factory.getbasetemp() / "rank_1.json"
    path.write_bytes(data)
    record = watchdog.read_heartbeat(path)
    assert record is None or {type(value) for value in asdict(record).values()} <= {int, str, type(None)}
    peer = watchdog.Peer(1, path, "//", 1.0)
    peer.found_at_start = None
    peer.update(all_started=True)
    assert peer.exit_report()


def _statistics() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, mu=np.zeros(4), sigma=np.eye(4), features=np.zeros((3, 4), np.float32), number=3)
    return buffer.getvalue()


@examples(44)
@given(data=damaged(_statistics()))
def test_damaged_statistics_are_refused(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "stats.npz"
    path.write_bytes(data)
    assert isinstance(refused_or(lambda: inputs.read_statistics(path)), UserError)


@pytest.mark.parametrize("name", ["mu", "sigma", "features", "number"])
@pytest.mark.parametrize(
    "value", [None, "text", [1, 2], [], 1j, float("nan"), 2**63, [[1.0]], b"x", {"a": 1}, True, -5], ids=repr
)
def test_statistics_of_nonsense_are_taken_or_refused(name: str, value: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(inputs, "FEATURES", 4)
    content = {
        "mu": np.zeros(4),
        "sigma": np.eye(4),
        "features": np.zeros((3, 4), np.float32),
        "number": 3,
        name: value,
    }
    np.savez(tmp_path / "stats.npz", **content)
    found = refused_or(lambda: inputs.read_statistics(tmp_path / "stats.npz"))
    if not isinstance(found, UserError):
        assert found.features is None or found.features.shape[1:] == (4,)
        assert found.count is None or found.count >= 0


def test_statistics_with_a_lying_length_are_refused(tmp_path: Path) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({FEATURES}, {10**12}), }}".ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "stats.npz", "w") as archive:
        for name in ("mu.npy", "sigma.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    assert isinstance(refused_or(lambda: inputs.read_statistics(tmp_path / "stats.npz")), UserError)


REPORT = {
    "fid": 5.0,
    "scores": {"fid": {"value": 5.0, "low": 4.0, "high": 6.0, "note": None}},
    "missing": [{"metric": "kid", "reason": "r"}],
    "images": {"folder": ".", "count": 2, "unreadable": [["a", "b"]]},
    "reference": {"path": "x", "count": 3},
    "settings": {"images": "x", "seed": 5},
    "per_image": {"file": ["a_seed1.png", "b.png"], "prompt": ["p", None], "clip_score": [0.1, None]},
    "failures": [{"id": "a", "seed": 1, "prompt": "p", "error": "e", "gpu": "0"}],
    "speed": {"0": {"images": 2, "images_per_second": 1.5}},
    "warnings": ["w"],
    "versions": {"torch": "2"},
    "seconds": 1.5,
}


@examples(33)
@given(data=damaged_json(REPORT))
def test_damaged_reports_are_read_or_refused(data: bytes, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "report.json").write_bytes(data)
    if isinstance(runs := refused_or(lambda: read_runs([folder])), list):
        for index in range(len(runs[0].files)):
            runs[0].path(index), runs[0].key(index)


@examples(10, 300)
@given(document=nonsense(REPORT))
def test_pages_of_nonsense_are_written_or_refused(document: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "report.json").write_bytes(json_bytes(document))
    refused_or(lambda: write_report([folder], folder / "page"))


@examples(22)
@given(data=st.data())
def test_damaged_cached_shapes_are_ignored(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "shapes.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, shapes=np.ones((2, 2), np.int32), fingerprint="x")
    path.write_bytes(data.draw(damaged(buffer.getvalue())))
    found = _read_shapes(path, 2, "x")
    assert found is None or (found.shape == (2, 2) and np.issubdtype(found.dtype, np.integer))


@pytest.mark.parametrize("raw", [b"", b"[]", b"5", b"[" * 100_000, b'{"status": []}', b"\xff", b'{"status": "done"}'])
def test_invalid_lines_are_ignored(raw: bytes) -> None:
    assert parse_line(raw) is None
