"""Many random schedules, one after the other: `python -m tests.faults.many --schedules 200`; the same command goes on."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults.play import play, workshop
from tests.faults.schedule import SEED, schedule
from tests.support.disks import can_mount


def main() -> int:
    """Play what has not been played, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=200, help="how many, numbered from 0")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--folder", type=Path, default=Path("results/faults"), help="where results are appended")
    parser.add_argument("--only", type=int, nargs="+", help="play these numbers, whether or not they were played")
    parser.add_argument("--table", action="store_true", help="print the table of what was played, and play nothing")
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    known = _read(results, given.seed)
    numbers = given.only or [number for number in range(given.schedules) if number not in known]
    if not given.table and numbers:
        _play(folder, results, numbers, given.seed)
    known = _read(results, given.seed)
    print(table(list(known.values())))
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
            print(f"{wanted}: {outcome.starts} starts, {outcome.seconds:.1f} s, {told}", flush=True)
            line = {"number": number, "seed": seed, "job": wanted.job, "schedule": str(wanted), **asdict(outcome)}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _read(results: Path, seed: int) -> dict[int, dict[str, Any]]:
    """The last result of every number."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["number"]: line for line in lines if line["seed"] == seed}


def table(lines: list[dict[str, Any]]) -> str:
    """Faults by job and kind: how many happened, how many were survived, and how long until the job moved on."""
    tried: dict[tuple[str, str], list[float]] = defaultdict(list)
    lost: dict[tuple[str, str], int] = defaultdict(int)
    for line in lines:
        for words, seconds in line["recovered"].items():
            what = words.partition(" of ")[0].partition(" before ")[0]
            at = words.partition(" at ")[2].split(" ")[0]
            kind = line["job"], what + (f", {at}" if at in ("save", "sampling") else "")
            tried[kind].append(seconds)
            lost[kind] += bool(line["error"])
    rows = ["| job | fault | happened | survived | median s | worst s |", "|---|---|---|---|---|---|"]
    for (job, what), seconds in sorted(tried.items()):
        survived = len(seconds) - lost[job, what]
        middle, worst = statistics.median(seconds), max(seconds)
        rows.append(f"| {job} | {what} | {len(seconds)} | {survived} | {middle:.1f} | {worst:.1f} |")
    wrong = sum(bool(line["error"]) for line in lines)
    faults = sum(map(len, tried.values()))
    rows.append(f"\n{len(lines)} schedules, {faults} faults, {wrong} schedules went wrong")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
