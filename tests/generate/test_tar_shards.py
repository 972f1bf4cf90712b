"""`--shards`: WebDataset tar files with the same bytes whatever the workers, interruptions and repairs."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import webdataset
from fastapi.testclient import TestClient
from PIL import Image
from pyarrow import parquet

from muralist.board.app import create
from muralist.cli import main
from muralist.data.decode import decode_pixels, read_image_file
from muralist.data.ledger_reader import DONE, ImageFinder, read_lines, read_tar_shards
from muralist.data.sources import open_source
from muralist.evaluate.inputs import read_ledger
from muralist.generate import command, tar_shards
from tests.support.disks import leave_free, small_disk
from tests.support.evaluating import small_clip
from tests.support.generating import generate_arguments, write_table
from tests.support.pipelines import build_pipeline
from tests.support.runs import finish, fork, start, train
from tests.support.worker_pools import ModelThreadPool

Capture = pytest.CaptureFixture[str]
ROWS, PER_TAR = 10, 4


class Killed(BaseException):
    """Ends the command as a kill does: nothing catches it."""


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline("sd", tmp_path_factory.mktemp("pipelines"))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)
    for name in ("", "muralist"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.fixture(scope="session")
def expected(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a command that was not disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    finish(fork("muralist", "generate", *arguments(folder, sd)))
    return digests(folder / "images")


def arguments(folder: Path, model: Path, *more: object, rows: int = ROWS) -> list[str]:
    folder.mkdir(exist_ok=True)
    table = write_table(folder, rows)
    return generate_arguments(table, model, folder / "images", "--shards", PER_TAR, *more, steps=2)


def generate(folder: Path, model: Path, *more: object, rows: int = ROWS, expect: int = 0) -> Path:
    assert main(["generate", *arguments(folder, model, *more, rows=rows)]) == expect
    return folder / "images"


def digests(images: Path) -> dict[str, str]:
    """The SHA-256 of every file but the ledger and the lists of failures."""
    kept = [path for path in images.iterdir() if path.name != "ledger.jsonl" and not path.name.startswith("failed")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def generated(images: Path) -> int:
    """How many images were ever generated, those made again included."""
    return sum(line["status"] == DONE for line in read_lines(images / "ledger.jsonl"))


def test_samples_are_read_by_webdataset_and_equal_plain_images(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    images = generate(tmp_path, sd, "--gpu_ids", 0, 1, 2)
    assert sorted(expected) == ["00000.tar", "00001.tar", "00002.tar", "index.parquet"]
    assert digests(images) == expected
    plain = tmp_path / "plain"
    assert main(["generate", *generate_arguments(tmp_path / "prompts.csv", sd, plain, steps=2)]) == 0
    urls = [str(images / f"0000{number}.tar") for number in range(3)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{row + 1:06d}_seed{42 + row}" for row in range(ROWS)]
    for row, sample in enumerate(samples):
        facts = json.loads(sample["json"])
        assert sample["txt"].decode() == facts["prompt"] == f"a red cube on table {row}"
        assert (facts["index"], facts["copy"], facts["seed"], facts["width"]) == (row, 0, 42 + row, 32)
        assert sample["png"] == (plain / facts["file"]).read_bytes()
    with tarfile.open(urls[0]) as archive:
        assert {(member.mtime, member.uid, member.gid, member.mode) for member in archive} == {(0, 0, 0, 0o644)}


def test_the_index_gives_the_place_of_every_image(threads: None, sd: Path, tmp_path: Path) -> None:
    images = generate(tmp_path, sd)
    rows = parquet.read_table(images / "index.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(ROWS)) and {row["status"] for row in rows} == {"done"}
    for row in rows:
        with (images / row["tar"]).open("rb") as file:
            file.seek(row["offset"])
            data = file.read(row["bytes"])
        assert hashlib.sha256(data).hexdigest() == row["sha256"]
        assert Image.open(io.BytesIO(data)).size == (row["width"], row["height"])
    finder = ImageFinder(images)
    for line in read_lines(images / "ledger.jsonl"):
        path = finder.path(line)
        assert path is not None and path.parent.suffix == ".tar"
        assert hashlib.sha256(read_image_file(path)).hexdigest() == line["sha256"]


def test_ids_with_dots_and_several_images_per_prompt(threads: None, sd: Path, tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,id\ncar,a.b\nbus,a%2Eb\nbike,a_b\n")
    images = tmp_path / "images"
    more = ("--shards", 4, "--images_per_prompt", 2)
    assert main(["generate", *generate_arguments(table, sd, images, *more, steps=2)]) == 0
    samples = list(webdataset.WebDataset([str(images / "00000.tar"), str(images / "00001.tar")], shardshuffle=False))
    found = [(json.loads(sample["json"])["id"], sample["txt"].decode()) for sample in samples]
    assert found == [("a.b", "car")] * 2 + [("a%2Eb", "bus")] * 2 + [("a_b", "bike")] * 2
    assert len({sample["__key__"] for sample in samples}) == 6


@pytest.mark.parametrize("moment", ["before the line", "before the rename", "before images go", "while images go"])
def test_a_kill_while_a_tar_file_is_written_loses_nothing(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    append = tar_shards.append_line

    def kill(*_: Any, **__: Any) -> None:
        if moment == "before the rename":
            append(*_)
        raise Killed

    with monkeypatch.context() as patch:
        if moment in ("before the line", "before the rename"):
            patch.setattr(tar_shards, "append_line", kill)
        elif moment == "before images go":
            patch.setattr(tar_shards, "fsync", kill)
        else:
            unlink = Path.unlink

            def remove_one(path: Path, missing_ok: bool = False) -> None:
                if path.name == "000003_seed44.png":
                    raise Killed
                unlink(path, missing_ok)

            patch.setattr(Path, "unlink", remove_one)
        with pytest.raises(Killed):
            generate(tmp_path, sd)
    before = generated(tmp_path / "images")
    assert before >= PER_TAR
    images = generate(tmp_path, sd, "--gpu_ids", 0, 1)
    assert digests(images) == expected
    assert generated(images) == ROWS  # nothing was generated twice


def test_rows_appended_later_extend_the_last_tar_file(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = generate(tmp_path, sd, rows=6)
    short = digests(images)
    assert short["00000.tar"] == expected["00000.tar"] and short["00001.tar"] != expected["00001.tar"]
    append = tar_shards.append_line

    def kill(*arguments: Any) -> None:
        append(*arguments)
        raise Killed

    with monkeypatch.context() as patch:  # the longer tar file is known but not in place
        patch.setattr(tar_shards, "append_line", kill)
        with pytest.raises(Killed):
            generate(tmp_path, sd)
    assert digests(images)["00001.tar"] == short["00001.tar"]
    generate(tmp_path, sd)
    assert digests(images) == expected and generated(images) == ROWS
    names = [shard.name for shard in read_tar_shards(images)]
    assert names.count("00000.tar") == 1 and names.count("00001.tar") >= 2
    generate(tmp_path, sd, rows=5)  # fewer rows than the folder holds change nothing
    assert digests(images) == expected


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
def test_a_damaged_tar_file_is_made_again(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str], capsys: Capture, damage: str
) -> None:
    images = generate(tmp_path, sd)
    tar = images / "00001.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    if damage == "removed":
        tar.unlink()
    else:
        tar.write_bytes(data if damage == "flipped" else data[:5000])
    capsys.readouterr()
    generate(tmp_path, sd, "--gpu_ids", 0, 1)
    assert "00001.tar was damaged or removed: 4 of its samples are generated again." in capsys.readouterr().err
    assert digests(images) == expected and generated(images) == ROWS + PER_TAR
    shutil.copytree(images, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "moved")
    shutil.rmtree(images)
    (tmp_path / "moved").rename(images)
    os.utime(tar)  # another time, the same bytes
    generate(tmp_path, sd)
    assert generated(images) == ROWS + PER_TAR


def test_a_failed_row_keeps_its_tar_file_open_until_it_is_corrected(
    threads: None, sd: Path, tmp_path: Path, capsys: Capture
) -> None:
    def write(side: int) -> None:
        sizes = [(32, 32)] * 5 + [(side, 32)] + [(32, 32)] * 4
        rows = "".join(f"car {row},{height},{width}\n" for row, (height, width) in enumerate(sizes))
        (tmp_path / "prompts.csv").write_text("prompt,height,width\n" + rows)

    def run(images: Path, expect: int) -> Path:
        words = generate_arguments(tmp_path / "prompts.csv", sd, images, "--shards", PER_TAR, steps=2)
        assert main(["generate", *words]) == expect
        return images

    write(33)
    images = run(tmp_path / "images", 1)
    assert (
        "1 of the tar files are not written, because rows of them have no image: 00001.tar." in capsys.readouterr().err
    )
    assert sorted(path.name[:6] for path in images.glob("*.png")) == ["000005", "000007", "000008"]
    states = {row["index"]: row["status"] for row in parquet.read_table(images / "index.parquet").to_pylist()}
    assert states[5] == "failed" and list(states.values()).count("done") == ROWS - 1
    write(32)
    run(images, 0)
    assert generated(images) == ROWS and not list(images.glob("*.png"))
    assert digests(images) == digests(run(tmp_path / "undisturbed", 0))


def test_an_image_that_changes_before_it_is_archived_is_made_again(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    read = tar_shards.TarShardWriter._read_image
    changed: list[str] = []

    def change(writer: tar_shards.TarShardWriter, tar: Path, sample: Any) -> bytes:
        if sample.row == 2 and not changed:
            changed.append(sample.file)
            path = writer.output.root / sample.file
            status = path.stat()
            path.write_bytes(bytes(status.st_size))
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))  # size and time do not tell
        return read(writer, tar, sample)

    monkeypatch.setattr(tar_shards.TarShardWriter, "_read_image", change)
    generate(tmp_path, sd, expect=1)
    output = capsys.readouterr().err
    assert "000003_seed44.png was removed or changed after it was generated: 00000.tar waits for it." in output
    assert digests(generate(tmp_path, sd)) == expected


def test_overwrite_and_other_settings(threads: None, sd: Path, tmp_path: Path, capsys: Capture) -> None:
    images = generate(tmp_path, sd)
    words = generate_arguments(tmp_path / "prompts.csv", sd, images, steps=2)
    assert main(["generate", *words]) == 1
    assert "shards 4 -> default" in capsys.readouterr().err
    assert main(["generate", *words, "--overwrite"]) == 0
    assert len(list(images.glob("*.png"))) == ROWS and not [*images.glob("*.tar"), *images.glob("*.parquet")]


def test_a_full_disk_while_a_tar_file_is_written_loses_nothing(
    threads: None, sd: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    seal = tar_shards.TarShardWriter._seal
    with small_disk(tmp_path / "disk") as disk:

        def fill(writer: tar_shards.TarShardWriter, *arguments: Any) -> None:
            leave_free(disk, 4 * 4096)
            seal(writer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(tar_shards.TarShardWriter, "_seal", fill)
            generate(disk, sd, expect=1)
        assert "No space left on the disk that holds" in capsys.readouterr().err
        images = disk / "images"
        before = generated(images)
        assert len(list(images.glob("*.png"))) == before and not list(images.glob("*.tar"))
        (disk / "filler").unlink()
        generate(disk, sd)
        assert digests(images) == expected and generated(images) == ROWS


def plain_images(folder: Path, model: Path, *more: object) -> Path:
    words = generate_arguments(write_table(folder, ROWS), model, folder / "plain", *more, steps=2)
    assert main(["generate", *words]) == 0
    return folder / "plain"


def test_evaluate_reads_tar_files_as_if_their_images_were_files(threads: None, sd: Path, tmp_path: Path) -> None:
    images, plain, clip = generate(tmp_path, sd), plain_images(tmp_path, sd), small_clip(tmp_path / "clip")
    reports = {}
    for folder in (images, plain):
        output = tmp_path / f"report-{folder.name}"
        words = ["--images", folder, "--reference", images, "--clip_path", clip, "--output_dir", output]
        assert main(["evaluate", *map(str, words)]) == 0
        reports[folder.name] = json.loads((output / "report.json").read_text())
        assert "data:image/webp;base64" in (output / "report" / "index.html").read_text()
    assert reports["images"]["scores"] == reports["plain"]["scores"]
    assert reports["images"]["scores"]["clip_score"]["value"] is not None
    for name in ("prompt", "clip_score"):
        assert reports["images"]["per_image"][name] == reports["plain"]["per_image"][name]
    assert reports["images"]["per_image"]["file"][4] == "00001.tar/000005_seed46.png"
    assert reports["images"]["images"]["count"] == ROWS


def test_train_and_show_read_tar_files(
    threads: None, sd: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, plain = generate(tmp_path, sd), plain_images(tmp_path, sd)
    source = open_source(str(images), 32)
    assert len(source) == ROWS
    for row in range(ROWS):
        sample = source.read(row)
        assert sample.caption == f"a red cube on table {row}"
        assert (sample.image == decode_pixels((plain / f"{row + 1:06d}_seed{42 + row}.png").read_bytes())).all()
    train("--data_path", images, "--results_dir", tmp_path / "results", "--max_steps", 1, "--samples_per_gpu", 0)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(images)]) == 0 and f"{ROWS} of {ROWS} images in" in capsys.readouterr().out
    assert main(["show", str(images / "00001.tar" / "000005_seed46.png")]) == 0
    assert "prompt: a red cube on table 4" in capsys.readouterr().out


def test_the_board_shows_images_in_tar_files(threads: None, sd: Path, tmp_path: Path) -> None:
    images = generate(tmp_path, sd)
    board = TestClient(create(tmp_path, cache=tmp_path / "cache"), base_url="http://localhost")
    listed = board.get("/api/images", params={"folder": "images"}).json()["images"]
    assert [line["file"] for line in listed][4:6] == ["00001.tar/000005_seed46.png", "00001.tar/000006_seed47.png"]
    path = f"images/{listed[5]['file']}"
    file = board.get(f"/files/{path}")
    data = read_image_file(images / listed[5]["file"])
    assert file.content == data and file.headers["content-type"] == "image/png"
    assert board.get("/thumb", params={"path": path}).content == data
    assert board.get("/api/facts", params={"path": path}).json()["prompt"] == "a red cube on table 5"
    for missing in (
        "images/00001.tar",
        "images/00001.tar/none.png",
        "images/00009.tar/a.png",
        "images/00001.tar/a.txt",
    ):
        assert board.get(f"/files/{missing}").status_code == 404


def test_fast_mode_and_other_formats_in_tar_files(threads: None, sd: Path, tmp_path: Path) -> None:
    more = ("--image_format", "jpg", "--image_quality", 80, "--preset", "fast")
    images, plain = generate(tmp_path, sd, *more), plain_images(tmp_path, sd, *more)
    samples = list(webdataset.WebDataset([str(images / "00000.tar")], shardshuffle=False))
    assert samples[1]["jpg"] == (plain / "000002_seed43.jpg").read_bytes()
    assert len(list((images / ".exact").glob("*.jpg"))) == 8
    pairs = read_ledger(images).exact_pairs
    assert pairs is not None and len(pairs.fast) == 8 and pairs.psnr == read_ledger(plain).exact_pairs.psnr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--image_quality", 90), "--image_quality 90 has no effect on PNG, which is lossless."),
        (("--image_format", "jpg", "--image_quality", "lossless"), "--image_quality lossless is for WebP"),
        (("--image_format", "jpg", "--num_frames", 5), "--image_format is for images, and --num_frames 5 makes clips."),
    ],
)
def test_a_quality_without_effect_is_refused(
    threads: None, sd: Path, tmp_path: Path, capsys: Capture, flags: tuple[object, ...], sentence: str
) -> None:
    words = generate_arguments(write_table(tmp_path, 2), sd, tmp_path / "images", *flags, steps=2)
    assert main(["generate", *words]) == 1
    assert sentence in capsys.readouterr().err and not (tmp_path / "images").exists()


def test_the_format_belongs_to_the_settings_of_a_folder(
    threads: None, sd: Path, tmp_path: Path, capsys: Capture
) -> None:
    plain = plain_images(tmp_path, sd, "--image_format", "webp")
    assert len(list(plain.glob("*.webp"))) == ROWS
    words = generate_arguments(tmp_path / "prompts.csv", sd, plain, "--image_format", "webp", steps=2)
    assert main(["generate", *words]) == 0 and "Nothing to do" in capsys.readouterr().err
    assert main(["generate", *words, "--image_quality", "lossless"]) == 1
    assert "image_quality 95 -> lossless" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_processes_leave_the_same_tar_files(threads: None, sd: Path, tmp_path: Path) -> None:
    rows, folder = 60, tmp_path / "killed"
    words = ["muralist", "generate", *arguments(folder, sd, rows=rows)]
    process = start("python", "-m", *words, "--gpu_ids", 0, 1, 2)
    while process.poll() is None and not any((folder / "images").glob("*.tar")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    finish(process, expect=None)
    finish(start("torchrun", "--standalone", "--nproc_per_node=2", "-m", *words))
    assert digests(folder / "images") == digests(generate(tmp_path, sd, rows=rows))
