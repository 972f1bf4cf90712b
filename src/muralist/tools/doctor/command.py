"""`muralist doctor`: run the checks, print the results, and exit with status 1 if a check failed.

docs/troubleshooting.md is generated from the checks: python -m muralist.tools.doctor.command > docs/troubleshooting.md
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from muralist.settings import DoctorSettings, GenerateSettings, TrainSettings
from muralist.tools.doctor import environment, hardware, inputs
from muralist.tools.doctor.check import Check, CheckContext, CheckResult, Finding, Status, run_check
from muralist.tools.doctor.environment import check_clocks, check_collectives, check_port
from muralist.tools.doctor.hardware import COMPUTE_TIMEOUT

if TYPE_CHECKING:
    from muralist.generate.model_info import ModelInfo

CHECKS: list[Check] = [
    hardware.check_gpus,
    hardware.check_driver,
    hardware.check_gpus_answer,
    hardware.check_bf16,
    hardware.check_memory,
    hardware.check_disk_space,
    hardware.check_writable,
    inputs.check_settings,
    inputs.check_run_folder,
    inputs.check_batch,
    inputs.check_learning_rate,
    inputs.check_rows,
    inputs.check_output_folder,
    inputs.check_packages,
    inputs.check_model,
    inputs.check_prompts,
    inputs.check_data,
    environment.check_port,
    environment.check_slurm,
    environment.check_wandb,
    environment.check_collectives,
    environment.check_clocks,
]

_HEAD = """# Troubleshooting

`muralist doctor` checks whether a job can run here, before it starts or after it failed:

```bash
muralist doctor                                         # this machine
muralist doctor --config configs/base_config.yaml       # and a training: takes the flags of `muralist train`
muralist doctor generate --prompts_csv prompts.csv --model_path MODEL --output_dir images      # and a generation
muralist launch --nproc 8 doctor train --config ...     # and the collectives of all ranks; also under torchrun and srun
```

The doctor prints one line per check: `ok`, `warning`, `failed` or `skipped`, and the result. Problems come with the
reason and a fix. `--json` prints the same for programs. The exit status is 1 if a check failed. `--timeout 60` sets how
many seconds to wait for missing ranks. `muralist train` and `muralist generate` run the checks marked *at every start*
themselves, before they load anything.

