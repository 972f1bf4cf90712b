"""Checks of a job: settings, prompts, data and model, and of its processes: port, SLURM, W&B, collectives, clocks."""

from __future__ import annotations

import errno
import importlib.util
import netrc
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.core.hardware import available_cpus, select_devices
from muralist.core.run_dir import RunDir
from muralist.core.slurm import expand_hosts, expand_tasks_per_node
from muralist.data.image_inputs import ImageInputs, load_inputs
from muralist.data.prompts import open_prompts
from muralist.generate.image_inputs import choose_pipeline
from muralist.generate.model_info import settings_identity
from muralist.generate.output_dir import Header, OutputDir
from muralist.models.spec import find_family
from muralist.tools.doctor.check import CheckContext, Finding, check, failed, ok, skipped, warning
from muralist.train import preflight
from muralist.train.schedule import TrainingClock, learning_rate, plan_batch

_STEEP_RATE = 4.0  # factor above the base learning rate from which warm-up matters
_SHORT_WARMUP = 100  # steps
_SUBSET = 100  # rows or images that are read
_DEFAULT_PORT = "29500"  # of torchrun and accelerate
_CONNECT_TIMEOUT = 3.0  # seconds
_SKEW_WARNING, _SKEW_FAILURE = 1.0, 60.0  # seconds
_ONE_PROCESS = "one process; `muralist launch --nproc N doctor ...` (or torchrun, srun) tests several ranks"


@check("settings", "train")
def check_settings(context: CheckContext) -> Finding:
    """Check that the settings are compatible with each other.

    Symptom: a command with a wrong image size, model or batch
    Otherwise: The run would be refused at its start.
    Fix: Correct the setting that is named.
    """
    assert context.train
    preflight.check_settings(context.train)
    return ok("compatible with each other")


@check("run folder", "train")
def check_run_folder(context: CheckContext) -> Finding:
    """Check that the run folder is new, or holds a run with the same settings.

    Symptom: a run that resumes, or refuses to resume
    Otherwise: Two runs in one folder would overwrite each other.
    Fix: Give the settings that the run was started with, or continue in a new run: --resume RUN --run_name NEW.
    """
    from muralist.train.resume import check_same_settings  # imports torch

    assert context.train and context.run
    if not RunDir(context.run).config.exists():
        return ok(f"{context.run} is new")
    check_same_settings(RunDir(context.run), context.train)
    return ok(f"{context.run} holds this run: it will resume")


@check("batch", "train")
def check_batch(context: CheckContext) -> Finding:
    """Divide the total batch among the ranks.

    Symptom: effective batch = batch_size x GPUs x gradient_accumulation_steps
    Otherwise: Ranks with unequal batches would wait for each other.
    Fix: Use a number of processes that divides --global_batch_size.
    """
    assert context.train
    return ok(str(plan_batch(context.train.data, context.train.optim, context.ranks)))


@check("learning rate", "train")
def check_learning_rate(context: CheckContext) -> Finding:
    """Check that a learning rate scaled up with the batch has a warm-up.

    Symptom: loss oscillates after the batch grew
    Otherwise: A learning rate raised at once for a larger batch can make the loss oscillate or diverge.
    Fix: A larger --warmup_steps, a lower --learning_rate, or --gradient_accumulation_steps; below a total batch of 256
    try the original rate first.
    """
    assert context.train
    optim = context.train.optim
    total = plan_batch(context.train.data, optim, context.ranks).total
    rate = learning_rate(optim, TrainingClock(total, total, 1))
    message = f"{rate.peak:.3g} ({rate.reason}) at a total batch of {total}, warm-up {optim.warmup_steps} steps"
    if rate.peak > _STEEP_RATE * (optim.blr or optim.learning_rate) and optim.warmup_steps < _SHORT_WARMUP:
        return warning(f"The learning rate is {message}.")
    return ok(message)


