"""The output folder: its lock, its ledger, what it already holds, and the image and clip files in it.

    ledger.jsonl          first settings, versions and the batch size, then one line per finished or failed sample;
                          a command that has something to do first notes how many samples it plans in all;
                          with --shards, one line per WebDataset tar file (tar_shards.py)
    .ledger/gpu0.jsonl    while a command runs: the shard of one worker; it goes to the end of ledger.jsonl at the end

Lines are only ever appended, one or many by one write. A worker that is killed leaves at most one torn line, which is
ignored: its image is generated again. The last line about a sample counts.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from muralist.core.errors import UserError
from muralist.core.images import encode_jpeg, encode_png, encode_webp, exif_metadata
from muralist.core.run_dir import FileLock, atomic_write, disk_write_error, hold_lock, is_disk_full, open_no_follow
from muralist.data import ledger_reader
from muralist.data.image_inputs import IMAGE_COLUMNS
from muralist.data.ledger_reader import (
    DONE,
    FAILED,
    PLANNED,
    TarShard,
    lines_with_offsets,
    read_lines,
    read_lines_at,
    read_tar_shards,
)
from muralist.data.tar_members import TAR
from muralist.generate.plan import Plan, Sample
from muralist.generate.presets import user_value
from muralist.settings.generate import GenerateSettings, scheduler_name

_FORMAT = {"format": "muralist ledger", "version": 1}
PROMPT_TRUNCATED = "prompt_cut"
"""In an image's line: a text encoder did not read its prompt to the end."""
PROMPT_TOKENS = "prompt_tokens"
"""Beside it, by text encoder: its class, the prompt's tokens, and the limit to which they were truncated."""
PSNR = "psnr_to_exact"
"""In an image's line, in fast mode: the PSNR to the same image in exact mode, in dB."""
INDEX = "index.parquet"
"""With --shards: one row per sample."""
INPUTS = "inputs"
"""In a line: the image inputs of the row, as the table writes them."""
INPUT_FILES = "input_files"
"""In an image's line: size, hash and modification time of the files of its inputs, by column."""
_FAILURES = "failed_prompts_gpu"
_OTHER_FOLDER = "choose another --output_dir, or give --overwrite to start anew in this one."
_MODEL_DEFAULTS = ("num_inference_steps", "guidance_scale", "height", "width")  # when these flags are left out
_FRAMES_PER_SECOND = 16  # Wan's own
_NO_FILE = {"bytes": -1, "sha256": "", "changed": 0}


