"""The GPUs: can they be seen, are they free, do they answer, does torch fit the driver, do they know bf16."""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from collections.abc import Sequence

from muralist.machine import choose_devices, refuse_missing
from muralist.scale.checks.check import Check, Circumstances, Finding, failed, ok, skipped, warning
from muralist.scale.gpus import Gpu
from muralist.words import gigabytes, listed

_TAKEN = 0.1  # a GPU of which others hold more than this part is not free
_BF16 = 8.0  # compute capability
_HIDDEN = ("", "-1", "NoDevFiles")  # the last is what SLURM sets for jobs without GPUs
ANSWER_WITHIN = 60.0  # seconds; the first CUDA context of a machine may take a while
_QUESTION = (
    "import sys, torch\n"
    "for device in sys.argv[1:]:\n"
    "    a = torch.ones(256, 256, device=device)\n"
    "    assert float((a @ a).sum()) == 256.0**3\n"
    "    print(device, flush=True)\n"
)


def look_for_gpus(around: Circumstances) -> Finding:
    """List the GPUs that may be used, and who holds their memory."""
    visible = around.environment.get("CUDA_VISIBLE_DEVICES")
    ids = around.generate.gpu_ids if around.generate else []
    if around.generate and around.generate.engine == "ray":
        return skipped("Ray knows its GPUs")
    gpus = around.gpus
    if gpus.trouble:
        return failed(gpus.trouble[0].upper() + gpus.trouble[1:] + ".")
    if not gpus.listed:
        choose_devices(ids)  # names a GPU twice
        return skipped("no GPU: this machine has none that nvidia-smi knows, CPU processes stand in")
    entries = [entry.strip() for entry in (visible or "").split(",")]
    if visible is not None and entries[0] in _HIDDEN:
        return skipped(f"the GPUs are hidden (CUDA_VISIBLE_DEVICES is {visible!r}), CPU processes stand in")
    if any(entry.startswith("MIG-") for entry in entries):
        return skipped(f"parts of GPUs (CUDA_VISIBLE_DEVICES is {visible!r}), of which nvidia-smi tells too little")
    seen = gpus.visible(around.environment)
    said = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
    if not seen:
        return failed(
            f"None of {len(gpus.listed)} GPUs can be seen{said}.",
            remedy="Unset CUDA_VISIBLE_DEVICES, or name GPUs in it.",
        )
    refuse_missing(ids, len(seen), visible)
    if visible and len(seen) < len([entry for entry in visible.split(",") if entry.strip()]):
        return failed(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, but only {len(seen)} of its entries are GPUs of this machine.",
            "CUDA ignores everything from the first wrong entry on.",
            f"Name GPUs from 0 to {len(gpus.listed) - 1}.",
        )
    chosen = around.own_gpus if around.starting else gpus.visible(around.environment, ids)
    facts = {f"GPU {gpu.index}, bytes free": gpu.free for gpu in chosen}
    busy = [gpu for gpu in chosen if gpu.total and gpu.used > _TAKEN * gpu.total]
    if busy:
        free = [str(number) for number, gpu in enumerate(seen) if gpu not in busy]
        return warning(
            f"{listed([_holders(gpu) for gpu in busy])}.",
            remedy=f"Use the free ones ({' '.join(free)}): --gpu_ids, or CUDA_VISIBLE_DEVICES." if free else "",
            facts=facts,
        )
    kinds = sorted({gpu.name for gpu in chosen})
    return ok(
        f"{len(chosen)} free: {listed([_short(gpu) for gpu in chosen], 8)} ({', '.join(kinds)}){said}", facts=facts
    )


def _short(gpu: Gpu) -> str:
    return f"{gpu.index} with {gigabytes(gpu.free)}"


def _holders(gpu: Gpu) -> str:
    who = listed([f"process {one.number} ({one.name}, {gigabytes(one.bytes)})" for one in gpu.processes], 3)
    return f"GPU {gpu.index} is in use: {gigabytes(gpu.used)} of {gigabytes(gpu.total)} held by {who or 'others'}"


def look_at_driver(around: Circumstances) -> Finding:
    """Compare the CUDA that torch was built for with what the driver can run."""
    import torch

    if not around.gpus.listed:
        return skipped(f"no GPU; torch {torch.__version__}")
    return match_versions(torch.__version__, torch.version.cuda, around.gpus.cuda, around.gpus.listed[0].driver)


def match_versions(torch_version: str, built_for: str | None, driver_cuda: str, driver: str) -> Finding:
    """A driver runs programs of its own CUDA's major version and of older ones."""
    if built_for is None:
        return failed(f"torch {torch_version} is built without CUDA, and this machine has GPUs.")
    if driver_cuda and int(built_for.partition(".")[0]) > int(driver_cuda.partition(".")[0]):
        return failed(
            f"torch {torch_version} needs CUDA {built_for}; the driver {driver} can run CUDA {driver_cuda} at most."
        )
    return ok(f"torch {torch_version} for CUDA {built_for}, driver {driver}, which runs CUDA {driver_cuda or '?'}")


