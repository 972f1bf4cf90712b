"""`muralist doctor`: makes the checks, tells what was found, and says by its exit status whether a run can start."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from muralist.scale.checks.check import (
    Check,
    Circumstances,
    Examined,
    Finding,
    Status,
    complete,
    examine,
    failed,
    skipped,
)
from muralist.scale.checks.every import CHECKS
from muralist.scale.checks.hardware import ANSWER_WITHIN
from muralist.scale.checks.ranks import CLOCKS, COLLECTIVE, judge_clocks, judge_exchange
from muralist.settings import DoctorSettings

log = logging.getLogger("muralist")
_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim"}


def doctor(settings: DoctorSettings, around: Circumstances) -> int:
    """Make every check that is to the point; returns 1 if one failed."""
    checks = [check for check in CHECKS if around.job in check.jobs]
    if around.ranks > 1:
        found = _together(settings, around, checks)
        if found is None:
            return 0  # rank 0 tells
    else:
        found = [examine(check, around) for check in checks]
    _tell(found, around, settings.as_json)
    status = int(any(one.finding.status is Status.FAILED for one in found))
    if around.ranks > 1:
        _leave(status)  # a collective that hangs would keep the interpreter from ending
    return status


def refuse_trouble(around: Circumstances) -> None:
    """The quick part, for train and generate themselves: what cannot work is an error, anything else a line."""
    for check in CHECKS:
        mine = around.local_rank == 0 if check.on_every_machine else around.rank == 0
        if not check.quick or not mine or around.job not in check.jobs:
            continue
        examined = examine(check, around)
        if examined.finding.status is Status.FAILED and check.certain:
            raise examined.sentence
        if examined.finding.status in (Status.FAILED, Status.WARNING):
            log.warning("%s", examined.sentence)


def _together(settings: DoctorSettings, around: Circumstances, checks: Sequence[Check]) -> list[Examined] | None:
    """The checks of all ranks, put together on rank 0; None on the others.

    Each machine's own part comes before the collective test, in which GPUs are in use, and the plan's after it, while
    nobody waits.
    """
    from muralist.scale.meeting import Meeting, Missing  # with torch, which a command that starts looks after later

    local = [check for check in checks if check.on_every_machine and around.local_rank == 0]
    first = [check for check in checks if check.name == "port" and around.rank == 0]
    later = [check for check in checks if check not in (*local, *first, COLLECTIVE, CLOCKS) and around.rank == 0]
    found = [examine(check, around) for check in first]
    try:
        if any(one.finding.status is Status.FAILED for one in found):
            raise Missing("The ranks cannot meet: the port is in use", [])
        meeting = Meeting(os.environ, settings.timeout)
        meeting.see_who_comes()
        found += [examine(check, around) for check in local]
        exchange = meeting.measure(longer=ANSWER_WITHIN)
        if around.rank:
            meeting.tell("findings", [_plain(one) for one in found])
            return None
        found += _of_other_machines(meeting.hear("findings"), meeting.hosts)
        judged = [(COLLECTIVE, judge_exchange(exchange)), (CLOCKS, judge_clocks(exchange))]
    except Missing as missing:
        if around.rank and 0 not in missing.ranks:
            _leave(0)  # rank 0 says it
        judged = [(COLLECTIVE, failed(f"{missing}.")), (CLOCKS, skipped("the ranks did not meet"))]
        if around.rank:
            later = []
    found += [Examined(check, complete(check, finding), 0.0) for check, finding in judged]
    found += [examine(check, around) for check in later]
    return sorted(found, key=lambda one: CHECKS.index(one.check))


def _of_other_machines(told: Sequence[list[dict[str, Any]] | None], hosts: Sequence[str]) -> list[Examined]:
    """What the first rank of each other machine found amiss."""
    by_name = {check.name: check for check in CHECKS}
    found = []
    for host, findings in zip(hosts, told, strict=True):
        for one in findings or () if host != socket.gethostname() else ():
            status = Status(one["status"])
            if status in (Status.WARNING, Status.FAILED):
                finding = Finding(status, one["seen"], one["why"], one["remedy"], one["facts"])
                found.append(replace(Examined(by_name[one["name"]], finding, one["seconds"]), host=host))
    return found


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _plain(one: Examined) -> dict[str, Any]:
    finding = one.finding
    return {
        "name": one.check.name,
        "status": str(finding.status),
        "seen": finding.seen,
        "why": finding.why,
        "remedy": finding.remedy,
        "facts": dict(finding.facts),
        "seconds": round(one.seconds, 3),
        "host": one.host or socket.gethostname(),
        "trouble": one.check.trouble,
    }


def _tell(found: Sequence[Examined], around: Circumstances, as_json: bool) -> None:
    counts = Counter(one.finding.status for one in found)
    if as_json:
        whole = {
            "ok": not counts[Status.FAILED],
            "job": around.job,
            "host": socket.gethostname(),
            "ranks": around.ranks,
            "checks": [_plain(one) for one in found],
        }
        print(json.dumps(whole, indent=1, ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(one.check.name) for one in found)
    for one in found:
        finding, indent = one.finding, " " * (10 + width + 2)
        head = Text(f"{finding.status:<10}", style=_COLOURS[finding.status])
        head.append(f"{one.check.name:<{width}}  ", style="bold" if finding.why else "default")
        head.append(f"{one.host}: {finding.seen}" if one.host else finding.seen, style="default")
        console.print(head)
        for word, text in (("why: ", finding.why), ("do:  ", finding.remedy)):
            if text:
                console.print(Text(f"{indent}{word}{text}", style="dim" if word == "why: " else "default"))
    told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    console.print(Text(f"{told}.", style="bold red" if counts[Status.FAILED] else "bold green"))
