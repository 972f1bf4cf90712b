"""`muralist launch --slurm`: writes a job script a person can read, change and submit again, and submits it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from muralist.errors import UserError
from muralist.runfolder import safe_name, write_atomically
from muralist.settings import LaunchSettings

LOGS = Path("logs")
_CORES_PER_GPU = 8  # where nothing is said SLURM gives one core, which cannot feed a GPU
_WARNING = 180  # seconds before the time limit to save in; SLURM may be up to a minute early


def submit(settings: LaunchSettings, arguments: Sequence[str], name: str) -> str:
    """Write the job of a command as logs/NAME.sbatch, submit it, and return what to tell the person who did."""
    if not shutil.which("sbatch"):
        raise UserError(
            "There is no `sbatch` here.",
            "SLURM is not on this machine, or not on the PATH.",
            "Run this where jobs are submitted; without --slurm the processes are started on this machine.",
        )
    LOGS.mkdir(exist_ok=True)
    name = safe_name(name)
    path = LOGS / f"{name}.sbatch"
    write_atomically(path, job_script(settings, arguments, name, Path.cwd()))
    submitted = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True, check=False)
    if submitted.returncode:
        fix = f"The job is written in {path}; once it is right, `sbatch {path}` submits it."
        raise UserError(f"SLURM refused the job: {submitted.stderr.strip()}", fix=fix)
    job = submitted.stdout.strip().partition(";")[0]
    return (
        f"Job {job} is submitted: {path}\n"
        f"  tail -f {LOGS}/{arguments[0]}_{job}.out\n"
        f"  tail -f {LOGS}/{arguments[0]}_{job}.err\n"
        f"`scancel {job}` saves and ends it; `sbatch {path}` goes on from there."
    )


def job_script(settings: LaunchSettings, arguments: Sequence[str], name: str, folder: Path) -> str:
    """The text of the job."""
    choices = [("job-name", name), ("nodes", settings.nodes or 1)]
    if settings.gpus_per_node:
        choices += [("gpus-per-node", settings.gpus_per_node), ("cpus-per-gpu", _CORES_PER_GPU)]
    else:
        choices += [("ntasks-per-node", settings.nproc or 1)]
    choices += [(option, value) for option in ("partition", "time") if (value := getattr(settings, option))]
    choices += [("output", f"{LOGS}/{arguments[0]}_%j.out"), ("error", f"{LOGS}/{arguments[0]}_%j.err")]
    choices += [("open-mode", "append"), ("requeue", ""), ("signal", f"B:USR1@{_WARNING}"), ("chdir", folder)]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{option}" + (f"={shlex.quote(str(value))}" if value else "") for option, value in choices),
            "# Written by `muralist launch --slurm`. Three minutes before the time limit the run is saved, and the job goes",
            "# back into the queue and on from there. Submitted again, it goes on as well.",
            *([f"export NPROC={settings.nproc}"] if settings.nproc else []),
            'trap "" USR1  # for the moment until the next line listens to it',
            f"exec {shlex.quote(sys.executable)} -m muralist.scale.slurm_job muralist {shlex.join(arguments)}",
            "",
        )
    )