def look_for_bf16(around: Circumstances) -> Finding:
    """See whether every GPU computes in bf16."""
    gpus = around.own_gpus
    if not gpus:
        return skipped("no GPU; CPUs compute in bf16, slowly")
    without = [gpu for gpu in gpus if 0 < gpu.capability < _BF16]
    if not without:
        return ok(f"compute capability {min(gpu.capability for gpu in gpus):g}")
    names = listed([f"{gpu.index} ({gpu.name}, {gpu.capability:g})" for gpu in without])
    if around.generate and around.generate.dtype == "bf16":
        return warning(f"GPU {names} has no bf16.", remedy="Give --dtype fp16.")
    if around.train and around.train.use_amp and around.train.distributed.strategy not in ("auto", "ddp"):
        return failed(
            f"GPU {names} has no bf16, and --strategy {around.train.distributed.strategy} scales no loss for fp16.",
            remedy="Use --strategy ddp, or leave --use_amp out.",
        )
    return warning(
        f"GPU {names} has no bf16.", remedy="--use_amp trains in fp16 with loss scaling there; nothing to do."
    )


def look_whether_gpus_answer(around: Circumstances) -> Finding:
    """Have every GPU multiply two matrices."""
    import torch

    ids = around.generate.gpu_ids if around.generate else []
    devices = [f"cuda:{number}" for number in ids or range(torch.cuda.device_count())]
    if not around.gpus.listed or not devices:
        return skipped("no GPU")
    return ask_devices(devices, ANSWER_WITHIN)


def ask_devices(devices: Sequence[str], patience: float) -> Finding:
    """In a process of its own, since one that hangs in a driver cannot be taken back."""
    command = [sys.executable, "-c", _QUESTION, *devices]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout and child.stderr
    answered: list[str] = []
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while len(answered) < len(devices) and selector.select(max(0.0, began + patience - time.monotonic())):
            line = child.stdout.readline()
            if not line:
                break
            answered.append(line.strip())
    silent = [device for device in devices if device not in answered]
    if not silent:
        child.communicate()
        return ok(f"{listed(devices, 8)} computed in {time.monotonic() - began:.1f} s")
    ended = child.poll() is not None or time.monotonic() - began < patience
    if not ended:
        child.kill()
    said = child.communicate()[1].strip().splitlines()
    how = f"could not compute: {said[-1] if said else 'no word'}" if ended else f"did not answer within {patience:g} s"
    return failed(f"{silent[0]} {how}.")


CHECKS = [
    Check(
        name="GPUs",
        what="The GPUs that may be used (`--gpu_ids`, `CUDA_VISIBLE_DEVICES`): their free memory, the programs on them.",
        trouble="Guide 4: GPUs without work (wrong ids); GPUs 0 and 1 are busy; CUDA out of memory",
        why="A GPU that another program fills runs out of memory; one that is not there does no work.",
        remedy="Choose free GPUs with --gpu_ids or CUDA_VISIBLE_DEVICES, or end the programs that hold them.",
        look=look_for_gpus,
        quick=True,
        on_every_machine=True,
        certain=False,  # the driver's program may be slow, or there without a driver; CUDA itself decides
    ),
    Check(
        name="driver",
        what="Whether torch was built for a CUDA that this driver can run.",
        trouble="Guide 4: a process that hangs (a GPU that does not answer)",
        why="torch would not see the GPUs, and everything would run on the CPU or not at all.",
        remedy="Install the torch built for this driver's CUDA (pytorch.org lists them), or a newer driver.",
        look=look_at_driver,
        on_every_machine=True,
    ),
    Check(
        name="GPUs answer",
        what="Whether every GPU multiplies two matrices, in a process that can be given up.",
        trouble="Guide 4: a process that hangs (a GPU that does not answer)",
        why="A GPU that fell off the bus, or whose driver hangs, makes every program wait for ever.",
        remedy="`nvidia-smi -q` and the kernel's log say more; reset the GPU, restart the machine, or leave this GPU out.",
        look=look_whether_gpus_answer,
        on_every_machine=True,
    ),
    Check(
        name="bf16",
        what="Whether the GPUs compute in bf16.",
        trouble="Guide 1: BF16/FP16 mixed precision; guide 4: --dtype bf16",
        why="Without it bf16 is emulated, many times slower, or not there.",
        remedy="Use fp16, or fp32.",
        look=look_for_bf16,
        on_every_machine=True,
    ),
]
