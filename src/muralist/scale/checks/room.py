"""Room for what is planned: memory on the GPUs, space on the disk, leave to write there."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from muralist.runfolder import is_full
from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.scale.memory import Need, need_of
from muralist.settings import GenerateSettings, TrainSettings
from muralist.words import gigabytes

BYTES_PER_PIXEL = 1.6
"""Of a PNG of a natural picture: guide 3's 100 KB at 256 x 256."""
_BYTES_PER_NUMBER = {"bf16": 2, "fp16": 2, "fp32": 4}
_JOBS = frozenset({"train", "generate"})


def look_at_memory(around: Circumstances) -> Finding:
    """Compare what the model and batch need with what the GPUs have."""
    gpus = around.own_gpus
    if around.train:
        need = need_of(around.train, around.ranks, compiled=bool(gpus) and around.train.compile is not False)
        told = _needed(need, around.train)
        if not gpus or not gpus[0].total:
            return skipped(f"no GPU to compare with; {told}")
        return fits_training(need, around.train, min(gpu.free for gpu in gpus), told)
    assert around.generate
    if around.generate.engine == "ray":
        return skipped("Ray knows its GPUs")
    parts = _weights_of_generation(around)
    if not parts:
        return skipped("a JiT model: next to nothing")
    whole, (name, largest) = sum(parts.values()), max(parts.items(), key=lambda item: item[1])
    told = f"weights take {gigabytes(whole)} on each GPU, the largest part ({name}) {gigabytes(largest)}"
    if not gpus or not gpus[0].total:
        return skipped(f"no GPU to compare with; {told}")
    free = min(gpu.free for gpu in gpus)
    if free < largest:
        return failed(f"A GPU has {gigabytes(free)} free, and {told}.")
    if free < whole:
        return warning(
            f"A GPU has {gigabytes(free)} free, and {told}.",
            "Only the part that works can lie on the GPU, which is slower.",
            "--cpu_offload auto does that by itself; a GPU with more free memory would be faster.",
        )
    return ok(f"{told}; {gigabytes(free)} are free", facts={"free": free, "needed": whole})


def fits_training(need: Need, settings: TrainSettings, free: float, told: str) -> Finding:
    """Whether a training fits into so many bytes, and how many images at once."""
    facts = {"free": int(free), "state": int(need.state), "per image": need.per_image}
    if need.state + (need.per_image or 0.0) > free:
        return failed(f"A GPU has {gigabytes(free)} free, and {told}.", facts=facts)
    batch, most = settings.data.batch_size, need.largest_batch(free)
    if most is None:
        return ok(f"{told}; {gigabytes(free)} are free", facts=facts)
    micro = settings.data.micro_batch_size
    wanted = batch if micro == "auto" else min(batch, micro)
    if wanted > most:
        return warning(
            f"About {most} images at once fit into the {gigabytes(free)} that are free, not {wanted}: {told}.",
            "--micro_batch_size auto halves what goes through at once until it fits, with the same result."
            if micro == "auto"
            else "",
            "Nothing to do; a smaller --batch_size or --use_amp needs less."
            if micro == "auto"
            else f"Give --micro_batch_size {max(1, most)}, or auto.",
            facts=facts,
        )
    return ok(f"{told}; {gigabytes(free)} are free, enough for about {most} images at once", facts=facts)


def _needed(need: Need, settings: TrainSettings) -> str:
    told = f"weights, gradients, optimizer and averages take {gigabytes(need.state)} per GPU"
    if need.per_image is not None:
        told += f", each image about {need.per_image / 1e6:.0f} MB more ({settings.data.batch_size} a GPU)"
    return told


def _weights_of_generation(around: Circumstances) -> dict[str, int]:
    from muralist.generate.models import pipeline_parts
    from muralist.models.complete import weight_bytes

    assert around.generate
    if around.model.kind == "jit":
        return {}
    folder, parts = pipeline_parts(around.generate, around.model)
    return weight_bytes(folder, parts, _BYTES_PER_NUMBER[around.generate.dtype])


def look_at_space(around: Circumstances) -> Finding:
    """Compare what the plan will write with what the disk has left."""
    if around.train:
        assert around.run
        return _space_of_training(around.train, around.run)
    assert around.generate
    return _space_of_generation(around.generate, around)


