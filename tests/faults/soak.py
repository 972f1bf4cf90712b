"""The long haul: `python -m tests.faults.soak --minutes 30`: training, then generation, with a kill every minute.

Memory and open files of every process are looked at each second: they must not grow. In the end the result must equal that
of an undisturbed job to the bit; that takes about as long again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.jobs import train_words
from tests.faults.play import workshop
from tests.faults.schedule import SEED, Training
from tests.support.fork_server import Started
from tests.support.generating import read_images
from tests.support.records import write_record
from tests.support.recovery import Workshop
from tests.support.runs import assert_same_state, last_checkpoint, metrics

RECORD = "soak"
_SETTLING = 15  # seconds in which a process may still grow
_MOST_GROWTH = 16  # MB from then on
_MOST_MORE_FILES = 4
_ENDLESS = 10_000_000


@dataclass
class Watch:
    """Memory in MB and open files of processes, by number, second by second."""

    memory: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    files: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def look(self, processes: list[int]) -> None:
        """Take one sample of each process."""
        for process in processes:
            with suppress(OSError, IndexError):  # it may be gone
                status = Path(f"/proc/{process}/status").read_text()
                count = len(list(Path(f"/proc/{process}/fd").iterdir()))
                self.memory[process].append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
                self.files[process].append(count)

    def check(self) -> dict[str, Any]:
        """Nothing grows once it has settled; returns what was seen."""
        growth, more, longest = [0.0], [0], 0
        for process, memory in self.memory.items():
            files = self.files[process]
            longest = max(longest, len(memory))
            if len(memory) < 2 * _SETTLING:
                continue
            half = (len(memory) + _SETTLING) // 2
            growth.append(statistics.median(memory[half:]) - statistics.median(memory[_SETTLING:half]))
            more.append(max(files[half:]) - max(files[_SETTLING:half]))
        seen = {"processes": len(self.memory), "longest-lived process, s": longest,
                "memory growth, MB": round(max(growth), 1), "growth of open files": max(more)}  # fmt: skip
        assert max(growth) < _MOST_GROWTH and max(more) <= _MOST_MORE_FILES, seen
        return seen


def main() -> int:
    """Soak for some minutes, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="half of them training, half generation")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--folder", type=Path, default=Path("results/soak"))
    parser.add_argument(
        "--record", action="store_true", help=f"write bench/results/{RECORD}.json, for the documentation"
    )
    given = parser.parse_args()
    folder = given.folder.absolute() / time.strftime("%Y%m%d-%H%M%S")
    record: dict[str, Any] = {"minutes": given.minutes, "seconds between kills": given.every, "table": []}
    with workshop(folder) as shop:
        for job in (_soak_training, _soak_generation):
            record["table"].append(job(shop, folder, 30 * given.minutes, given.every))
            print(record["table"][-1], flush=True)
    print(table(record))
    if given.record:
        command = f"python -m tests.faults.soak --minutes {given.minutes:g} --every {given.every:g} --record"
        print(write_record(RECORD, command, record))
    return 0


def table(record: dict[str, Any]) -> str:
    """The table of a record, in Markdown."""
    names = ("job", "produced", "kills", "starts", "processes", "longest-lived process, s", "memory growth, MB",
             "growth of open files")  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in record["table"]]
    return "\n".join(lines)


def _disturbed(
    shop: Workshop, words: list[object], log: Path, seconds: float, every: float, watch: Watch
) -> tuple[Started, int, int]:
    """Run a command for some time with kills, starting it again when it ends; returns it, kills and starts."""
    random, kills, starts = Random(SEED), 0, 1
    end = time.monotonic() + seconds
    strike = time.monotonic() + every
    last_strike = end - every / 2  # so that what is asked to stop is not dying already
    with log.open("ab") as output:
        command = shop.fork_server.start(words, output)
        while time.monotonic() < end:
            time.sleep(1)
            others = [process for process in _forked(shop) if process != command.pid]
            watch.look([*others, command.pid])
            if command.poll() is not None:
                command, starts = shop.fork_server.start(words, output), starts + 1
            elif time.monotonic() > strike and others and strike < last_strike:
                os.kill(random.choice(others), signal.SIGKILL)
                strike, kills = strike + every, kills + 1
    return command, kills, starts


def _forked(shop: Workshop) -> list[int]:
    fork_server = shop.fork_server.process.pid
    return [int(word) for word in Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()]


def _stop(shop: Workshop, command: Started) -> None:
    command.terminate()
    assert command.poll(120) in (0, 130), "it did not stop when asked to"


def _soak_training(shop: Workshop, folder: Path, seconds: float, every: float) -> dict[str, Any]:
    case = Training(ranks=(2,), strategy="ddp", steps=_ENDLESS, every=200, samples=0, loaders=1)
    watch = Watch()

    def arguments(results: Path, steps: int) -> list[object]:
        return [*train_words(shop, case, 2, results, steps, case.every), "--epochs", _ENDLESS, "--log_every", 100]

    command, kills, starts = _disturbed(
        shop, arguments(folder / "disturbed", _ENDLESS), folder / "training.log", seconds, every, watch
    )
    _stop(shop, command)
    disturbed = last_checkpoint(folder / "disturbed" / "run")
    steps = int(disturbed.name.removeprefix("step_"))
    with (folder / "undisturbed.log").open("wb") as output:
        assert shop.fork_server.start(arguments(folder / "undisturbed", steps), output).poll(3 * seconds + 120) == 0
    undisturbed = last_checkpoint(folder / "undisturbed" / "run")
    assert_same_state(undisturbed, disturbed)
    lines = [metrics(run.parent.parent) for run in (undisturbed, disturbed)]
    assert [line["train/loss"] for line in lines[0]] == [line["train/loss"] for line in lines[1]]
    assert len(lines[0]) == steps
    return {"job": "training", "produced": f"{steps:,} steps", "kills": kills, "starts": starts, **watch.check()}


def _soak_generation(shop: Workshop, folder: Path, seconds: float, every: float) -> dict[str, Any]:
    watch = Watch()

    def arguments(output: Path, rows: int) -> list[object]:
        return ["generate", "--prompts_csv", shop.table(_rows(seconds)), "--model_path", shop.model / "run",
                "--output_dir", output, "--num_inference_steps", 8, "--dtype", "fp32", "--batch_size", 3,
                "--gpu_ids", 0, 1, "--num_samples", rows]  # fmt: skip

    output, rows = folder / "images_disturbed", _rows(seconds)
    command, kills, starts = _disturbed(shop, arguments(output, rows), folder / "generation.log", seconds, every, watch)
    _stop(shop, command)
    made = read_images(output)
    last = max(int(name.partition("_")[0]) for name in made)
    reference = folder / "images_undisturbed"
    with (folder / "generation_undisturbed.log").open("wb") as log:
        assert shop.fork_server.start(arguments(reference, last + 1), log).poll(3 * seconds + 120) == 0
    expected = read_images(reference)
    assert made and made.items() <= expected.items(), "images differ"
    return {"job": "generation", "produced": f"{len(made):,} images", "kills": kills, "starts": starts, **watch.check()}


def _rows(seconds: float) -> int:
    """More than can be made in this time."""
    return int(1000 * seconds)


if __name__ == "__main__":
    sys.exit(main())
