"""The output folder: its lock, its settings, what it already holds, and the image and clip files in it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from muralist.core.errors import UserError
from muralist.core.images import encode_png
from muralist.core.run_dir import FileLock, atomic_write, disk_write_error, hold_lock, is_disk_full
from muralist.data import ledger_reader
from muralist.generate import ledger
from muralist.generate.ledger import Header
from muralist.generate.plan import Plan, Sample

_FAILURES = "failed_prompts_gpu"
_OTHER_FOLDER = "choose another --output_dir, or give --overwrite to start anew in this one."


@dataclass(frozen=True)
class OutputDir:
    """The folder that holds the images of one table."""

    root: Path

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.root / ledger_reader.LEDGER

    @property
    def work(self) -> Path:
        """Exists only while a command runs: the workers' lines and heartbeats."""
        return self.root / ledger_reader.WORK_DIR

    def shard(self, label: str) -> Path:
        """A worker's lines."""
        return self.work / f"gpu{label}.jsonl"

    @property
    def progress(self) -> Path:
        """How far each worker of the running command is, for the board."""
        return self.work / ledger_reader.PROGRESS

    @property
    def exact(self) -> Path:
        """In fast mode: some images in exact mode; hidden, because they are not rows of their own."""
        return self.root / ".exact"

    def failures(self, label: str) -> Path:
        """The prompts that failed on a worker."""
        return self.root / f"{_FAILURES}{label}.txt"

    def create(self) -> None:
        """Create the folder, or say why it cannot be created."""
        if self.work.is_symlink():  # files in it are removed
            raise UserError(f"{self.work} is a symbolic link, which muralist did not create.", fix="Remove it.")
        with explain_write_errors(self.root):
            self.work.mkdir(parents=True, exist_ok=True)

    def lock(self, shared: bool = False) -> AbstractContextManager[FileLock]:
        """Hold the folder: a second command on it is refused. Ranks of one command hold it `shared`."""

        def in_use(owner: str) -> UserError:
            return UserError(
                f"{self.root} is being filled by {owner}.", fix="Wait for it, stop it, or give another --output_dir."
            )

        return hold_lock(self.root / "lock", in_use, shared)

    def recover(self) -> None:
        """Take up what a killed command left: its lines go into the ledger, unfinished files are removed."""
        if self.ledger.is_file():
            ledger.merge(self.ledger, self.work)
        # Lines that belong to no ledger say nothing about this command's images.
        self.remove_unfinished()
        for path in (*self.work.glob(".*.tmp"), *self.work.glob("*.beat"), *self.work.glob("*.jsonl")):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file the old ledger names, and the ledger last: if interrupted, this can be repeated."""
        ledgers = [*self.work.glob("*.jsonl"), self.ledger]
        shutil.rmtree(self.exact, ignore_errors=True)
        for path in ledgers:
            for line in ledger_reader.read_lines(path):
                with suppress(
                    OSError, ValueError
                ):  # a name from a foreign ledger may leave the folder, or be no file name
                    (self.root / Path(line["file"]).name).unlink()
        for path in (*self.root.glob(f"{_FAILURES}*.txt"), *ledgers):
            path.unlink(missing_ok=True)

    def has_images(self) -> bool:
        """Return whether a ledger, or a worker's lines that are not in it yet, name an image."""
        files = (self.ledger, *self.work.glob("*.jsonl"))
        return any(line["status"] == ledger_reader.DONE for path in files for line in ledger_reader.read_lines(path))

    def check_settings(self, settings: dict[str, Any], header: Header) -> None:
        """Refuse to mix images made with different settings."""
        names = sorted(settings.keys() | header.settings.keys())
        changes = [
            f"{name} {header.settings.get(name, 'default')!s:.60} -> {settings.get(name, 'default')!s:.60}"
            for name in names
            if settings.get(name) != header.settings.get(name)
        ]
        if changes:
            raise UserError(
                f"{self.root} holds images made with other settings.",
                f"Changed: {'; '.join(changes)}.",
                f"Run the command as it was, or {_OTHER_FOLDER}",
            )

    def check_unclaimed(self, plan: Plan) -> None:
        """Refuse images that are in no ledger, where they have the names of those to be made."""
        taken = {entry.name for entry in os.scandir(self.root) if entry.name.endswith(f".{plan.extension}")}
        samples = plan.samples(np.arange(len(plan))) if taken else iter(())
        if file := next((sample.file for sample in samples if sample.file in taken), None):
            raise UserError(
                f"{self.root} holds {file}, but no ledger that says how it was made.",
                "It may not belong to this command.",
                "Choose another --output_dir, or move these images away.",
            )

    def finished(self, plan: Plan) -> np.ndarray:
        """Return which samples have an intact image: bool, by sample index."""
        # The offset of the last line about each sample: the lines themselves would fill the memory.
        last = np.full(len(plan), -1, dtype=np.int64)
        for offset, line in ledger_reader.lines_with_offsets(self.ledger):
            if 0 <= line["index"] < len(plan.table) and 0 <= line["copy"] < plan.copies:
                last[line["index"] * plan.copies + line["copy"]] = offset
        known = np.flatnonzero(last >= 0)
        done = np.zeros(len(plan), dtype=bool)
        lines = ledger_reader.read_lines_at(self.ledger, last[known].tolist())
        for sample, line in zip(plan.samples(known), lines, strict=True):
            if line["status"] == ledger_reader.DONE:  # a row that failed may have been corrected
                self._check_row(sample, line)
                done[sample.sample_index] = ledger.is_intact(self.root / sample.file, line)
        return done

    def _check_row(self, sample: Sample, line: dict[str, Any]) -> None:
        if line["key"] == sample.key:
            return
        now = sample._asdict()
        names = ("id", "seed", "prompt", "negative_prompt", "height", "width")
        changes = [
            f"{name} {line.get(name)!r:.80} -> {now[name]!r:.80}" for name in names if line.get(name) != now[name]
        ]
        raise UserError(
            f"Row {sample.row + 1} of the table is not the one from which {self.root} was made.",
            f"Changed: {'; '.join(changes)}.",
            f"Restore the row, or {_OTHER_FOLDER}",
        )

    def remove_unfinished(self) -> None:
        """Remove the temporary files of workers that are gone."""
        for path in self.root.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Merge the workers' lines and remove everything else of this command."""
        if self.ledger.is_file():
            ledger.merge(self.ledger, self.work)
        shutil.rmtree(self.work, ignore_errors=True)


