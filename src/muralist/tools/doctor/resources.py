"""Resource checks: GPU memory, disk space, write permission."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from muralist.core.formatting import format_bytes
from muralist.core.run_dir import is_disk_full
from muralist.settings import TrainSettings
from muralist.tools.doctor.check import GENERATE, TRAIN, Check, CheckContext, Finding, failed, ok, skipped, warning
from muralist.train.memory import MemoryEstimate, estimate_memory

BYTES_PER_PIXEL = 1.6
"""Size of a PNG of a photograph: 100 KB at 256 x 256."""
_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@Check(
    "memory",
    symptom="CUDA out of memory; error during sampling on GPU X (out of memory)",
    why="The run would end with an out-of-memory error.",
    fix="Training: a smaller --batch_size (4 -> 2), --use_amp, --strategy fsdp2 over more GPUs, or a smaller model. "
    "Generation: --dtype bf16, --cpu_offload true, or GPUs that are free.",
    jobs=TRAIN | GENERATE,
    at_start=True,
    per_machine=True,
    certain=False,  # the need is an estimate
)
def check_memory(context: CheckContext) -> Finding:
    """Compare the memory that the model, its optimizer and the batch need with the free memory of every GPU."""
    gpus = context.own_gpus
    free = min(gpu.free for gpu in gpus) if gpus and gpus[0].total else None
    if context.train:
        need = estimate_memory(context.train, context.ranks, compiled=bool(gpus) and context.train.compile is not False)
        return compare_training_memory(need, context.train, free)
    assert context.generate
    if context.uses_ray:
        return skipped("Ray provides the GPUs")
    weights = _generation_weights(context)
    if not weights:
        return skipped("a JiT model, which needs little memory")
    total, (name, largest) = sum(weights.values()), max(weights.items(), key=lambda item: item[1])
    needed = f"weights take {format_bytes(total)} on each GPU, the largest part ({name}) {format_bytes(largest)}"
    if free is None:
        return skipped(f"no GPU to compare with; {needed}")
    if free < largest:
        return failed(f"A GPU has {format_bytes(free)} free, but {needed}.")
    if free < total:
        return warning(
            f"A GPU has {format_bytes(free)} free, but {needed}.",
            "Only the active part stays on the GPU, which is slower.",
            "No action needed: --cpu_offload auto does this; a GPU with more free memory is faster.",
        )
    return ok(f"{needed}; {format_bytes(free)} free", facts={"free": free, "needed": total})


def compare_training_memory(need: MemoryEstimate, settings: TrainSettings, free: float | None) -> Finding:
    """Judge whether a training fits into `free` bytes (None: no GPU), and how many images fit at once."""
    needed = f"weights, gradients, optimizer and EMA take {format_bytes(need.state)} per GPU"
    if need.per_image is not None:
        needed += f", each image about {need.per_image / 1e6:.0f} MB more ({settings.data.batch_size} per GPU)"
    if free is None:
        return skipped(f"no GPU to compare with; {needed}")
    facts = {"free": int(free), "state": int(need.state), "per image": need.per_image}
    if need.state + (need.per_image or 0.0) > free:
        return failed(f"A GPU has {format_bytes(free)} free, but {needed}.", facts=facts)
    fitting, micro = need.largest_batch(free), settings.data.micro_batch_size
    if fitting is None:
        return ok(f"{needed}; {format_bytes(free)} free", facts=facts)
    wanted = settings.data.batch_size if micro == "auto" else min(settings.data.batch_size, micro)
    if wanted <= fitting:
        return ok(f"{needed}; {format_bytes(free)} free, enough for about {fitting} images at once", facts=facts)
    why, fix = "", f"Give --micro_batch_size {max(1, fitting)}, or auto."
    if micro == "auto":
        why = "--micro_batch_size auto halves the micro-batch until it fits, with the same result."
        fix = "No action needed; a smaller --batch_size or --use_amp needs less."
    message = f"About {fitting} images at once fit into the {format_bytes(free)} that are free, not {wanted}: {needed}."
    return warning(message, why, fix, facts=facts)


def _generation_weights(context: CheckContext) -> dict[str, int]:
    """Bytes of weights by pipeline component; empty for JiT."""
    from muralist.models.integrity import weight_bytes

    assert context.generate
    model = context.model
    if model.folder is None:
        return {}
    return weight_bytes(model.folder, model.components, _DTYPE_BYTES[context.generate.dtype])


@Check(
    "disk space",
    symptom="`OSError: cannot write to directory...` (disk space)",
    why="Writing would fail in the middle; files written before that stay intact.",
    fix="Free some space, or write to another disk.",
    jobs=TRAIN | GENERATE,
    at_start=True,
)
def check_disk_space(context: CheckContext) -> Finding:
    """Compare the size of the kept checkpoints, or of the images still to generate, with the free disk space."""
    if context.train:
        assert context.run
        return compare_checkpoint_space(context.run, context.train)
    assert context.generate
    size = context.model.resolved
    pixels = size["height"] * size["width"] * size["num_frames"]
    return compare_image_space(Path(context.generate.output_dir), context.images, pixels)


def compare_checkpoint_space(run: Path, settings: TrainSettings) -> Finding:
    """Judge whether the checkpoints that a run keeps fit on the disk of its folder."""
    size, keep = estimate_memory(settings, 1, compiled=False).checkpoint, settings.checkpoint.keep_last
    # One more than are kept: the oldest is deleted once the newest is complete. Existing ones need no more space.
    new = max(1, keep + 1 - len(list(run.glob("checkpoints/step_*"))))
    need = f"a checkpoint takes {format_bytes(size)}, {keep} are kept"
    return _compare_space(
        run, size or 1, new, need, "--results_dir", "give a smaller --keep_last", {"checkpoint": size}
    )


def compare_image_space(folder: Path, images: int, pixels: int) -> Finding:
    """Judge whether the images of a generation that are still missing fit on the disk of its output folder."""
    size, missing = BYTES_PER_PIXEL * pixels, max(0, images - sum(1 for _ in folder.glob("*_seed*.*")))
    need = f"{missing:,} images take about {format_bytes(missing * size)}"
    facts = {"needed": missing * size}
    return _compare_space(folder, size, missing, need, "--output_dir", "generate fewer images", facts)


def _compare_space(
    folder: Path, size: float, count: int, need: str, flag: str, reduction: str, facts: Mapping[str, object]
) -> Finding:
    """Judge whether `count` files of `size` bytes fit on the disk of a folder."""
    usage = shutil.disk_usage(_existing_parent(folder))
    if not usage.total:
        return skipped(f"the file system of {folder} does not report its size")
    message = f"{need}; {format_bytes(usage.free)} free"
    if count and usage.free < size:
        fix = f"Free some space, or give a {flag} on another disk."
        return failed(f"No space left on the disk that holds {folder}: {message}.", fix=fix)
    if usage.free < count * size:
        fix = f"Free {format_bytes(count * size - usage.free)}, or {reduction}."
        return warning(f"The disk that holds {folder} is short of space: {message}.", fix=fix)
    return ok(message, facts={"free": usage.free, **facts})


@Check(
    "write permission",
    symptom="`OSError: cannot write to directory...` (permissions, `chmod 755 results/`)",
    why="The run could not save its results.",
    fix="`chmod u+rwx` the folder if you own it, or write elsewhere.",
    jobs=TRAIN | GENERATE,
    at_start=True,
    per_machine=True,
)
def check_writable(context: CheckContext) -> Finding:
    """Create a temporary file where the results will be written."""
    if context.train:
        assert context.run
        folder, flag = context.run, "--results_dir"
    else:
        assert context.generate
        folder, flag = Path(context.generate.output_dir), "--output_dir"
    existing = _existing_parent(folder)
    if not existing.is_dir():
        return failed(f"Cannot write {folder}: {existing} is a file.", fix=f"Give another {flag}.")
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".muralist-doctor-"):
            pass
    except OSError as error:
        if is_disk_full(error):
            return skipped("the disk is full; see the check of disk space")
        fix = f"`chmod u+rwx {existing}` if you own it (`ls -ld {existing}` shows the owner)"
        if error.errno == errno.EROFS:  # chmod does not help
            fix = "Mount the disk for writing"
        return failed(f"Cannot write {folder}: {error.strerror}.", fix=f"{fix}, or give another {flag}.")
    return ok(f"files can be created in {existing}")


def _existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.expanduser().absolute()
    return path if path.exists() else _existing_parent(path.parent)
