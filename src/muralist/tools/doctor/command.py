"""`muralist doctor`: run the checks, print the results, and exit with status 1 if a check failed."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from muralist.core.errors import UserError
from muralist.generate.model_info import ModelInfo
from muralist.settings import DoctorSettings, GenerateSettings, TrainSettings
from muralist.tools.doctor.check import CHECKS, Check, CheckContext, Finding, Status
from muralist.tools.doctor.hardware import COMPUTE_TIMEOUT
from muralist.tools.doctor.job import check_clocks, check_collectives, check_port

log = logging.getLogger("muralist")
_COLORS: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def doctor(settings: DoctorSettings, context: CheckContext) -> int:
    """Run every check that applies to the job; returns 1 if one failed."""
    checks = [check for check in CHECKS if context.job in check.jobs]
    alone = context.ranks == 1
    findings = [check.run(context) for check in checks] if alone else _run_on_all_ranks(settings, context, checks)
    if findings is None:
        return 0  # rank 0 prints
    (_print_json if settings.as_json else _print_list)(findings, context)
    status = int(any(finding.status == "failed" for finding in findings))
    if not alone:
        _exit(status)
    return status


def check_training(settings: TrainSettings, run: Path) -> None:
    """Run the quick checks of a training that is about to start, for `train(..., preflight=check_training)`."""
    _raise_on_errors(CheckContext(train=settings, run=run, starting=True))


def check_generation(settings: GenerateSettings, model: ModelInfo, images: int) -> None:
    """Run the quick checks of a generation that is about to start, for `generate(..., preflight=check_generation)`."""
    context = CheckContext(generate=settings, starting=True)
    context.model, context.images = model, images  # generate has inspected the model and read the table already
    _raise_on_errors(context)


def _raise_on_errors(context: CheckContext) -> None:
    """Run the quick checks: a certain failure raises a UserError, other problems are logged."""
    for check in CHECKS:
        responsible = context.local_rank == 0 if check.per_machine else context.rank == 0
        if not check.at_start or not responsible or context.job not in check.jobs:
            continue
        finding = check.run(context)
        error = UserError(finding.message, finding.why, finding.fix)
        if finding.status == "failed" and check.certain:
            raise error
        if finding.is_problem:
            log.warning("%s", error)


def _run_on_all_ranks(settings: DoctorSettings, context: CheckContext, checks: Sequence[Check]) -> list[Finding] | None:
    """Run the checks on all ranks; returns all findings on rank 0 and None on the others.

    The checks of each machine run before the collective test, which uses the GPUs; the checks of the job run after it,
    when no rank waits for rank 0.
    """
    from muralist.tools.doctor.collective_test import CollectiveTest, MissingRanks  # torch is slow to import

    findings = [check_port.run(context)] if context.rank == 0 else []
    try:
        if any(finding.status == "failed" for finding in findings):
            raise MissingRanks("The ranks cannot connect: the port is in use")
        test = CollectiveTest(os.environ, settings.timeout)
        findings += [check.run(context) for check in checks if check.per_machine and context.local_rank == 0]
        context.exchange = test.measure(extra_time=COMPUTE_TIMEOUT)
        if context.rank:
            test.publish("findings", [asdict(finding) for finding in findings if finding.is_problem])
            return None
        findings += [Finding(**finding) for published in test.gather("findings", []) for finding in published]
    except MissingRanks as missing:
        if context.rank and 0 not in missing.ranks:
            _exit(0)  # rank 0 reports it
        context.exchange = missing
    rest: Sequence[Check] = (check_collectives, check_clocks)
    if context.rank == 0:
        rest = [check for check in checks if not check.per_machine and check is not check_port]
    findings += [check.run(context) for check in rest]
    order = [check.name for check in CHECKS]
    return sorted(findings, key=lambda finding: order.index(finding.name))


def _exit(status: int) -> None:
    """Exit without cleanup, which a hanging collective would block."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_json(findings: Sequence[Finding], context: CheckContext) -> None:
    names = {"message": "seen", "fix": "remedy", "symptom": "trouble"}
    checks = [{names.get(name, name): value for name, value in asdict(finding).items()} for finding in findings]
    passed = all(finding.status != "failed" for finding in findings)
    content = {"ok": passed, "job": context.job, "host": socket.gethostname(), "ranks": context.ranks, "checks": checks}
    print(json.dumps(content, indent=1, ensure_ascii=False))


def _print_list(findings: Sequence[Finding], context: CheckContext) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    indent = " " * (10 + width + 2)
    for finding in findings:
        line = Text(f"{finding.status:<10}", style=_COLORS[finding.status])
        line.append(f"{finding.name:<{width}}  ", style="bold" if finding.why else "default")
        elsewhere = "" if finding.host == socket.gethostname() else f"{finding.host}: "
        line.append(elsewhere + finding.message, style="default")
        console.print(line)
        if finding.why:
            console.print(Text(f"{indent}why: {finding.why}", style="dim"))
        if finding.fix:
            console.print(Text(f"{indent}fix: {finding.fix}", style="default"))
    counts = Counter(finding.status for finding in findings)
    total = ", ".join(f"{counts[status]} {status}" for status in _COLORS if counts[status])
    console.print(Text(f"{total}.", style="bold red" if counts["failed"] else "bold green"))