class OutputDir:
    """The folder that holds the images of one table."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ledger = root / ledger_reader.LEDGER
        self.work = root / ledger_reader.WORK_DIR  # exists only while a command runs: shards and heartbeats
        self.progress = self.work / ledger_reader.PROGRESS  # how far each worker is, for the board
        self.exact = root / ".exact"  # fast mode: some images in exact mode; hidden, because they are not rows
        self._tars_seen: dict[str, tuple[tuple[int, int], TarShard | None]] = {}  # size, time; what it matched

    def shard(self, label: str) -> Path:
        """The lines of a worker."""
        return self.work / f"gpu{label}.jsonl"

    def create(self) -> None:
        """Create the folder, or say why it cannot be created."""
        if self.work.is_symlink():  # files in it are removed
            raise UserError(f"{self.work} is a symbolic link, which muralist did not create.", fix="Remove it.")
        with explain_write_errors(self.root):
            self.work.mkdir(parents=True, exist_ok=True)

    def lock(self, shared: bool = False) -> AbstractContextManager[FileLock]:
        """Hold the folder: a second command on it is refused. Ranks of one command hold it `shared`."""
        what, fix = f"{self.root} is being filled by", "Wait for it, stop it, or give another --output_dir."
        return hold_lock(self.root / "lock", lambda owner: UserError(f"{what} {owner}.", fix=fix), shared)

    def recover(self) -> None:
        """Take up what a killed command left: its lines go into the ledger, unfinished files are removed."""
        self._merge()
        # Lines that belong to no ledger say nothing about this command's images.
        for path in (*self.work.glob(".*.tmp"), *self.work.glob("*.beat"), *self.work.glob("*.jsonl")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Merge the workers' lines and remove everything else of this command."""
        self._merge()
        shutil.rmtree(self.work, ignore_errors=True)

    def _merge(self) -> None:
        if self.ledger.is_file():
            merge_shards(self.ledger, self.work)
        for path in self.root.glob(".*.tmp"):  # of workers that are gone
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file the old ledger names, and the ledger last: if interrupted, this can be repeated."""
        ledgers = [*self.work.glob("*.jsonl"), self.ledger]
        shutil.rmtree(self.exact, ignore_errors=True)
        for path in ledgers:
            for line in read_lines(path):
                # A name from a foreign ledger may leave the folder, or be no file name.
                with suppress(OSError, ValueError):
                    (self.root / Path(line["file"]).name).unlink()
        tars = [self.root / shard.name for shard in read_tar_shards(self.root)]
        index = [self.root / INDEX] if tars else []
        for path in (*tars, *index, *self.root.glob(f"{_FAILURES}*.txt"), *ledgers):
            path.unlink(missing_ok=True)

    def has_images(self) -> bool:
        """Return whether a ledger, or a worker's lines that are not in it yet, name an image."""
        files = (self.ledger, *self.work.glob("*.jsonl"))
        return any(line["status"] == DONE for path in files for line in read_lines(path))

    def check_settings(self, settings: dict[str, Any], header: Header) -> None:
        """Refuse to mix images made with different settings."""
        names = sorted(settings.keys() | header.settings.keys())
        changes = [
            f"{name} {header.settings.get(name, 'default')!s:.60} -> {settings.get(name, 'default')!s:.60}"
            for name in names
            if settings.get(name) != header.settings.get(name)
        ]
        if changes:
            before = {name: header.settings.get(name) for name in _MODEL_DEFAULTS}
            flags = [f"--{name} {value}" for name, value in before.items() if value != settings.get(name)]
            again = f"Continue with {' '.join(flags)}" if len(flags) == len(changes) else "Run the command as it was"
            raise UserError(
                f"{self.root} holds images made with other settings.",
                f"Changed: {'; '.join(changes)}.",
                f"{again}, or {_OTHER_FOLDER}",
            )

    def check_unclaimed(self, plan: Plan) -> None:
        """Refuse images that are in no ledger, where they have the names of those to be made."""
        taken = {entry.name for entry in os.scandir(self.root) if entry.name.endswith(f".{plan.extension}")}
        samples = plan.samples(np.arange(len(plan))) if taken else iter(())
        tars = (path.name for path in self.root.glob(f"[0-9]*{TAR}") if plan.samples_per_tar)
        if file := next((sample.file for sample in samples if sample.file in taken), next(tars, None)):
            raise UserError(
                f"{self.root} holds {file}, but no ledger that says how it was made.",
                "It may not belong to this command.",
                "Choose another --output_dir, or move these images away.",
            )

    def finished(self, plan: Plan) -> np.ndarray:
        """Return which samples have an intact image: bool, by sample index."""
        done = np.zeros(len(plan), dtype=bool)
        in_tar = np.zeros(len(plan), dtype=bool)
        for shard in self.intact_tar_shards().values() if plan.samples_per_tar else ():
            in_tar[shard.first : shard.last + 1] = True
        for sample, line in self.last_lines(plan):
            if line["status"] == DONE:  # a row that failed may have been corrected
                self._check_input_files(sample, line)
                self._check_row(sample, line)
                index = sample.sample_index
                done[index] = in_tar[index] or is_intact(self.root / sample.file, line)
        return done

    def last_lines(self, plan: Plan) -> Iterator[tuple[Sample, dict[str, Any]]]:
        """Yield the samples that the ledger knows, in order, each with the last line about it."""
        # The offset of the last line about each sample: the lines themselves would fill the memory.
        last = np.full(len(plan), -1, dtype=np.int64)
        for offset, line in lines_with_offsets(self.ledger):
            if 0 <= line["index"] < len(plan.table) and 0 <= line["copy"] < plan.copies:
                last[line["index"] * plan.copies + line["copy"]] = offset
        known = np.flatnonzero(last >= 0)
        lines = read_lines_at(self.ledger, last[known].tolist()) if len(known) else ()
        yield from zip(plan.samples(known), lines, strict=True)

    def intact_tar_shards(self) -> dict[str, TarShard]:
        """Return the tar files that are what a line of the ledger says, by name."""
        known: dict[str, list[TarShard]] = {}
        for shard in read_tar_shards(self.root):
            known.setdefault(shard.name, []).append(shard)
        found = {name: self._matching_shard(name, shards[::-1]) for name, shards in known.items()}
        return {name: shard for name, shard in found.items() if shard}

    def _matching_shard(self, name: str, shards: list[TarShard]) -> TarShard | None:
        """Return the first of some descriptions that a tar file matches; a copied file is hashed once."""
        try:
            status = (self.root / name).stat()
        except OSError:
            return None
        version = (status.st_size, status.st_mtime_ns)
        seen, match = self._tars_seen.get(name, (None, None))
        if seen != version or match not in shards:
            match = next((shard for shard in shards if is_intact(self.root / name, shard._asdict())), None)
            self._tars_seen[name] = (version, match)
        return match

    def recover_tar_shards(self, plan: Plan) -> list[TarShard]:
        """Remove images that an intact tar file holds, and damaged tar files; returns the lost tar files."""
        intact = self.intact_tar_shards()
        loose = {entry.name for entry in os.scandir(self.root) if entry.name.endswith(f".{plan.extension}")}
        for shard in intact.values() if loose else ():
            for sample in plan.samples(np.arange(shard.first, min(shard.last + 1, len(plan)))):
                if sample.file in loose:  # a command was killed while it removed them
                    (self.root / sample.file).unlink(missing_ok=True)
        lost = {shard.name: shard for shard in read_tar_shards(self.root) if shard.name not in intact}
        for name in lost:
            (self.root / name).unlink(missing_ok=True)
        return list(lost.values())

    def _check_input_files(self, sample: Sample, line: dict[str, Any]) -> None:
        """Refuse an image whose inputs are not the files any more from which it was made."""
        files = line.get(INPUT_FILES)
        if sample.inputs is None or line.get(INPUTS) != sample.inputs.cells or not isinstance(files, dict):
            return  # another row, which `_check_row` refuses
        for column, record in files.items():
            if column not in IMAGE_COLUMNS:
                continue
            path = sample.inputs.path(column)
            if not isinstance(record, dict) or not is_intact(path, _NO_FILE | record):
                state = "changed since" if path.exists() else "is missing, and"
                raise UserError(
                    f"The {column} of row {sample.row + 1}, {path}, {state} {sample.file} was made from it.",
                    "Every image of a folder belongs to the row and the files that its ledger records.",
                    f"Restore the file, or {_OTHER_FOLDER}",
                )

    def _check_row(self, sample: Sample, line: dict[str, Any]) -> None:
        if line["key"] == sample.key:
            return
        now = sample._asdict() | {INPUTS: sample.inputs.cells if sample.inputs else None}
        names = ("id", "seed", "prompt", "negative_prompt", "height", "width", INPUTS)
        changes = [
            f"{name} {line.get(name)!r:.80} -> {now[name]!r:.80}" for name in names if line.get(name) != now[name]
        ]
        if str(line.get("prompt")).startswith("#") and not sample.prompt.startswith("#"):
            changes.append(r"lines of .txt tables that begin with # are comments unless they begin with \#")
        raise UserError(
            f"Row {sample.row + 1} of the table is not the one from which {self.root} was made.",
            f"Changed: {'; '.join(changes)}.",
            f"Restore the row, or {_OTHER_FOLDER}",
        )