@check("rows over GPUs", "generate")
def check_rows(context: CheckContext) -> Finding:
    """Divide the rows among the GPUs.

    Symptom: rows that do not divide evenly (1001 over 4); GPUs without work
    Otherwise: A GPU without rows is idle.
    Fix: No action needed if rows do not divide evenly: some GPUs generate one more.
    """
    rows = context.images
    if context.uses_ray:
        return skipped("Ray distributes the rows")
    workers = context.ranks if context.ranks > 1 else len(select_devices(context.gpu_ids))
    shares = sorted(rows // workers + (worker < rows % workers) for worker in range(workers))
    message = f"{rows:,} over {workers}: {format_list([f'{share:,}' for share in shares], 8)}"
    if rows < workers:
        return warning(f"{message}: some GPUs are idle.", fix=f"Use {rows} GPUs, or more rows.")
    return ok(message)


@check("same results", "generate")
def check_output_folder(context: CheckContext) -> Finding:
    """Check that images already in the output folder were generated with these settings and this model.

    Symptom: results that differ (seed or assignment)
    Otherwise: The folder would mix images of different settings. An image depends only on its row, seed, settings and
    model, not on the number of GPUs.
    Fix: Use the settings of the first run, or choose another --output_dir.
    """
    assert context.generate
    folder = OutputDir(Path(context.generate.output_dir).absolute())
    header = Header.read(folder.ledger)
    if header is None:
        return ok("the folder has no images yet")
    if context.generate.overwrite:
        return ok("existing images will be generated again")
    table = open_prompts(context.generate)
    model = choose_pipeline(context.model, table, context.generate)
    folder.check_settings(settings_identity(context.generate, model), header)
    return ok("existing images were generated with the same settings")


@check("packages", "train", "generate")
def check_packages(context: CheckContext) -> Finding:
    """Check that the optional packages that the settings need are installed.

    Symptom: `--use_wandb`, TensorBoard or DeepSpeed without the package
    Otherwise: The run would end when it imports the package.
    Fix: Install the extra that is named, or leave the setting out.
    """
    needed = {"ray": "--engine ray"} if context.uses_ray else {}
    if context.train:
        strategy, log = context.train.distributed.strategy, context.train.log
        needed |= {"deepspeed": f"--strategy {strategy}"} if strategy.startswith("zero") else {}
        needed |= {"tensorboard": "--use_tensorboard"} if log.use_tensorboard else {}
        needed |= {"wandb": "--use_wandb"} if log.use_wandb else {}
    for name, flag in needed.items():
        if importlib.util.find_spec(name) is None:
            fix = f"`pip install 'muralist[{name}]'`, or leave {flag} out (--no_use_tensorboard for TensorBoard)."
            return failed(f"{flag} needs the package {name}, which is not installed.", fix=fix)
    return ok(f"installed: {', '.join(needed)}" if needed else "the settings need no optional package")


@check("model folder", "train", "generate")
def check_model(context: CheckContext) -> Finding:
    """Check that every part and weights file of the model exists, and that none is truncated.

    Symptom: error during sampling (the model was not loaded right); a process that hangs (wrong model path)
    Otherwise: Loading would fail after minutes, on every GPU at once.
    Fix: Check the path, or copy the model again.
    """
    if context.train:
        preflight.check_model_settings(context.train.model)
        return ok(find_family(context.train.model.name).origin(context.train.model))
    assert context.generate
    return ok(f"{context.generate.model_path} is complete: {context.model.identity['model']}")


@check("prompts table", "generate")
def check_prompts(context: CheckContext) -> Finding:
    """Read the table of prompts: its columns, every row once, and a hundred rows by index.

    Symptom: `--prompts_csv` with a `prompt` or a `caption` column
    Otherwise: Rows that cannot be read get no images.
    Fix: Correct the table; the message names file and line.
    """
    assert context.generate
    table = open_prompts(context.generate)
    rows = table.rows(_subset(len(table)))
    message = (
        f"{len(table):,} row{'' if len(table) == 1 else 's'}, {len(rows)} of them read, such as {rows[0].prompt[:60]!r}"
    )
    if table.notes:
        return warning(f"{message}. {' '.join(table.notes)}", "The table may have been misread.", "Check the table.")
    return ok(message)


@check("image inputs", "generate")
def check_image_inputs(context: CheckContext) -> Finding:
    """Check that the model can use the image inputs of the table, and decode those of a hundred rows.

    Symptom: image-to-image, inpainting, ControlNet or editing with the columns `image`, `mask` and `control_image`
    Otherwise: A pipeline without its inputs is refused, and a row with a broken input fails.
    Fix: Correct the column or the file that is named; paths are relative to the table's folder.
    """
    assert context.generate
    table = open_prompts(context.generate)
    inputs = choose_pipeline(context.model, table, context.generate).inputs
    if inputs is None:
        return skipped("the images are made from text alone")
    broken: list[str] = []
    rows = table.rows(_subset(len(table)))
    for row in rows:
        given = row.inputs or ImageInputs()
        try:
            load_inputs(given, inputs.images_of(given))
        except UserError as error:
            broken.append(error.what)
    message = f"{inputs.task}, the inputs of {len(rows)} rows decoded"
    if broken:
        return warning(f"{message}: {len(broken)} of them broken. {format_list(broken, 2)}")
    return ok(message)


@check("data set", "train")
def check_data(context: CheckContext) -> Finding:
    """Open the data as training does, and decode a hundred randomly chosen images.

    Symptom: data prepared ahead of time to cut I/O
    Otherwise: An image that cannot be decoded ends training when it is read, perhaps after days.
    Fix: `muralist pack SRC DST` leaves broken images out and lists them in broken.txt; or delete them.
    """
    from muralist.train.dataset import open_data  # imports torch

    assert context.train
    if not context.train.data.path:
        return skipped("no --data_path")
    data = open_data(context.train)
    indices = _subset(data.split.source_size)
    broken: list[str] = []
    began = time.perf_counter()
    for index in indices:
        try:
            if data.latents:  # latents: nothing to decode
                data.latents.read_latents(np.array([index]))
            else:
                data.source.read(index)
        except UserError as error:
            broken.append(error.what)
    speed = len(indices) / max(1e-9, time.perf_counter() - began)
    message = f"{data.split.source_size:,} images, {len(indices)} decoded"
    if broken:
        message += f": {len(broken)} of them broken. {format_list(broken, 2)}"
        return failed(message, facts={"broken": len(broken)})
    return ok(f"{message} at {speed:,.0f} images/s on one core", facts={"images per second": speed})


def _subset(count: int) -> list[int]:
    """Choose a hundred of `count` indices, the same ones every time."""
    chosen = np.random.default_rng(0).choice(count, min(_SUBSET, count), replace=False)
    return [int(index) for index in np.sort(chosen)]


@check("port", at_start=True)
def check_port(context: CheckContext) -> Finding:
    """Check that the port where the ranks connect (`MASTER_PORT`, else torchrun's 29500) is free.

    Symptom: NCCL timeout (ranks that never connect)
    Otherwise: The ranks could not connect, or would connect to those of another run.
    Fix: Set MASTER_PORT (torchrun --master_port, accelerate --main_process_port) to a free port, or end the program
    that listens there (`ss -ltnp` names it).
    """
    if context.starting and context.ranks == 1:
        return skipped("one process needs no port")
    chosen = context.environment.get("MASTER_PORT")
    port = chosen or _DEFAULT_PORT
    if chosen and context.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ok(f"{port}: torchrun listens there")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return failed(f"MASTER_PORT is {port!r}, which is not a port.", fix="Set a number from 1024 to 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a run that ended is free at once
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and chosen:
                return failed(f"MASTER_PORT {port} is in use on this machine.")
            if error.errno == errno.EADDRINUSE:
                return warning(
                    f"Port {port}, the default of torchrun, is in use on this machine.",
                    "A second torchrun here would fail or connect to the ranks of the first one.",
                    "Give torchrun --master_port (accelerate --main_process_port), or use `muralist launch`.",
                )
    return ok(f"{port} is free" if chosen else f"{port}, the default of torchrun, is free")


@check("SLURM", per_machine=True)
def check_slurm(context: CheckContext) -> Finding:
    """Compare the variables of SLURM with each other, with the launcher's ranks, and with the node's GPUs and cores.

    Symptom: several machines (SLURM); num_processes = nodes x GPUs per node
    Otherwise: Ranks that disagree about their number wait for each other forever.
    Fix: Start all processes with one launcher: `sbatch scripts/train_slurm_multi_node.sh`, `muralist launch --slurm`,
    or one plain srun; unset RANK and WORLD_SIZE of an earlier launcher.
    """
    environment = context.environment
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return skipped("not inside a SLURM job")
    if contradiction := _contradiction(environment):
        return failed(contradiction)
    tasks, nodes = environment.get("SLURM_STEP_NUM_TASKS", "1"), environment.get("SLURM_JOB_NUM_NODES", "1")
    message = f"job {job}, {nodes} nodes, {tasks} tasks in this step"
    gpus, cores = int(environment.get("SLURM_GPUS_ON_NODE") or 0), available_cpus()
    local_tasks = int(environment.get("LOCAL_WORLD_SIZE") or tasks)
    if gpus > local_tasks > 1:
        return warning(
            f"{message}: {local_tasks} processes on a node with {gpus} GPUs.",
            "GPUs without a process are idle.",
            f"Give srun --ntasks-per-node={gpus}.",
        )
    if cores < 2 * gpus:
        return warning(
            f"{message}: {cores} cores for {gpus} GPUs.",
            "SLURM allocates one core by default, too few to feed a GPU.",
            "Add #SBATCH --cpus-per-gpu=8 (or --cpus-per-task).",
        )
    return ok(message)


def _contradiction(environment: Mapping[str, str]) -> str:
    """Describe two variables that cannot both be right; empty if there are none."""
    value = {name: int(text) for name, text in environment.items() if text.isdecimal()}
    tasks, task = value.get("SLURM_STEP_NUM_TASKS"), value.get("SLURM_PROCID")
    if tasks is not None and task is not None and task >= tasks:
        return f"SLURM_PROCID is {task}, but the step has {tasks} tasks (SLURM_STEP_NUM_TASKS)."
    nodes, names = value.get("SLURM_JOB_NUM_NODES"), environment.get("SLURM_JOB_NODELIST")
    if nodes is not None and names and len(expand_hosts(names)) != nodes:
        return f"SLURM_JOB_NUM_NODES is {nodes}, but SLURM_JOB_NODELIST names {len(expand_hosts(names))}: {names}."
    if layout := environment.get("SLURM_STEP_TASKS_PER_NODE"):
        per_node = expand_tasks_per_node(layout)
        if tasks is not None and sum(per_node) != tasks:
            return f"SLURM_STEP_TASKS_PER_NODE is {layout}, which is not {tasks} (SLURM_STEP_NUM_TASKS)."
        local, node = value.get("SLURM_LOCALID"), value.get("SLURM_NODEID")
        if local is not None and node is not None and (node >= len(per_node) or local >= per_node[node]):
            return f"SLURM_LOCALID {local} on node {node} does not fit SLURM_STEP_TASKS_PER_NODE {layout}."
    rank, world = value.get("RANK"), value.get("WORLD_SIZE")
    if rank is None or world is None:
        return ""
    if rank >= world:
        return f"RANK is {rank}, but WORLD_SIZE is {world}."
    plain_srun = "TORCHELASTIC_RUN_ID" not in environment and tasks is not None and tasks > 1
    if plain_srun and task is not None and (world, rank) != (tasks, task):
        return f"RANK {rank} of WORLD_SIZE {world} is not SLURM_PROCID {task} of SLURM_STEP_NUM_TASKS {tasks}."
    return ""


@check("Weights & Biases", "train")
def check_wandb(context: CheckContext) -> Finding:
    """With `--use_wandb`: connect to the server and look for a login, unless `WANDB_MODE=offline`.

    Symptom: `--use_wandb`; W&B prints its URL when training starts
    Otherwise: Training would end at its start, waiting for a login or a server.
    Fix: Set WANDB_MODE=offline (`wandb sync` uploads later), or leave --use_wandb out: TensorBoard and metrics.jsonl
    are written anyway.
    """
    assert context.train
    if not context.train.log.use_wandb:
        return skipped("--use_wandb is not given")
    if (mode := context.environment.get("WANDB_MODE", "online")) in ("offline", "disabled", "dryrun"):
        return ok(f"WANDB_MODE is {mode}: files only")
    server = urlsplit(context.environment.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host, port = server.hostname or "", server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        return failed(f"{host} cannot be reached at port {port}: {error.strerror or error}.")
    if not context.environment.get("WANDB_API_KEY") and not _has_login(host):
        return failed(f"No login for {host}.", fix="Run `wandb login`, or set WANDB_API_KEY.")
    return ok(f"{host} can be reached, and there is a login")


def _has_login(host: str) -> bool:
    """Whether `wandb login` stored a login; its content is not read."""
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@check("collective test")
def check_collectives(context: CheckContext) -> Finding:
    """Under a launcher: wait for all ranks, measure the bandwidth of all-reduce, and name ranks that compute or send
    more slowly than the others.

    Symptom: NCCL timeout (`timedelta(seconds=36000)`, order of barriers, all GPUs at the same step)
    Otherwise: Every training step waits for the slowest rank, and forever for a missing one.
    Fix: Check the machine that is named: is it up, can it reach MASTER_ADDR at MASTER_PORT (firewall,
    NCCL_SOCKET_IFNAME), does another program use its GPU or its network? In training --dist_timeout sets how long ranks
    wait.
    """
    report = context.exchange
    if report is None:
        return skipped(_ONE_PROCESS)
    if isinstance(report, Exception):
        return failed(f"{report}.")
    rates = ", ".join(f"{rate / 1e9:.2f} GB/s for {size / 2**20:g} MiB" for size, rate in report.bandwidths.items())
    machines = len(set(report.hosts))
    message = f"{len(report.hosts)} ranks on {machines} machine{'s' if machines > 1 else ''} exchange {rates}"
    facts = {
        "bytes per second": report.bandwidths[max(report.bandwidths)],
        "compute, seconds by rank": report.compute,
        "sending, seconds by rank": report.broadcast,
    }
    if slow := report.slow_ranks():
        return warning(f"{message}; but {format_list(slow)}.", facts=facts)
    return ok(message, facts=facts)


@check("clocks")
def check_clocks(context: CheckContext) -> Finding:
    """Under a launcher on several machines: measure the offsets of their clocks.

    Symptom: several machines (SLURM)
    Otherwise: Logs of several machines cannot be ordered, and the newest file on a shared disk is misjudged.
    Fix: Synchronize the machines with one time server (chrony, ntpd); `timedatectl` shows whether they are.
    """
    report = context.exchange
    if report is None:
        return skipped(_ONE_PROCESS)
    if isinstance(report, Exception):
        return skipped("the ranks did not connect")
    if len(set(report.hosts)) < 2:
        return skipped("all ranks are on one machine")
    host, (offset, error) = max(report.clocks.items(), key=lambda item: abs(item[1][0]))
    side = "ahead of" if offset > 0 else "behind"
    message = f"clock of {host} is {abs(offset):.3f} s {side} the clock of {report.hosts[0]} (± {error:.3f} s)"
    facts = {f"{name}, seconds ahead": seconds for name, (seconds, _) in report.clocks.items()}
    certain = abs(offset) - error
    if certain > _SKEW_WARNING:
        return (failed if certain > _SKEW_FAILURE else warning)(f"The {message}.", facts=facts)
    return ok(f"largest offset: the {message}", facts=facts)