This page is generated from the checks (`make docs`); a test compares the two.
"""


def troubleshooting_page() -> str:
    """Return the page in Markdown."""
    rows = [f"| {check.symptom} | [{check.name}](#{_anchor(check.name)}) |" for check in CHECKS]
    return "\n".join([_HEAD, "| symptom | check |", "|---|---|", *rows, "", *map(_section, CHECKS)])


def _section(check: Check) -> str:
    jobs = "every job" if "machine" in check.jobs else " and ".join(sorted(check.jobs, reverse=True))
    when = f"For {jobs}" + (", at every start." if check.at_start else ".")
    where = " Each machine of a run has its own result." if check.per_machine else ""
    explanation = f"- **Otherwise:** {check.why}\n- **Fix:** {check.fix}\n"
    return f"## {check.name}\n\n{check.description} {when}{where}\n\n{explanation}"


def _anchor(name: str) -> str:
    return name.lower().replace("&", "").replace(" ", "-")


if __name__ == "__main__":
    print(troubleshooting_page(), end="")


log = logging.getLogger("muralist")
_COLORS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim"}


def doctor(settings: DoctorSettings, context: CheckContext) -> int:
    """Run every check that applies to the job; returns 1 if one failed."""
    checks = [check for check in CHECKS if context.job in check.jobs]
    if context.ranks == 1:
        results = [run_check(check, context) for check in checks]
    elif (together := _run_on_all_ranks(settings.timeout, context, checks)) is not None:
        results = together
    else:
        return 0  # rank 0 prints
    (_print_json if settings.as_json else _print_list)(results, context)
    status = int(any(result.finding.status is Status.FAILED for result in results))
    if context.ranks > 1:
        _exit(status)
    return status


def raise_on_errors(context: CheckContext) -> None:
    """Run the quick checks for train and generate: a certain failure raises a UserError, other problems are logged."""
    for check in CHECKS:
        responsible = context.local_rank == 0 if check.per_machine else context.rank == 0
        if not check.at_start or not responsible or context.job not in check.jobs:
            continue
        result = run_check(check, context)
        if result.finding.status is Status.FAILED and check.certain:
            raise result.error()
        if result.finding.is_problem:
            log.warning("%s", result.error())


def check_training(settings: TrainSettings, run: Path) -> None:
    """Run the quick checks of a training that is about to start, for `train(..., preflight=check_training)`."""
    raise_on_errors(CheckContext(train=settings, run=run, starting=True))


def check_generation(settings: GenerateSettings, model: ModelInfo, images: int) -> None:
    """Run the quick checks of a generation that is about to start, for `generate(..., preflight=check_generation)`."""
    raise_on_errors(CheckContext(generate=settings, starting=True, known_model=model, known_images=images))


def _run_on_all_ranks(timeout: float, context: CheckContext, checks: Sequence[Check]) -> list[CheckResult] | None:
    """Run the checks on all ranks; returns all results on rank 0 and None on the others.

    The checks of each machine run before the collective test, which uses the GPUs; the checks of the job run after it,
    when no rank waits for rank 0.
    """
    from muralist.tools.doctor.collective_test import CollectiveTest, MissingRanks  # torch is slow to import

    shared = (check_port, check_collectives, check_clocks)
    per_machine = [check for check in checks if check.per_machine and context.local_rank == 0]
    of_job = [check for check in checks if not check.per_machine and check not in shared and context.rank == 0]
    results = [run_check(check_port, context)] if context.rank == 0 else []
    try:
        if any(result.finding.status is Status.FAILED for result in results):
            raise MissingRanks("The ranks cannot connect: the port is in use")
        test = CollectiveTest(os.environ, timeout)
        test.wait_for_ranks()
        results += [run_check(check, context) for check in per_machine]
        report = test.measure(extra_time=COMPUTE_TIMEOUT)
        if context.rank:
            test.publish("results", [_to_json(result) for result in results])
            return None
        results += _from_other_machines(test.gather("results", None), test.hosts)
        context = replace(context, exchange=report)
    except MissingRanks as missing:
        if context.rank and 0 not in missing.ranks:
            _exit(0)  # rank 0 reports it
        context = replace(context, exchange=missing)
    results += [run_check(check, context) for check in (check_collectives, check_clocks, *of_job)]
    return sorted(results, key=lambda result: CHECKS.index(result.check))


def _from_other_machines(gathered: Sequence[list[dict[str, Any]] | None], hosts: Sequence[str]) -> list[CheckResult]:
    """Problems that the first rank of each other machine found."""
    by_name = {check.name: check for check in CHECKS}
    results = []
    for host, published in zip(hosts, gathered, strict=True):
        for one in published or () if host != socket.gethostname() else ():
            finding = Finding(Status(one["status"]), one["seen"], one["why"], one["remedy"], one["facts"])
            if finding.is_problem:
                results.append(CheckResult(by_name[one["name"]], finding, one["seconds"], host))
    return results


def _exit(status: int) -> None:
    """Exit without cleanup, which a hanging collective would block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _to_json(result: CheckResult) -> dict[str, Any]:
    finding = result.finding
    return {
        "name": result.check.name,
        "status": str(finding.status),
        "seen": finding.message,
        "why": finding.why,
        "remedy": finding.fix,
        "facts": dict(finding.facts),
        "seconds": round(result.seconds, 3),
        "host": result.host or socket.gethostname(),
        "trouble": result.check.symptom,
    }


def _print_json(results: Sequence[CheckResult], context: CheckContext) -> None:
    content = {
        "ok": all(result.finding.status is not Status.FAILED for result in results),
        "job": context.job,
        "host": socket.gethostname(),
        "ranks": context.ranks,
        "checks": [_to_json(result) for result in results],
    }
    print(json.dumps(content, indent=1, ensure_ascii=False))


def _print_list(results: Sequence[CheckResult], context: CheckContext) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(result.check.name) for result in results)
    indent = " " * (10 + width + 2)
    for result in results:
        finding = result.finding
        line = Text(f"{finding.status:<10}", style=_COLORS[finding.status])
        line.append(f"{result.check.name:<{width}}  ", style="bold" if finding.why else "default")
        line.append(f"{result.host}: {finding.message}" if result.host else finding.message, style="default")
        console.print(line)
        if finding.why:
            console.print(Text(f"{indent}why: {finding.why}", style="dim"))
        if finding.fix:
            console.print(Text(f"{indent}fix: {finding.fix}", style="default"))
    counts = Counter(result.finding.status for result in results)
    total = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    console.print(Text(f"{total}.", style="bold red" if counts[Status.FAILED] else "bold green"))