def write_failures(output: OutputDir, labels: list[str]) -> int:
    """Write one file per worker with the prompts that failed on it, empty when none did; returns how many failed."""
    failed: dict[tuple[int, int], dict[str, Any]] = {}
    for line in read_lines(output.ledger):
        sample = line["index"], line["copy"]
        failed.pop(sample, None)
        if line["status"] == FAILED:
            failed[sample] = line
    # Files of workers that this command does not use may list failures that were corrected since.
    earlier = [path.stem.removeprefix(_FAILURES) for path in output.root.glob(f"{_FAILURES}*.txt")]
    by_label: dict[str, list[str]] = {label: [] for label in (*labels, *earlier)}
    for line in failed.values():
        cells = (line["id"], line["seed"], line["prompt"], line["error"])
        text = "\t".join(" ".join(str(cell).split()) for cell in cells)
        by_label.setdefault(line["gpu"], []).append(text + "\n")
    for label, lines in by_label.items():
        atomic_write(output.root / f"{_FAILURES}{label}.txt", "".join(lines).encode(errors="replace"))
    return len(failed)


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file, or the folder of a full disk."""
    try:
        yield
    except OSError as error:
        path = folder if is_disk_full(error) else Path(error.filename or folder)
        raise disk_write_error(error, path) from None


@dataclass(frozen=True, config={"strict": True})
class Header:
    """The first line of a ledger: what all images of the folder have in common."""

    settings: dict[str, Any]  # everything that shapes an image, the model's fingerprint included
    batch_size: PositiveInt  # images generated at once, on which the last bits of an image depend
    made_with: dict[str, Any] = field(default_factory=dict)  # versions and device, on which the last bits depend too
    one_at_a_time: bool = False  # the model cannot batch, whatever was asked for

    @property
    def digest(self) -> str:
        """Short hash of the settings, in every line."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]

    def line(self) -> str:
        """Format the line."""
        return encode_line({**_FORMAT, **asdict(self)}).decode()

    @classmethod
    def parse(cls, line: str) -> Header:
        """Parse the line; ValueError where it is not a header."""
        content = json.loads(line)
        if not isinstance(content, dict) or {name: content.pop(name, None) for name in _FORMAT} != _FORMAT:
            raise ValueError("not the first line of a ledger")
        header = cls(**content)
        if isinstance(scheduler := header.settings.get("scheduler"), str):  # older ledgers have it as it was typed
            header.settings["scheduler"] = scheduler_name(scheduler)
        return header

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """Read the header of a ledger; None where there is no ledger."""
        try:
            with path.open(encoding="utf-8") as file:
                return cls.parse(file.readline())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            raise UserError(
                f"{path} is not a ledger that this muralist can read.",
                "Its first line is damaged, or another version wrote it.",
                "Choose another --output_dir, or give --overwrite to start anew in this one.",
            ) from None