def write_failures(output: OutputDir, labels: list[str]) -> int:
    """Write one file per worker with the prompts that failed on it, empty when none did; returns how many failed."""
    failed: dict[tuple[int, int], dict[str, Any]] = {}
    for line in ledger_reader.read_lines(output.ledger):
        sample = line["index"], line["copy"]
        failed.pop(sample, None)
        if line["status"] == ledger_reader.FAILED:
            failed[sample] = line
    # Files of workers that this command does not use may list failures that were corrected since.
    earlier = [path.stem.removeprefix(_FAILURES) for path in output.root.glob(f"{_FAILURES}*.txt")]
    by_label: dict[str, list[str]] = {label: [] for label in (*labels, *earlier)}
    for line in failed.values():
        cells = (line["id"], line["seed"], line["prompt"], line["error"])
        text = "\t".join(" ".join(str(cell).split()) for cell in cells)
        by_label.setdefault(line["gpu"], []).append(text + "\n")
    for label, lines in by_label.items():
        atomic_write(output.failures(label), "".join(lines).encode(errors="replace"))
    return len(failed)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file, or the folder of a full disk."""
    try:
        yield
    except OSError as error:
        path = folder if is_disk_full(error) else Path(error.filename or folder)
        raise disk_write_error(error, path) from None


_FRAMES_PER_SECOND = 16  # Wan's own
_EXIF_IMAGE_DESCRIPTION = 0x010E


def file_extension(frames: int, video_format: str) -> str:
    """The file extension: png for one frame, else the clip's format, whose encoder must be installed."""
    if frames == 1:
        return "png"
    if video_format == "mp4" and importlib.util.find_spec("av") is None:
        raise UserError(
            "mp4 clips need PyAV, which is not installed.",
            fix="Install it with `pip install 'muralist[video]'`, or give --video_format webp.",
        )
    return video_format


def encode_image(pixels: np.ndarray, sample: Sample, facts: dict[str, Any], video_format: str) -> bytes:
    """Encode pixels [H, W, 3] or frames [F, H, W, 3] with prompt, seed, model and settings as metadata."""
    metadata = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": str(sample.seed)}
    metadata |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    if pixels.ndim == 3:
        return encode_png(pixels, metadata)
    return _webp(pixels, metadata) if video_format == "webp" else _mp4(pixels, metadata)


def _webp(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    exif = Image.Exif()
    exif[_EXIF_IMAGE_DESCRIPTION] = json.dumps(metadata)
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / _FRAMES_PER_SECOND),
        loop=0,
        lossless=True,
        exif=exif.tobytes(),
    )
    return buffer.getvalue()


def _mp4(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(
            f"A clip of {height} x {width} cannot be an mp4, whose sides are even.", fix="Give --video_format webp."
        )
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(metadata)
        stream: Any = container.add_stream("libx264", rate=_FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # the bytes depend on the number of threads
        stream.options = {"crf": "12"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
