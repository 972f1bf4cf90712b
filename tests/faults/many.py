"""Many random schedules, one after the other: `python -m tests.faults.many --schedules 200`; the same command goes on."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.play import play, workshop
from tests.faults.schedule import SEED, schedule
from tests.support.disks import can_mount
from tests.support.records import write_record

RECORD = "fault_schedules"
_WORDS = {
    "kill": "SIGKILL", "term": "SIGTERM", "int": "SIGINT", "usr1": "SIGUSR1", "pause": "frozen briefly (SIGSTOP)",
    "freeze": "frozen permanently (SIGSTOP)", "nan": "loss NaN", "inf": "loss infinite", "loader": "loader process killed",
    "clock": "clock changed by a day", "full": "disk full", "read_only": "disk read-only", "memory": "out of memory",
    "second": "concurrent second command", "torn": "killed with a partial ledger line",
    "deleted": "output folder deleted", "truncated": "checkpoint truncated", "zeroed": "checkpoint zeroed",
    "flipped": "bit flip in a checkpoint", "no manifest": "manifest missing",
    "latest nowhere": "`latest` names a missing checkpoint", "cut image": "image truncated",
    "flipped image": "bit flip in an image", "lost image": "image lost",
    "torn ledger": "partial line at the end of the ledger", "half a file": "partial file left behind",
    "cut features": "features truncated", "flipped features": "bit flip in the features",
}  # fmt: skip
_MOMENTS = {"save": ", during a save", "sampling": ", during sampling"}


def main() -> int:
    """Play what has not been played, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, help="how many, numbered from 0")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--folder", type=Path, default=Path("results/faults"), help="where results are appended")
    parser.add_argument("--only", type=int, nargs="+", help="play these numbers, whether or not they were played")
    parser.add_argument("--table", action="store_true", help="print the table of what was played, and play nothing")
    parser.add_argument(
        "--record", action="store_true", help=f"write bench/results/{RECORD}.json, for the documentation"
    )
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    known = _read(results, given.seed)
    numbers = given.only or [number for number in range(given.schedules) if number not in known]
    if not given.table and numbers:
        _play(folder, results, numbers, given.seed)
    known = _read(results, given.seed)
    record = summarize(list(known.values()))
    print(table(record))
    print(f"\n{sentence(record)}")
    if given.record:
        print(write_record(RECORD, f"python -m tests.faults.many --schedules {len(known)} --record", record))
    wrong = [number for number, line in known.items() if line["error"]]
    for number in wrong:
        print(f"schedule {number} went wrong; its files are in {folder / 'played' / str(number)}")
    return int(bool(wrong))


def _play(folder: Path, results: Path, numbers: list[int], seed: int) -> None:
    mounts = can_mount(folder)
    with workshop(folder) as shop:
        for number in numbers:
            wanted = schedule(number, seed)
            if wanted.needs_mounts and not mounts:
                print(f"{wanted}: left out, no disk can be mounted here", flush=True)
                continue
            outcome = play(shop, wanted, folder / "played" / str(number))
            told = f"WRONG: {outcome.error}" if outcome.error else "ok"
            told += "".join(f"; {fault} did not happen: {why}" for fault, why in outcome.impossible.items())
            print(f"{wanted}: {outcome.starts} starts, {outcome.seconds:.1f} s, {told}", flush=True)
            line = {"number": number, "seed": seed, "job": wanted.job, "schedule": str(wanted), **asdict(outcome)}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _read(results: Path, seed: int) -> dict[int, dict[str, Any]]:
    """The last result of every number."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["number"]: line for line in lines if line["seed"] == seed}


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Faults by job and kind: how many happened, how many were survived, and how long until the job moved on."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    lost: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for words, passed in line["recovered"].items():
            kind = line["job"], _kind(words)
            seconds[kind].append(passed)
            lost[kind] += bool(line["error"])
    rows = [
        {"job": job, "fault": what, "count": len(passed), "survived": len(passed) - lost[job, what],
         "median s": round(statistics.median(passed), 1), "worst s": round(max(passed), 1)}
        for (job, what), passed in sorted(seconds.items())
    ]  # fmt: skip
    impossible = [f"{line['number']} {line['job']}: {fault}" for line in lines for fault in line["impossible"]]
    return {
        "schedules": len(lines),
        "schedules that went wrong": sum(bool(line["error"]) for line in lines),
        "faults": sum(row["count"] for row in rows),
        "faults whose moment never came": impossible,
        "table": rows,
    }


def _kind(fault: str) -> str:
    what = fault.partition(" of ")[0].partition(" before ")[0]
    return _WORDS[what] + _MOMENTS.get(fault.partition(" at ")[2].split(" ")[0], "")


def table(record: dict[str, Any]) -> str:
    """The table of a record, in Markdown."""
    names = ("job", "fault", "count", "survived", "median s", "worst s")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in record["table"]]
    return "\n".join(lines)


def sentence(record: dict[str, Any]) -> str:
    """What a record says in one sentence."""
    wrong, never = record["schedules that went wrong"], len(record["faults whose moment never came"])
    ended = f"{wrong} schedules went wrong" if wrong else "every job ended bit-identical to the undisturbed one"
    return f"{record['schedules']} schedules; {record['faults']} faults happened, {never} had no moment to happen; {ended}."


if __name__ == "__main__":
    sys.exit(main())