def _space_of_training(settings: TrainSettings, run: Path) -> Finding:
    if not shutil.disk_usage(_existing(run)).total:
        return skipped(f"the file system that holds {run} does not tell")
    one, free = need_of(settings, 1, compiled=False).checkpoint, _free(run)
    # One more than stay: the oldest goes when the newest is whole. Those that are there already take no more room.
    there = len(list((run / "checkpoints").glob("step_*"))) if run.is_dir() else 0
    new = max(1, settings.checkpoint.keep_last + 1 - there)
    told = f"a checkpoint takes {gigabytes(one)}, {settings.checkpoint.keep_last} stay; {gigabytes(free)} are free"
    if free < one or not free:
        return failed(
            f"No space left on the disk that holds {run}: {told}.",
            "Training would end at its first checkpoint.",
            "Free some space, or give a --results_dir on another disk.",
        )
    if free < new * one:
        return warning(
            f"The disk that holds {run} is short: {told}.",
            "Once it is full, training ends at the last checkpoint that fits.",
            f"Free {gigabytes(new * one - free)}, or give a smaller --keep_last.",
        )
    return ok(told, facts={"free": free, "checkpoint": one})


def _space_of_generation(settings: GenerateSettings, around: Circumstances) -> Finding:
    height, width = around.model.settled["height"], around.model.settled["width"]
    return space_for_pictures(
        Path(settings.output_dir), around.pictures, height * width * around.model.settled["num_frames"]
    )


def space_for_pictures(folder: Path, pictures: int, pixels: int) -> Finding:
    """Whether so many more pictures fit onto the disk of a folder."""
    if not shutil.disk_usage(_existing(folder)).total:
        return skipped(f"the file system that holds {folder} does not tell")
    there = sum(1 for _ in folder.glob("*_seed*.*")) if folder.is_dir() else 0
    one, free = BYTES_PER_PIXEL * pixels, _free(folder)
    needed = max(0, pictures - there) * one
    told = f"{max(0, pictures - there):,} pictures take about {gigabytes(needed)}; {gigabytes(free)} are free"
    if needed and free < one:
        return failed(f"No space left on the disk that holds {folder}: {told}.")
    if free < needed:
        return warning(f"The disk that holds {folder} is short: {told}.", "Once it is full the command ends.")
    return ok(told, facts={"free": free, "needed": needed})


def look_whether_writable(around: Circumstances) -> Finding:
    """Make a file where the job's own files will go, and take it away."""
    if around.train:
        assert around.run
        folder, flag = around.run, "--results_dir"
    else:
        assert around.generate
        folder, flag = Path(around.generate.output_dir), "--output_dir"
    place = _existing(folder)
    if not place.is_dir():
        return failed(f"Cannot write {folder}: {place} is a file.", remedy=f"Give another {flag}.")
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".muralist-doctor-"):
            pass
    except OSError as error:
        if is_full(error):
            return skipped("the disk is full, as the check of its space says")
        allow = f"`chmod u+rwx {place}` if it is yours (`ls -ld {place}` says)"
        if error.errno == errno.EROFS:  # no permission of a folder changes that
            allow = "Have the disk mounted for writing"
        return failed(f"Cannot write {folder}: {error.strerror}.", remedy=f"{allow}, or give another {flag}.")
    return ok(f"files can be made in {place}")


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.expanduser().absolute()
    return path if path.exists() else _existing(path.parent)


def _free(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


CHECKS = [
    Check(
        name="memory",
        what="Whether the model, its optimizer and the batch fit into the free memory of every GPU.",
        trouble="Guide 2: out of memory; guide 3: error during sampling on GPU X (out of memory); guide 4: CUDA "
        "out of memory",
        why="The run would end with an out-of-memory error.",
        remedy="Training: a smaller --batch_size (4 -> 2), --use_amp, --strategy fsdp2 over more GPUs, or a smaller model. "
        "Generation: --dtype bf16, --cpu_offload true, or GPUs that are free.",
        look=look_at_memory,
        jobs=_JOBS,
        quick=True,
        on_every_machine=True,
        certain=False,  # it is an estimate
    ),
    Check(
        name="disk space",
        what="Whether the checkpoints that stay, or the pictures that are missing, fit onto the disk.",
        trouble="Guide 3: `OSError: cannot write to directory...` (disk space)",
        why="Writing would fail in the middle; what was written before stays whole.",
        remedy="Free some space, or write to another disk.",
        look=look_at_space,
        jobs=_JOBS,
        quick=True,
    ),
    Check(
        name="write permission",
        what="Whether a file can be made where the results go.",
        trouble="Guide 3: `OSError: cannot write to directory...` (permissions, `chmod 755 results/`)",
        why="Nothing of the run could be kept.",
        remedy="`chmod u+rwx` the folder if it is yours, or write elsewhere.",
        look=look_whether_writable,
        jobs=_JOBS,
        quick=True,
        on_every_machine=True,
    ),
]
