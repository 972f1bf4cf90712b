"""Checks of GPUs, memory and disk: visible and free GPUs, driver, a test computation, bf16, space, permissions."""

from __future__ import annotations

import errno
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muralist.core.formatting import format_bytes, format_list
from muralist.core.hardware import check_gpu_ids, select_devices
from muralist.core.run_dir import is_disk_full
from muralist.data.ledger_reader import read_tar_shards
from muralist.models.integrity import weight_bytes
from muralist.settings import GenerateSettings, TrainSettings
from muralist.tools.doctor.check import CheckContext, Finding, check, failed, ok, skipped, warning
from muralist.train.preflight import MemoryEstimate, estimate_memory

COMPUTE_TIMEOUT = 60.0  # seconds; the first CUDA context of a machine may take a while
_SMI_TIMEOUT = 30.0  # seconds; a driver without persistence mode takes several
_KILL_TIMEOUT = 1.0  # seconds
_SMI_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,compute_cap"
_IN_USE = 0.1  # fraction of its memory above which a GPU counts as in use
_BF16_CAPABILITY = 8.0
_BYTES_PER_PIXEL = 1.6  # of a PNG of a photograph: 100 KB at 256 x 256
_LOSSY_BYTES_PER_PIXEL = {"jpg": 1.0, "webp": 0.6}  # rough, at the default quality; lower ones take less
_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_HIDDEN = ("", "-1", "NoDevFiles")  # SLURM sets the last one for jobs without GPUs
_TEST_PROGRAM = (
    "import sys, torch\n"
    "for device in sys.argv[1:]:\n"
    "    a = torch.ones(256, 256, device=device)\n"
    "    assert float((a @ a).sum()) == 256.0**3\n"
    "    print(device, flush=True)\n"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str
    total: int
    used: int
    driver: str
    capability: float
    processes: tuple[str, ...] = ()  # processes that hold its memory, described

    @property
    def free(self) -> int:
        """Free memory in bytes."""
        return self.total - self.used


@dataclass(frozen=True)
class Gpus:
    """Output of nvidia-smi."""

    listed: tuple[Gpu, ...] = ()
    cuda: str = ""  # newest CUDA version that the driver supports
    error: str = ""  # why nvidia-smi gave no answer, on a machine that has it

    def visible(self, environment: Mapping[str, str], ids: Sequence[int] = ()) -> list[Gpu]:
        """GPUs in the order in which CUDA numbers them for a process; `ids` selects some of them."""
        visible = list(self.listed)
        if (setting := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            visible = []
            for entry in map(str.strip, setting.split(",")):
                matches = [gpu for gpu in self.listed if entry == str(gpu.index) or gpu.uuid.startswith(entry)]
                if not entry or not matches:
                    break  # CUDA ignores the first invalid entry and everything after it
                visible.append(matches[0])
        return [visible[index] for index in ids if index < len(visible)] if ids else visible


def query_nvidia_smi(timeout: float = _SMI_TIMEOUT) -> Gpus:
    """List GPUs and their processes without a CUDA context; a machine without nvidia-smi has no NVIDIA driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus()
    plain = "--format=csv,noheader,nounits"
    queries = [
        [f"--query-gpu={_SMI_FIELDS}", plain],
        ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", plain],
        [],  # only the table that it prints by default names the CUDA version
    ]
    try:
        answers = _run([[program, *query] for query in queries], timeout)
    except subprocess.TimeoutExpired:
        return Gpus(error=f"nvidia-smi did not answer within {timeout:g} s")
    for answer in answers:
        if answer.returncode:
            reason = ((answer.stderr or answer.stdout).strip().splitlines() or ["no message"])[0]
            return Gpus(error=f"nvidia-smi ended with status {answer.returncode}: {reason}")
    lines = [answer.stdout.splitlines() for answer in answers]
    gpu_rows, process_rows = ([line.split(", ") for line in rows if line.count(", ") >= 3] for rows in lines[:2])
    users: defaultdict[str, list[str]] = defaultdict(list)
    for uuid, pid, *command, memory in process_rows:
        users[uuid].append(f"process {pid} ({', '.join(command)}, {format_bytes(_parse_number(memory, 2**20))})")
    listed = []
    for index, uuid, name, *memories, driver, capability in gpu_rows:
        total, used = (int(_parse_number(memory, 2**20)) for memory in memories)
        listed.append(Gpu(int(index), uuid, name, total, used, driver, _parse_number(capability), tuple(users[uuid])))
    version = re.search(r"CUDA Version:\s*(\d+\.\d+)", answers[2].stdout)
    return Gpus(tuple(sorted(listed, key=lambda gpu: gpu.index)), version[1] if version else "")


def _run(commands: Sequence[Sequence[str]], timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """Run commands concurrently, as a starting job waits for them; kill them and raise TimeoutExpired if one hangs."""
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    deadline = time.monotonic() + timeout
    try:
        outputs = [process.communicate(timeout=max(0.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process blocked inside the driver cannot be killed
                process.wait(_KILL_TIMEOUT)
    ended = zip(processes, outputs, strict=True)
    return [subprocess.CompletedProcess(process.args, process.returncode, *output) for process, output in ended]


def _parse_number(cell: str, unit: int = 1) -> float:
    """Parse a number; 0 for the `[N/A]` of MIG instances."""
    try:
        return float(cell) * unit
    except ValueError:
        return 0.0


@check("GPUs", at_start=True, per_machine=True, certain=False)
def check_gpus(context: CheckContext) -> Finding:
    """List the GPUs that the job may use (`--gpu_ids`, `CUDA_VISIBLE_DEVICES`), their free memory and the programs that
    use them.

    Symptom: GPUs without work (wrong ids); GPUs 0 and 1 are busy; CUDA out of memory
    Otherwise: A GPU that another program fills runs out of memory; a GPU that is not visible does no work.
    Fix: Choose free GPUs with --gpu_ids or CUDA_VISIBLE_DEVICES, or end the programs that use them.
    """
    setting = context.environment.get("CUDA_VISIBLE_DEVICES")
    gpus, ids = context.gpus, context.gpu_ids
    if context.uses_ray:
        return skipped("Ray provides the GPUs")
    if gpus.error:
        return failed(f"{gpus.error}.")
    if not gpus.listed:
        select_devices(ids)  # raises if an id is given twice
        return skipped("no GPU: nvidia-smi lists none; CPU processes are used instead")
    entries = [entry.strip() for entry in (setting or "").split(",")]
    if setting is not None and entries[0] in _HIDDEN:
        return skipped(f"the GPUs are hidden (CUDA_VISIBLE_DEVICES is {setting!r}); CPU processes are used instead")
    if any(entry.startswith("MIG-") for entry in entries):
        return skipped(f"MIG instances (CUDA_VISIBLE_DEVICES is {setting!r}), whose memory nvidia-smi does not list")
    visible = gpus.visible(context.environment)
    if len(visible) < len([entry for entry in entries if entry]):
        return failed(
            f"CUDA_VISIBLE_DEVICES is {setting!r}, but only {len(visible)} of its entries are GPUs of this machine.",
            "CUDA ignores the first invalid entry and everything after it.",
            f"Name GPUs from 0 to {len(gpus.listed) - 1}.",
        )
    check_gpu_ids(ids, len(visible), setting)
    chosen = context.own_gpus if context.starting else gpus.visible(context.environment, ids)
    facts = {f"GPU {gpu.index}, bytes free": gpu.free for gpu in chosen}
    in_use = [gpu for gpu in chosen if gpu.total and gpu.used > _IN_USE * gpu.total]
    if in_use:
        free = [str(index) for index, gpu in enumerate(visible) if gpu not in in_use]
        fix = f"Use the free ones ({' '.join(free)}): --gpu_ids, or CUDA_VISIBLE_DEVICES." if free else ""
        return warning(f"{format_list([_usage(gpu) for gpu in in_use])}.", fix=fix, facts=facts)
    memory = format_list([f"{gpu.index} with {format_bytes(gpu.free)}" for gpu in chosen], 8)
    note = f" (CUDA_VISIBLE_DEVICES is {setting!r})" if setting is not None else ""
    return ok(f"{len(chosen)} free: {memory} ({', '.join(sorted({gpu.name for gpu in chosen}))}){note}", facts=facts)


def _usage(gpu: Gpu) -> str:
    used = f"{format_bytes(gpu.used)} of {format_bytes(gpu.total)}"
    return f"GPU {gpu.index} is in use: {used} held by {format_list(gpu.processes, 3) or 'unknown processes'}"


@check("driver", per_machine=True)
def check_driver(context: CheckContext) -> Finding:
    """Compare the CUDA version that torch was built for with the newest that the driver supports.

    Symptom: a process that hangs (a GPU that does not answer)
    Otherwise: torch would not see the GPUs, and everything would run on the CPU or fail.
    Fix: Install the torch build for the CUDA version of this driver (see pytorch.org), or a newer driver.
    """
    import torch

    if not context.gpus.listed:
        return skipped(f"no GPU; torch {torch.__version__}")
    return compare_versions(torch.__version__, torch.version.cuda, context.gpus.cuda, context.gpus.listed[0].driver)


def compare_versions(torch_version: str, torch_cuda: str | None, driver_cuda: str, driver: str) -> Finding:
    """Judge versions: a driver runs programs of the major version of its own CUDA, and of older ones."""
    if torch_cuda is None:
        return failed(f"torch {torch_version} is built without CUDA, but this machine has GPUs.")
    if driver_cuda and int(torch_cuda.partition(".")[0]) > int(driver_cuda.partition(".")[0]):
        supported = f"driver {driver} supports CUDA {driver_cuda} at most"
        return failed(f"torch {torch_version} needs CUDA {torch_cuda}; {supported}.")
    supported = f"driver {driver}, which supports CUDA {driver_cuda or '?'}"
    return ok(f"torch {torch_version} for CUDA {torch_cuda}, {supported}")


@check("GPUs answer", per_machine=True)
def check_gpus_answer(context: CheckContext) -> Finding:
    """Multiply two matrices on every GPU, in a child process with a timeout.

    Symptom: a process that hangs (a GPU that does not answer)
    Otherwise: A GPU that fell off the bus, or whose driver hangs, blocks every program that uses it.
    Fix: See `nvidia-smi -q` and the kernel log (`dmesg`); reset the GPU, reboot, or leave this GPU out.
    """
    import torch

    devices = [f"cuda:{index}" for index in context.gpu_ids or range(torch.cuda.device_count())]
    if not context.gpus.listed or not devices:
        return skipped("no GPU")
    return compute_on_devices(devices, COMPUTE_TIMEOUT)


def compute_on_devices(devices: Sequence[str], timeout: float) -> Finding:
    """Compute on each device, in a child process because one that hangs inside a driver cannot be interrupted."""
    began = time.monotonic()
    try:
        [child] = _run([[sys.executable, "-c", _TEST_PROGRAM, *devices]], timeout)
        output, reason = child.stdout, f"could not compute: {(child.stderr.strip().splitlines() or ['no message'])[-1]}"
    except subprocess.TimeoutExpired as expired:
        output, reason = (expired.stdout or b"").decode(), f"did not answer within {timeout:g} s"
    if silent := [device for device in devices if device not in output.split()]:
        return failed(f"{silent[0]} {reason}.")
    return ok(f"{format_list(devices, 8)} computed in {time.monotonic() - began:.1f} s")


@check("bf16", per_machine=True)
def check_bf16(context: CheckContext) -> Finding:
    """Check that every GPU supports bf16.

    Symptom: BF16/FP16 mixed precision; --dtype bf16
    Otherwise: Without hardware support bf16 is emulated, many times slower, or unavailable.
    Fix: Use fp16 or fp32.
    """
    gpus = context.own_gpus
    if not gpus:
        return skipped("no GPU; CPUs compute bf16 slowly")
    without = [gpu for gpu in gpus if 0 < gpu.capability < _BF16_CAPABILITY]
    if not without:
        return ok(f"compute capability {min(gpu.capability for gpu in gpus):g}")
    names = format_list([f"{gpu.index} ({gpu.name}, {gpu.capability:g})" for gpu in without])
    fix = "No action needed: --use_amp trains in fp16 with loss scaling there."
    if context.generate and context.generate.dtype == "bf16":
        fix = "Give --dtype fp16."
    elif context.train and context.train.use_amp and context.train.distributed.strategy not in ("auto", "ddp"):
        reason = f"--strategy {context.train.distributed.strategy} has no loss scaling for fp16"
        fix = "Use --strategy ddp, or leave --use_amp out."
        return failed(f"GPU {names} does not support bf16, and {reason}.", fix=fix)
    return warning(f"GPU {names} does not support bf16.", fix=fix)


@check("memory", "train", "generate", at_start=True, per_machine=True, certain=False)
def check_memory(context: CheckContext) -> Finding:
    """Compare the memory that the model, its optimizer and the batch need with the free memory of every GPU.

    Symptom: CUDA out of memory; error during sampling on GPU X (out of memory)
    Otherwise: The run would end with an out-of-memory error.
    Fix: Training: a smaller --batch_size (4 -> 2), --use_amp, --strategy fsdp2 over more GPUs, or a smaller model.
    Generation: --dtype bf16, --cpu_offload true, or GPUs that are free.
    """
    gpus = context.own_gpus
    free = min(gpu.free for gpu in gpus) if gpus and gpus[0].total else None
    if context.train:
        need = estimate_memory(context.train, context.ranks, compiled=bool(gpus) and context.train.compile is not False)
        return compare_training_memory(need, context.train, free)
    assert context.generate
    if context.uses_ray:
        return skipped("Ray provides the GPUs")
    if context.model.folder is None:
        return skipped("a JiT model, which needs little memory")
    weights = weight_bytes(context.model.folder, context.model.components, _DTYPE_BYTES[context.generate.dtype])
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


@check("disk space", "train", "generate", at_start=True)
def check_disk_space(context: CheckContext) -> Finding:
    """Compare the size of the kept checkpoints, or of the images still to generate, with the free disk space.

    Symptom: `OSError: cannot write to directory...` (disk space)
    Otherwise: Writing would fail in the middle; files written before that stay intact.
    Fix: Free some space, or write to another disk.
    """
    folder, flag = context.output
    if context.train:
        size, keep = estimate_memory(context.train, 1, compiled=False).checkpoint, context.train.checkpoint.keep_last
        # One more than are kept: the oldest is deleted once the newest is complete. Existing ones need no more space.
        count = max(1, keep + 1 - len(list(folder.glob("checkpoints/step_*"))))
        need, reduction = f"a checkpoint takes {format_bytes(size)}, {keep} are kept", "give a smaller --keep_last"
        facts = {"checkpoint": size}
    else:
        pixels = math.prod(context.model.resolved[name] for name in ("height", "width", "num_frames"))
        assert context.generate
        settings, in_tars = context.generate, _samples_in_tars(folder)
        size = _bytes_per_pixel(settings) * pixels
        count = max(0, context.images - in_tars - sum(1 for _ in folder.glob("*_seed*.*")))
        if settings.shards and count:  # while a tar file is written, its images are there twice
            count += min(settings.shards, context.images)
        need, reduction = f"{count:,} images take about {format_bytes(count * size)}", "generate fewer images"
        facts = {"needed": count * size}
    usage = shutil.disk_usage(_existing_parent(folder))
    if not usage.total:
        return skipped(f"the file system of {folder} does not report its size")
    message = f"{need}; {format_bytes(usage.free)} free"
    if count and usage.free < max(1, size):  # LoRA checkpoints have an estimated size of 0
        fix = f"Free some space, or give a {flag} on another disk."
        return failed(f"No space left on the disk that holds {folder}: {message}.", fix=fix)
    if usage.free < count * size:
        fix = f"Free {format_bytes(count * size - usage.free)}, or {reduction}."
        return warning(f"The disk that holds {folder} is short of space: {message}.", fix=fix)
    return ok(message, facts={"free": usage.free, **facts})


@check("write permission", "train", "generate", at_start=True, per_machine=True)
def check_writable(context: CheckContext) -> Finding:
    """Create a temporary file where the results will be written.

    Symptom: `OSError: cannot write to directory...` (permissions, `chmod 755 results/`)
    Otherwise: The run could not save its results.
    Fix: `chmod u+rwx` the folder if you own it, or write elsewhere.
    """
    folder, flag = context.output
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


def _bytes_per_pixel(settings: GenerateSettings) -> float:
    """Return an estimate for photographs; clips are estimated as images."""
    is_lossy = settings.num_frames == 1 and isinstance(settings.resolved_quality, int)
    return _LOSSY_BYTES_PER_PIXEL[settings.image_format] if is_lossy else _BYTES_PER_PIXEL


def _samples_in_tars(folder: Path) -> int:
    shards = {shard.name: shard.samples for shard in read_tar_shards(folder)}
    return sum(samples for name, samples in shards.items() if (folder / name).is_file())


def _existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.expanduser().absolute()
    return path if path.exists() else _existing_parent(path.parent)
