"""The output folder: what is there, which command holds it, its ledger, and its image and clip files."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.images import read_metadata
from muralist.data import ledger_reader
from muralist.generate.output_dir import (
    Header,
    OutputDir,
    Shard,
    encode_image,
    explain_write_errors,
    file_extension,
    is_intact,
    merge_shards,
    start_ledger,
    write_failures,
)
from muralist.generate.plan import Sample
from muralist.settings import GenerateSettings
from tests.support.disks import small_disk
from tests.support.worker_pools import ThreadedRun

PROMPTS = ["car", "tree", "house", "car"]


@pytest.fixture
def threaded(tmp_path: Path) -> ThreadedRun:
    """A folder with four images."""
    threaded = ThreadedRun(tmp_path, PROMPTS)
    assert threaded.run(["0"]) == (4, 0)
    return threaded


def missing(threaded: ThreadedRun) -> list[int]:
    return np.flatnonzero(~threaded.output.finished(threaded.plan)).tolist()


def rewrite(tmp_path: Path, prompts: list[str]) -> ThreadedRun:
    """The same folder with another table."""
    kept = (tmp_path / "images" / "ledger.jsonl").read_bytes()
    threaded = ThreadedRun(tmp_path, prompts)
    threaded.output.ledger.write_bytes(kept)
    return threaded


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_truncate, _corrupt, Path.unlink], ids=["truncated", "corrupted", "gone"])
def test_a_damaged_image_is_generated_again(threaded: ThreadedRun, harm: Callable[[Path], None]) -> None:
    assert missing(threaded) == []
    before = threaded.images()
    harm(threaded.output.root / "000003_seed44.png")
    assert missing(threaded) == [2]
    assert threaded.run(["5"], indices=[2]) == (1, 0)
    assert missing(threaded) == [] and threaded.images() == before
    assert [line["gpu"] for line in threaded.lines().values()] == ["0", "0", "5", "0"]


def test_rows_may_be_appended_but_not_changed(threaded: ThreadedRun, tmp_path: Path) -> None:
    assert missing(rewrite(tmp_path, [*PROMPTS, "tree"])) == [4]
    assert missing(rewrite(tmp_path, PROMPTS[:2])) == []
    with pytest.raises(UserError, match="Row 2 of the table is not the one .* Changed: prompt 'tree' -> 'house'"):
        missing(rewrite(tmp_path, ["car", "house", "house", "car"]))
    with pytest.raises(UserError, match="Row 1 of the table"):
        missing(rewrite(tmp_path, ["house", *PROMPTS]))


def test_a_killed_command_is_recovered(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    for row, label in ((0, "0"), (1, "1")):
        shard = Shard(threaded.output.shard(label), threaded.header.digest)
        path = threaded.output.root / threaded.plan.sample(row).file
        path.write_bytes(b"intact")
        shard.done(threaded.plan.sample(row), path, "0" * 64, label, 1.0, None)
    with threaded.output.shard("1").open("ab") as file:
        file.write(b'{"status": "done", "ind')
    (threaded.output.root / ".000003_seed44.png.77.tmp").write_bytes(b"half")
    (threaded.output.work / "rank3.beat").write_text("working 3\n")
    threaded.output.recover()
    assert missing(threaded) == [2, 3]
    assert sorted(path.name for path in threaded.output.root.iterdir()) == [
        ".ledger", "000001_seed42.png", "000002_seed43.png", "ledger.jsonl",
    ]  # fmt: skip
    assert not list(threaded.output.work.iterdir())


def test_lines_without_a_ledger_are_removed(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, PROMPTS)
    Shard(threaded.output.shard("0"), "old").failed(threaded.plan.sample(0)._replace(prompt="other"), "no", "0", 1.0)
    threaded.output.ledger.unlink()
    threaded.output.recover()
    assert not list(threaded.output.work.iterdir())


def test_overwrite_removes_only_what_the_ledger_names(threaded: ThreadedRun) -> None:
    root = threaded.output.root
    (root / "mine.png").write_bytes(b"mine")
    (root.parent / "outside.png").write_bytes(b"outside")
    shard = Shard(threaded.output.shard("0"), "x")
    for file in ("../outside.png", "..", "", "a/../../outside.png"):
        shard.failed(threaded.plan.sample(0)._replace(file=file), "no", "0", 1.0)
    write_failures(threaded.output, ["0"])
    threaded.output.clear()
    assert sorted(path.name for path in root.iterdir()) == [".ledger", "mine.png"]
    assert (root.parent / "outside.png").read_bytes() == b"outside"


def test_overwrite_removes_a_ledger_that_cannot_be_read(tmp_path: Path) -> None:
    output = OutputDir(tmp_path)
    output.create()
    output.ledger.write_bytes(b"\xff not a ledger\n")
    output.clear()
    assert not output.ledger.exists()


def test_images_without_a_ledger_are_refused(threaded: ThreadedRun) -> None:
    threaded.output.ledger.unlink()
    with pytest.raises(UserError, match="holds 000001_seed42.png, but no ledger that says how it was made"):
        threaded.output.check_unclaimed(threaded.plan)
    for path in threaded.output.root.glob("0*.png"):
        path.rename(path.with_name(f"other-{path.name}"))
    threaded.output.check_unclaimed(threaded.plan)  # images of other names do not matter


def test_changed_settings_are_refused_and_named(threaded: ThreadedRun) -> None:
    with pytest.raises(UserError, match=r"Changed: model tiny -> huge; steps default -> 5\..*--overwrite"):
        threaded.output.check_settings({"model": "huge", "steps": 5}, threaded.header)
    threaded.output.check_settings({"model": "tiny"}, threaded.header)


def test_failures_are_listed_per_worker_until_they_are_corrected(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path, ["car", "no\tsuch", "house", "nor this"])
    assert threaded.run(["2", "3"]) == (2, 2)
    assert write_failures(threaded.output, ["2", "3"]) == 2
    assert (threaded.output.root / "failed_prompts_gpu2.txt").read_text() == ""
    text = (threaded.output.root / "failed_prompts_gpu3.txt").read_text().splitlines()
    assert [line.split("\t")[:3] for line in text] == [["000002", "43", "no such"], ["000004", "45", "nor this"]]
    shard = Shard(threaded.output.shard("0"), "x")
    path = threaded.output.root / "000002_seed43.png"
    path.write_bytes(b"corrected")
    shard.done(threaded.plan.sample(1), path, "0" * 64, "0", 1.0, None)
    merge_shards(threaded.output.ledger, threaded.output.work)
    assert write_failures(threaded.output, ["0"]) == 1
    # A file of a worker that is not used now.
    assert (threaded.output.root / "failed_prompts_gpu3.txt").read_text() == text[1] + "\n"
    assert (threaded.output.root / "failed_prompts_gpu0.txt").read_text() == ""


def _hold(root: Path, events: tuple) -> None:
    with OutputDir(root).lock():
        events[0].set()
        events[1].wait(20)


def test_a_second_command_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    context = multiprocessing.get_context("fork")
    events = (context.Event(), context.Event())
    output = OutputDir(tmp_path)
    output.create()
    other = context.Process(target=_hold, args=(tmp_path, events))
    other.start()
    assert events[0].wait(20)
    owner = json.loads((tmp_path / "lock").read_text())
    assert (owner["pid"], owner["job"]) == (other.pid, "7") and time.time() - owner["heartbeat"] < 60
    with pytest.raises(UserError, match=f"is being filled by process {other.pid} on "), output.lock():
        pass
    assert (tmp_path / "lock").exists()
    other.kill()
    other.join()
    with output.lock():
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["file", "file/images"])
def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*(File exists|Not a directory)\."):
        OutputDir(tmp_path / name).create()


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        OutputDir(disk).create()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with (
            pytest.raises(UserError, match=r"Cannot write .*lock: Read-only file system\."),
            explain_write_errors(disk),
            OutputDir(disk).lock(),
        ):
            pass
        with pytest.raises(UserError, match=r"Cannot write .*Read-only file system\."):
            OutputDir(disk / "images").create()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    threaded = ThreadedRun(tmp_path / "bilder 画像 [x] 🎨", ["car"])
    assert threaded.run(["0"]) == (1, 0)
    assert missing(threaded) == []


def test_a_command_whose_folder_was_deleted_does_not_remove_the_next_lock(tmp_path: Path) -> None:
    output = OutputDir(tmp_path / "images")
    output.create()
    with output.lock() as first:
        shutil.rmtree(output.root)
        output.create()
        with output.lock() as second:
            assert second.is_current() and not first.is_current()
    output.create()
    with output.lock() as first:
        shutil.rmtree(output.root)
        output.create()
        (output.root / "lock").write_text("of another command")
    assert (output.root / "lock").read_text() == "of another command"


HEADER = Header({"model": "tiny", "negative_prompt": "schön", "steps": 4}, 8, {"torch": "2.13"})
any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too


def sample(row: int, prompt: str = "a car") -> Sample:
    return Sample(row, row, 0, f"{row + 1:06d}", 42 + row, prompt, "", 16, 16, f"{row + 1:06d}_seed{42 + row}.png")


def test_the_header_is_read_back_with_a_digest_of_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start_ledger(path, HEADER)
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
    start_ledger(path, HEADER)
    for row, prompt in enumerate(prompts):
        shard = Shard(shards / f"gpu{row % 2}.jsonl", HEADER.digest)
        shard.failed(sample(row, prompt), prompt, "0", 0.1)
        shard.close()
        if row < len(cuts):
            torn = json.dumps({"status": "done", "index": 99, "prompt": prompt * 20}).encode()[: cuts[row]]
            with (shards / f"gpu{row % 2}.jsonl").open("ab") as file:
                file.write(torn)
    merge_shards(path, shards)
    merge_shards(path, shards)
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
    start_ledger(path, HEADER)
    shard = Shard(tmp_path / ".ledger" / "gpu0.jsonl", HEADER.digest)
    for row in range(3):
        shard.failed(sample(row), "no", "0", 0.1)
    shard.close()
    kept = (tmp_path / ".ledger" / "gpu0.jsonl").read_bytes()
    merge_shards(path, tmp_path / ".ledger")
    complete = path.read_bytes()
    path.write_bytes(complete[:-50])  # the last line is torn, and the shard is still there
    (tmp_path / ".ledger" / "gpu0.jsonl").write_bytes(kept)
    merge_shards(path, tmp_path / ".ledger")
    assert [line["index"] for line in ledger_reader.read_lines(path)] == [0, 1, 0, 1, 2]


def test_incomplete_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start_ledger(path, HEADER)
    with path.open("ab") as file:
        file.write(b'{"status": "done"}\n{"status": "done", "index": 0}\n[]\n3\n"x"\n' + b"[" * 100_000 + b"\n")
    assert list(ledger_reader.read_lines(path)) == []


def test_a_file_is_intact_by_size_and_time_or_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"image!!")
    line = {"bytes": 7, "changed": path.stat().st_mtime_ns, "sha256": hashlib.sha256(b"image!!").hexdigest()}
    assert is_intact(path, line)
    os.utime(path, ns=(1, 1))
    assert is_intact(path, line)  # copied elsewhere
    path.write_bytes(b"ima\0e!!")
    assert not is_intact(path, line)
    path.write_bytes(b"imag")
    assert not is_intact(path, line)
    path.unlink()
    assert not is_intact(path, line)


@pytest.mark.parametrize("written", ["EulerDiscrete", "eulerdiscrete", "EulerDiscreteScheduler"])
def test_a_scheduler_name_is_normalized(written: str) -> None:
    """Older ledgers have it as it was typed."""
    asked = GenerateSettings(prompts_csv="p.csv", output_dir="o", model_path="m", scheduler="eulerDiscrete")
    before = Header.parse(Header({"scheduler": written}, 1).line())
    assert before.settings == {"scheduler": asked.scheduler}
    assert before.digest == Header({"scheduler": asked.scheduler}, 1).digest
    assert asked.scheduler != GenerateSettings(**(asked.model_dump() | {"scheduler": "DDIM"})).scheduler


SAMPLE = Sample(0, 0, 0, "000001", 42, "ein schönes Auto\n🎨", "blurry", 16, 24, "000001_seed42.png")
FACTS = {"model": "tiny", "settings": {"steps": 4}, "software": "muralist"}


def asked(**more: Any) -> GenerateSettings:
    return GenerateSettings(prompts_csv="p.csv", output_dir="o", model_path="m", **more)


def clip(frames: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (frames, 16, 24, 3), dtype=np.uint8)


def test_an_image_keeps_its_pixels_and_its_metadata() -> None:
    pixels = clip(1)[0]
    data = encode_image(pixels, SAMPLE, FACTS, asked())
    assert data == encode_image(pixels, SAMPLE, FACTS, asked(video_format="webp"))
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(image), pixels)
        assert image.text["prompt"] == SAMPLE.prompt and image.text["negative_prompt"] == "blurry"
        assert image.text["seed"] == "42" and json.loads(image.text["settings"]) == {"steps": 4}


def test_a_webp_clip_is_lossless() -> None:
    frames = clip(5)
    data = encode_image(frames, SAMPLE, FACTS, asked(video_format="webp"))
    assert data == encode_image(frames, SAMPLE, FACTS, asked(video_format="webp"))
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 5
        metadata = json.loads(image.getexif()[0x010E])
        for number in range(5):
            image.seek(number)
            assert np.array_equal(np.asarray(image.convert("RGB")), frames[number])
    assert metadata["prompt"] == SAMPLE.prompt and metadata["model"] == "tiny"


def test_an_mp4_clip_has_its_frames_and_metadata() -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    frames = np.repeat(np.linspace(0, 255, 5, dtype=np.uint8), 16 * 24 * 3).reshape(5, 16, 24, 3)
    data = encode_image(frames, SAMPLE, FACTS, asked())
    assert data == encode_image(frames, SAMPLE, FACTS, asked())
    with av.open(io.BytesIO(data)) as container:
        assert json.loads(container.metadata["comment"])["prompt"] == SAMPLE.prompt
        read = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(read).astype(int) - frames).max() < 8


def test_file_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_extension(asked()) == "png" and file_extension(asked(image_format="jpg")) == "jpg"
    assert file_extension(asked(num_frames=5, video_format="webp")) == "webp"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="mp4 clips need PyAV.*--video_format webp"):
        file_extension(asked(num_frames=5))


@pytest.mark.parametrize(("image_format", "quality"), [("jpg", 95), ("jpg", 20), ("webp", 95), ("webp", "lossless")])
def test_jpeg_and_webp_keep_prompt_and_settings(image_format: str, quality: int | str) -> None:
    rows, columns = np.mgrid[0:16, 0:24]
    pixels = np.stack((rows * 12, columns * 9, 255 - rows * 9), -1).astype(np.uint8)
    settings = asked(image_format=image_format, image_quality=quality)
    data = encode_image(pixels, SAMPLE, FACTS, settings)
    assert data == encode_image(pixels, SAMPLE, FACTS, settings)
    if quality == 95:
        assert data == encode_image(pixels, SAMPLE, FACTS, asked(image_format=image_format))  # the default
    else:
        assert data != encode_image(pixels, SAMPLE, FACTS, asked(image_format=image_format))
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == {"jpg": "JPEG", "webp": "WEBP"}[image_format]
        metadata = read_metadata(image)
        difference = np.abs(np.asarray(image.convert("RGB")).astype(int) - pixels).max()
    assert difference == 0 if quality == "lossless" else difference < (24 if quality == 95 else 80)
    assert metadata["prompt"] == SAMPLE.prompt and metadata["seed"] == "42"
    assert json.loads(metadata["settings"]) == {"steps": 4}


def test_a_prompt_too_long_for_the_metadata_of_a_jpeg_is_shortened_there() -> None:
    sample = SAMPLE._replace(prompt="漢" * 100_000)
    with Image.open(io.BytesIO(encode_image(clip(1)[0], sample, FACTS, asked(image_format="jpg")))) as image:
        metadata = read_metadata(image)
    assert metadata["prompt"].startswith("漢" * 1000) and metadata["seed"] == "42"