def keep_folder_settings(settings: GenerateSettings) -> GenerateSettings:
    """Let settings that the user left out default to those of the folder's images, so that the same command resumes.

    The model's defaults may change: they depend on the versions of muralist and diffusers.
    """
    output = OutputDir(Path(settings.output_dir).absolute())
    header = Header.read(output.ledger) if output.ledger.is_file() and not settings.overwrite else None
    if header is None or not output.has_images():
        return settings
    kept = {name: header.settings[name] for name in _MODEL_DEFAULTS if name in header.settings}
    kept = {name: value for name, value in kept.items() if user_value(settings, name) is None}
    changed = settings.model_copy(update=kept)
    changed.model_fields_set.difference_update(kept)  # still defaults
    changed._from_folder = frozenset(kept)
    return changed


class Shard:
    """One worker's lines of the current command; `digest` is that of the settings."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest
        try:
            self.path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise self._deleted() from None  # a new folder here would have no lock
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        os.write(self._file, b"\n")  # ends a line that a killed worker may have left torn

    def done(
        self, sample: Sample, file: Path, sha256: str, gpu: str, seconds: float, extra: dict[str, Any] | None = None
    ) -> None:
        """Append an image."""
        self.append(done_line(sample, file, sha256, gpu, seconds, self.digest, extra or {}))

    def failed(self, sample: Sample, reason: str, gpu: str, seconds: float) -> None:
        """Append a sample that failed by itself."""
        self.append(failed_line(sample, reason, gpu, seconds, self.digest))

    def append(self, lines: bytes) -> None:
        """Append lines by one write; a full disk may take only the first ones."""
        if os.write(self._file, lines) < len(lines):  # the rest would not fit either
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def check_not_deleted(self) -> None:
        """Raise an error if the file was deleted: without its line, an image would be refused by the next command."""
        try:
            exists = os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            exists = False
        if not exists:
            raise self._deleted()

    def _deleted(self) -> OSError:
        return OSError(errno.ENOENT, "it was deleted while images were being generated", str(self.path.parent.parent))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def done_line(
    sample: Sample, file: Path, sha256: str, gpu: str, seconds: float, digest: str, extra: dict[str, Any]
) -> bytes:
    """Encode the line of an image; `extra` fields are those that only some images have, such as another batch size."""
    status = file.stat()
    facts: dict[str, Any] = {"bytes": status.st_size, "sha256": sha256, "changed": status.st_mtime_ns}
    return _sample_line(DONE, sample, gpu, seconds, digest, facts | extra)


def failed_line(sample: Sample, reason: str, gpu: str, seconds: float, digest: str) -> bytes:
    """Encode the line of a sample that failed by itself."""
    return _sample_line(FAILED, sample, gpu, seconds, digest, {"error": reason})


def _sample_line(status: str, sample: Sample, gpu: str, seconds: float, digest: str, facts: dict[str, Any]) -> bytes:
    line = {
        "status": status,
        "index": sample.row,
        "copy": sample.copy,
        "id": sample.id,
        "seed": sample.seed,
        "prompt": sample.prompt,
        "negative_prompt": sample.negative_prompt,
        "height": sample.height,
        "width": sample.width,
        **({INPUTS: sample.inputs.cells} if sample.inputs else {}),
        "file": sample.file,
        "gpu": gpu,
        "seconds": round(seconds, 4),
        "settings": digest,
        "key": sample.key,
        **facts,
    }
    return encode_line(line)


def encode_line(content: dict[str, Any]) -> bytes:
    """Encode a line of a ledger."""
    try:
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return (json.dumps(content) + "\n").encode()


def start_ledger(path: Path, header: Header) -> None:
    """Write a new ledger: the batch size is on disk before the first image."""
    atomic_write(path, header.line())


def note_plan(path: Path, samples: int) -> None:
    """Append how many samples are planned in all, for the board; a later command may plan more or fewer."""
    append_line(path, {PLANNED: samples})


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append a line to a ledger, by one write, and flush it to disk."""
    with open_no_follow(path, "ab") as ledger:
        ledger.write((b"" if _ends_with_newline(path) else b"\n") + encode_line(content))
        ledger.flush()
        os.fsync(ledger.fileno())


