"""A checkpoint is intact or absent: on a full disk, after damage of every kind, among many, in the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from muralist.core.errors import UserError
from muralist.core.run_dir import find_os_error
from muralist.settings import CheckpointSettings
from muralist.train import checkpoint
from muralist.train.checkpoint import CheckpointWriter
from muralist.train.optim import optimizer_tensors
from tests.support.disks import PAGE, leave_free, small_disk

FACTS = {"images": 12, "total_batch": 4, "model": {"label_names": ["Straße"]}, "loss_scale": {}, "epoch_loss": [0.1, 3]}
FILES = ["ema1.safetensors", "manifest.json", "model.safetensors", "state/.metadata", "state/__0_0.distcp"]


def weights(scale: float = 1.0, size: int = 50) -> dict[str, dict[str, Tensor]]:
    values = scale * torch.arange(size, dtype=torch.float32)
    return {"model": {"a": values, "b.c": values.view(5, -1).t()}, "ema1": {"a": values / 2}}


def state(scale: float = 1.0, size: int = 50) -> dict[str, Tensor]:
    return {"a.exp_avg": scale * torch.ones(size), "a.step": torch.tensor(scale)}


def write(folder: Path, step: int, scale: float = 1.0, size: int = 50) -> Path:
    return checkpoint.write(folder, step, weights(scale, size), state(scale, size), FACTS)


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("intact"), 3)


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.read_manifest(path)
    return str(caught.value)


def test_written_tensors_are_read_back(written: Path) -> None:
    assert files_of(written) == FILES
    assert sorted(path.name for path in written.parent.iterdir()) == ["latest", "step_0000003"]
    assert (written.parent / "latest").read_text() == "step_0000003\n"
    manifest = checkpoint.read_manifest(written)
    assert {name: manifest[name] for name in FACTS} == FACTS
    assert manifest["step"] == 3
    assert sorted(manifest["files"]) == [name for name in FILES if name != "manifest.json"]
    for name, tensors in weights().items():
        read = load_file(written / f"{name}.safetensors")
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[key], tensors[key]) for key in tensors)
    filled = state(0.0)
    checkpoint.read_state(written, filled)
    assert all(torch.equal(filled[key], value) for key, value in state().items())


def test_optimizer_state_is_restored_bit_for_bit(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(0.5)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
        for step in range(steps):
            network(torch.full((1, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return network, optimizer

    network, optimizer = trained(3)
    tensors = optimizer_tensors(network, optimizer)
    assert sorted(tensors) == [f"{p}.{k}" for p in ("bias", "weight") for k in ("exp_avg", "exp_avg_sq", "step")]
    path = checkpoint.write(tmp_path, 3, {"model": network.state_dict()}, tensors, FACTS)
    fresh, other = trained(0)
    checkpoint.read_state(path, optimizer_tensors(fresh, other))
    for key, value in optimizer.state_dict()["state"].items():
        for name, tensor in value.items():
            assert torch.equal(other.state_dict()["state"][key][name], tensor), name
    assert float(other.state_dict()["state"][0]["step"]) == 3


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_file_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        path = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {name: oct((path / name).stat().st_mode & 0o777) for name in FILES} == dict.fromkeys(FILES, oct(mode))


# Full disks


def test_full_disk_raises_one_error_and_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    size = 10_000
    tensors = [t for part in (*weights(1, size).values(), state(1, size)) for t in part.values()]
    needed = sum(t.numel() * t.element_size() for t in tensors)
    said: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "checkpoints"
        earlier = write(folder, 1, size=size)
        for pages in (-10, *range(1, 13)):  # from hopeless to just enough: each file in turn does not fit
            leave_free(disk, needed + pages * PAGE)
            try:
                write(folder, 2, scale=2.0, size=size)
                break
            except UserError as error:
                said.append(str(error))
            assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_0000001"]
            assert (folder / "latest").read_text() == "step_0000001\n"
            assert checkpoint.newest_intact(folder) == (earlier, checkpoint.read_manifest(earlier))
            assert torch.equal(load_file(earlier / "ema1.safetensors")["a"], weights(1, size)["ema1"]["a"])
        else:
            pytest.fail("no checkpoint was written although there was room")
        found = checkpoint.newest_intact(folder)
        assert found is not None
        assert found[1]["step"] == 2
    assert f"A checkpoint needs {needed / 1e9:.2f} GB" in said[0]
    assert len(said) >= 3
    assert all("No space left on the disk" in sentence for sentence in said[1:])
    assert "to resume from the last checkpoint" in said[0]
    assert all("run the same command again to resume" in sentence for sentence in said[1:])


def test_disk_that_fills_up_while_weights_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another process takes the space after it was checked: safetensors' own error must end as the same sentence.
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "checkpoints"
        earlier = write(folder, 1)
        leave_free(disk, 8 * PAGE)
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 60))
        with pytest.raises(UserError, match=r"No space left on the disk that holds .*step_0000002"):
            write(folder, 2, size=20_000)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_0000001"]
        assert checkpoint.newest_intact(folder) == (earlier, checkpoint.read_manifest(earlier))


def test_full_disk_is_recognized_behind_errors_of_torch() -> None:
    """torch.save may end with what its own writer noticed later: that a file is shorter than it should be."""
    torn = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert find_os_error(torn).errno == errno.EIO  # as it comes from another process
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise torn
    except RuntimeError as caught:
        assert find_os_error(caught).errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="shape"):
        find_os_error(RuntimeError("shape mismatch"))


def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path) -> None:
    shared = torch.ones(4)
    with pytest.raises(RuntimeError, match="share memory"):
        checkpoint.write(tmp_path, 1, {"model": {"a": shared, "b": shared}}, state(), FACTS)
    assert not list(tmp_path.iterdir())


# Damage


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(place: float) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = min(int(place * len(data)), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "emptied": lambda data: b"",
    "zeroed": lambda data: b"\0" * len(data),
    "longer": lambda data: data + b"\n\0",
    "first bit": flip(0.0),
    "middle bit": flip(0.5),
    "last bit": flip(1.0),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [*DAMAGES, "deleted"])
def test_damaged_file_is_found_and_named(copied: Path, name: str, damage: str) -> None:
    file = copied / name
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
    sentence = refusal(copied)
    assert str(copied) in sentence
    assert name in sentence
    assert ("missing" in sentence or "it has no" in sentence) == (damage == "deleted")


def test_every_flipped_bit_of_a_manifest_is_noticed(copied: Path) -> None:
    file = copied / "manifest.json"
    data = file.read_bytes()
    intact = checkpoint.read_manifest(copied)
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            assert checkpoint.read_manifest(copied) == intact, at  # 1e-05 may become 1E-05
        except UserError as error:
            assert "manifest.json" in str(error) or "is damaged" in str(error)


NOT_MANIFESTS = ["null", "[]", "{}", "3", '"text"', '{"format": 1}', '{"files": []}']


@pytest.mark.parametrize("content", [*NOT_MANIFESTS, '{"format": 1, "files": {}, "step": 1, "images": 1}'])
def test_json_that_is_not_a_manifest_is_refused(copied: Path, content: str) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(content)
    assert f"{copied / 'manifest.json'} is damaged" in refusal(copied)
    (copied / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    assert "has format 2, this version of muralist reads format 1" in refusal(copied)


def test_missing_checkpoint_lists_existing_ones(tmp_path: Path) -> None:
    write(tmp_path, 5)
    sentence = refusal(tmp_path / "step_0000006")
    assert f"The run or checkpoint {tmp_path / 'step_0000006'} was not found." in sentence
    assert sentence.endswith("The checkpoints there are step_0000005.")
    (tmp_path / "step_0000007").write_text("")
    assert "step_0000007 is a file, not a run or a checkpoint." in refusal(tmp_path / "step_0000007")


def test_mistyped_run_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "results" / "first" / "checkpoints", 5)
    sentence = refusal(tmp_path / "results" / "frist")
    assert f"{tmp_path / 'results'} has no entry frist. Did you mean first?" in sentence
    assert sentence.endswith("Give the folder of a run, or of one of its checkpoints.")


# Many checkpoints


def hurt(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(checkpoint.log, "warning", lambda text, *rest: said.append(text % rest))
    return said


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def test_newest_intact_checkpoint_is_found_and_damaged_ones_are_logged(tmp_path: Path, warnings: list[str]) -> None:
    assert checkpoint.newest_intact(tmp_path / "nowhere") is None
    assert checkpoint.newest_intact(tmp_path) is None
    paths = [write(tmp_path, step) for step in (2, 4, 6)]
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None
    assert (found[0], found[1]["step"], warnings) == (paths[2], 6, [])
    hurt(paths[2])
    (paths[1] / "manifest.json").unlink()
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None
    assert found[0] == paths[0]
    assert ["step_0000006" in warnings[0], "step_0000004" in warnings[1]] == [True, True]
    hurt(paths[0])
    with pytest.raises(UserError, match=r"None of the 3 checkpoints .* is intact") as caught:
        checkpoint.newest_intact(tmp_path)
    assert "Nothing was deleted" in caught.value.fix
    assert len(names(tmp_path)) == 3


def test_only_checkpoints_are_listed_and_by_number(tmp_path: Path) -> None:
    for step in (9_999_998, 9_999_999, 10_000_000, 10_000_001):
        write(tmp_path, step)
    for stranger in ("step_12", "step_0000008x", ".step_0000009.1.tmp", "step_", "notes"):
        (tmp_path / stranger).mkdir()
    (tmp_path / "step_0000009").write_text("a file")
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None and found[1]["step"] == 10_000_001
    checkpoint.prune(tmp_path, keep_last=2, keep_every=None)
    assert names(tmp_path) == ["step_10000000", "step_10000001"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, None, [6]), (3, None, [4, 5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6]), (9, None, [1, 2, 3, 4, 5, 6])],
)
def test_old_checkpoints_are_pruned(tmp_path: Path, keep_last: int, keep_every: int | None, kept: list[int]) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    checkpoint.prune(tmp_path, keep_last, keep_every)
    assert names(tmp_path) == [checkpoint.folder_name(step) for step in kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *names(tmp_path)]


def test_run_resumed_from_an_earlier_checkpoint_continues_there(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    write(tmp_path, 3)  # after --resume .../step_0000002
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None
    assert found[1]["step"] == 3
    checkpoint.prune(tmp_path, keep_last=1, keep_every=None)
    assert names(tmp_path) == ["step_0000003", "step_0000004", "step_0000006"]
    write(tmp_path, 6, scale=5.0)
    checkpoint.prune(tmp_path, keep_last=1, keep_every=None)
    assert names(tmp_path) == ["step_0000006"]
    assert torch.equal(load_file(tmp_path / "step_0000006" / "ema1.safetensors")["a"], weights(5.0)["ema1"]["a"])


@pytest.mark.parametrize("content", [b"", b"step_0000099\n", b"\xff\xfe", b"../elsewhere\n"])
def test_wrong_latest_file_is_logged_and_the_newest_checkpoint_used(
    tmp_path: Path, content: bytes, warnings: list[str]
) -> None:
    write(tmp_path, 2)
    newest = write(tmp_path, 4)
    assert checkpoint.newest_intact(tmp_path) and not warnings
    (tmp_path / "latest").write_bytes(content)
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None and found[0] == newest and len(warnings) == 1
    assert warnings[0].startswith(f"{tmp_path / 'latest'} names ") and "Using the newest intact" in warnings[0]


def test_only_leftovers_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 2)
    for leftover in (".step_0000003.99.tmp", ".step_0000001.deleted"):
        (tmp_path / leftover / "state").mkdir(parents=True)
        (tmp_path / leftover / "state" / "x").write_text("x")
    checkpoint.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_0000002"]
    checkpoint.read_manifest(tmp_path / "step_0000002")


def submit(writer: CheckpointWriter, step: int, tensor: torch.Tensor) -> None:
    writer.submit(step, {"model": {"w": tensor}}, {"w.exp_avg": tensor}, {"images": step, "model": {}})


def test_training_continues_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, write = threading.Event(), checkpoint.write

    def slow_write(*arguments: Any) -> Path:
        assert disk.wait(20)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slow_write)
    writer = CheckpointWriter(tmp_path, CheckpointSettings())
    tensor = torch.arange(4.0)
    submit(writer, 1, tensor)  # returns although the disk has not moved
    tensor.fill_(-1.0)  # the next optimizer step
    assert not checkpoint.list_checkpoints(tmp_path)
    disk.set()
    writer.finish()
    (only,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.read_manifest(only)["step"] == 1
    assert torch.equal(load_file(only / "model.safetensors")["w"], torch.arange(4.0))
    loaded = {"w.exp_avg": torch.zeros(4)}
    checkpoint.read_state(only, loaded)
    assert torch.equal(loaded["w.exp_avg"], torch.arange(4.0))


def test_checkpoints_are_written_in_order_and_pruned(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSettings(keep_last=2))
    for step in range(1, 6):
        submit(writer, step, torch.full((2,), float(step)))
    writer.finish()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_0000004", "step_0000005"]


def test_background_error_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> Path:
        raise UserError("No space left.")

    monkeypatch.setattr(checkpoint, "write", full_disk)
    writer = CheckpointWriter(tmp_path, CheckpointSettings())
    submit(writer, 1, torch.zeros(2))
    with pytest.raises(UserError, match="No space left"):
        writer.finish()
    writer.check()
    writer.finish()


def test_checkpoint_is_completed_at_interpreter_exit(tmp_path: Path) -> None:
    """Somebody who presses Ctrl+C again and again leaves every wait; Python itself then waits for the thread."""
    script = f"""
import threading, time, torch
from pathlib import Path
from muralist.train import checkpoint
complete = checkpoint._complete
checkpoint._complete = lambda *inputs: (time.sleep(1), complete(*inputs))[1]  # the program has ended by then
tensors = {{"w": torch.ones(4)}}
inputs = Path({str(tmp_path)!r}), 7, {{"model": tensors}}, tensors, {{"model": {{}}}}
threading.Thread(target=checkpoint.write, args=inputs).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (only,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.read_manifest(only)["step"] == 7