def merge_shards(path: Path, shards: Path) -> None:
    """Move the workers' lines to the end of the ledger; interrupted and repeated, it may write lines twice."""
    files = sorted(shards.glob("*.jsonl"))
    if any(True for file in files for _ in read_lines(file)):
        with open_no_follow(path, "ab") as ledger:
            if not _ends_with_newline(path):  # an interrupted merge
                ledger.write(b"\n")
            for file in files:
                ledger.writelines(encode_line(line) for line in read_lines(file))
            ledger.flush()
            os.fsync(ledger.fileno())
    for file in files:
        file.unlink()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def is_intact(path: Path, line: dict[str, Any]) -> bool:
    """Return whether a file is what its line says: the same size and modification time, or else the same bytes."""
    try:
        status = path.stat()
        if status.st_size != line["bytes"]:
            return False
        if status.st_mtime_ns == line["changed"]:
            return True
        with path.open("rb") as file:  # copied to another disk, for example
            return hashlib.file_digest(file, "sha256").hexdigest() == line["sha256"]
    except OSError:
        return False


def file_extension(settings: GenerateSettings) -> str:
    """The file extension: the image format for one frame, else the clip's format, whose encoder must be installed."""
    if settings.num_frames == 1:
        return settings.image_format
    if settings.video_format == "mp4" and importlib.util.find_spec("av") is None:
        raise UserError(
            "mp4 clips need PyAV, which is not installed.",
            fix="Install it with `pip install 'muralist[video]'`, or give --video_format webp.",
        )
    return settings.video_format


def encode_image(pixels: np.ndarray, sample: Sample, facts: dict[str, Any], settings: GenerateSettings) -> bytes:
    """Encode pixels [H, W, 3] or frames [F, H, W, 3] with prompt, seed, model and settings as metadata."""
    metadata = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": str(sample.seed)}
    if sample.inputs:
        metadata[INPUTS] = json.dumps(sample.inputs.cells)
    metadata |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    if pixels.ndim == 4:
        return _webp(pixels, metadata) if settings.video_format == "webp" else _mp4(pixels, metadata)
    if settings.image_format == "png":
        return encode_png(pixels, metadata)
    quality = settings.resolved_quality
    if settings.image_format == "webp":
        return encode_webp(pixels, metadata, None if quality == "lossless" else quality)
    assert isinstance(quality, int)
    return encode_jpeg(pixels, metadata, quality)


def _webp(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=images[1:],
        duration=round(1000 / _FRAMES_PER_SECOND),
        loop=0,
        lossless=True,
        exif=exif_metadata(metadata),
    )
    return buffer.getvalue()


def _mp4(frames: np.ndarray, metadata: dict[str, str]) -> bytes:
    import av

    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(
            f"A clip of {width} x {height} pixels cannot be an mp4, whose sides are even.",
            fix="Give --video_format webp.",
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
