"""The fleet: hands rows to workers round-robin, and finishes even if workers die, hang or choke on a prompt.

Each has its share. When the first is nearly through with its own, what is left of all shares is everybody's: a slow GPU or
dear rows hold nobody up. Towards the end nobody is given a second batch while another may have none.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from muralist.errors import UserError
from muralist.generate import messages
from muralist.generate.crew import Crew
from muralist.generate.folder import OutputFolder
from muralist.generate.ledger import Shard
from muralist.generate.messages import Measure, Stop, Task
from muralist.generate.plan import Plan, shares
from muralist.generate.screen import Count, Screen

_LOOK = 0.2  # seconds
_LOADING = 600.0  # seconds a model may take to load, beyond the limit for a step
_SAMPLES_AHEAD = 16  # whose text is encoded together
_BATCHES_AHEAD = 3  # the last one is being saved, the device is at work on this one, and the next must follow at once
_PLACES_AHEAD = 8  # batches' worth of rows to look through for one whose place is free
_LATE = 60.0  # seconds to load a model, after which others may take the rows of its worker
_DEATHS_PER_SAMPLE = 2
_NEW_LIVES = 6  # when none is left, until a picture is made: enough for three rows in turn that end every worker
_HOPELESS_FAILURES = 16
_LARGEST_BATCH = 64
_WORKERS_TO_FEED = 8


class Shape(NamedTuple):
    """How many pictures are made at once: now, and as the ledger says."""

    now: int
    agreed: int


class Not(Enum):
    """Why the shape of batches is not known yet."""

    MEASURED = "a worker is to find it out"
    DECIDED = "somebody else is finding it out"


Settle = Callable[[messages.Ready, int | None], Shape | Not]
More = Callable[[], np.ndarray | None]


class Outcome(NamedTuple):
    """What a command made."""

    done: int
    failed: int


@dataclass
class _Member:
    """What the fleet knows of one worker."""

    label: str
    share: deque[int]
    total: int
    given: int = 0  # samples, since it was last started
    tasks: list[set[int]] = field(default_factory=list)  # numbers that were sent and are not finished
    painting: tuple[int, ...] = ()
    ready: messages.Ready | None = None
    alive: bool = True
    hopeless: UserError | None = None  # it cannot work, however often it is started
    lives: int = 0
    compiling: bool = False  # until its first picture is there
    heard: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0

    @property
    def open(self) -> list[int]:
        return [number for task in self.tasks for number in sorted(task)]

    @property
    def count(self) -> Count:
        return Count(self.done, self.failed, self.total, loading=self.alive and self.ready is None)

    def finish(self, number: int) -> None:
        for task in self.tasks:
            task.discard(number)
        self.tasks = [task for task in self.tasks if task]


@dataclass
class Fleet:
    """The workers of one command and what is left to do.

    `settle` says, before any picture is made, how many are made at once: it is asked with what a ready worker says of
    itself, and again with what that worker measured. `more` is asked when nothing is left, and says None when that is all.
    """

    plan: Plan
    folder: OutputFolder
    digest: str
    crew: Crew
    screen: Screen
    settle: Settle
    more: More
    beat: Callable[[], None]  # the fleet's own sign of life
    timeout: float
    made_before: int = 0  # pictures that earlier commands left: the model works
    members: dict[str, _Member] = field(default_factory=dict)
    orphans: deque[int] = field(default_factory=deque)  # of workers that are gone
    suspects: deque[int] = field(default_factory=deque)  # were being painted when a worker died: from now on alone
    deaths: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    shape: Shape | None = None
    measuring: str | None = None
    new_lives: int = 0
    remarks: set[str] = field(default_factory=set)
    first_made: float | None = None  # when the first picture was there

    def run(self, labels: Sequence[str], todo: np.ndarray) -> Outcome:
        """Make the samples; returns when each is made or has failed."""
        parts = shares(todo, len(labels))
        self.members = {
            label: _Member(label, deque(part.tolist()), len(part)) for label, part in zip(labels, parts, strict=True)
        }
        for member in self.members.values():
            self._start(member)
        while self._left() or self._ask_for_more():
            for label, report in self.crew.receive(_LOOK):
                self._hear(self.members[label], report)
            self._watch()
            self._agree()
            self._hand_out()
            self.beat()
            self.screen.show(
                {member.label: member.count for member in self.members.values()},
                len(self.orphans) + len(self.suspects),
            )
        for label in labels:
            self.crew.send(label, Stop())
        return Outcome(sum(m.done for m in self.members.values()), sum(m.failed for m in self.members.values()))

    def _left(self) -> bool:
        return bool(self.orphans or self.suspects) or any(m.share or m.tasks for m in self.members.values())

    def _ask_for_more(self) -> bool:
        numbers = self.more()
        if numbers is None:
            return False
        self.orphans.extend(numbers.tolist())
        return True

    def _start(self, member: _Member) -> None:
        member.alive, member.heard, member.lives, member.given = True, time.monotonic(), member.lives + 1, 0
        self.crew.start(member.label)

    def _hear(self, member: _Member, report: messages.Report) -> None:
        if not member.alive:
            return  # it was given up: whatever it still says, others have its rows
        member.heard = time.monotonic()
        match report:
            case messages.Ready():
                member.ready, member.compiling = report, "compiled" in report.made_with
            case messages.Measured(shape):
                assert member.ready is not None
                settled = self.settle(member.ready, shape)
                assert isinstance(settled, Shape)
                self.shape, self.measuring = settled, None
            case messages.Began(numbers):
                member.painting = numbers
            case messages.Done(number):
                member.done += 1
                member.compiling = False
                self.first_made = self.first_made or time.monotonic()
                member.finish(number)
                self.new_lives = 0
            case messages.Failed(number, reason):
                member.failed += 1
                member.finish(number)
                self._count_failure(reason)
            case messages.Remark(text):
                if text not in self.remarks:  # what is so for every worker is said once
                    self.remarks.add(text)
                    self.screen.say(text)
            case messages.Hopeless(error, everyone):
                if everyone:
                    raise error
                member.hopeless = error
                self._lose(member, str(error))
            case messages.Gone(how):
                self._lose(member, f"GPU {member.label}: its process {how}.")

    def _agree(self) -> None:
        """Find out the shape of batches, with the first worker that is ready."""
        ready = next((member for member in self.members.values() if member.ready), None)
        if self.shape is not None or self.measuring is not None or ready is None or ready.ready is None:
            return
        settled = self.settle(ready.ready, None)
        if isinstance(settled, Shape):
            self.shape = settled
        elif settled is Not.MEASURED:
            # Measured with the largest pictures there are.
            numbers = [number for member in self.members.values() for number in member.share] or list(self.orphans)
            if not numbers:
                return  # a rank that may yet get rows of others
            largest = max(numbers, key=lambda number: math.prod(self.plan.size_of(number)))
            self.measuring, ready.heard = ready.label, time.monotonic()
            self.crew.send(ready.label, Measure(self.plan.sample(largest), self._largest_batch))

    @property
    def _largest_batch(self) -> int:
        """Small tables are not padded to large batches; the number of workers has no say, or pictures would depend on it."""
        return max(1, min(_LARGEST_BATCH, len(self.plan) // _WORKERS_TO_FEED))

    def _hand_out(self) -> None:
        """First from everybody's own share; only then is it known who has nothing left while others have."""
        if self.shape is None:
            return
        for own in (True, False):
            left = len(self.orphans) + sum(len(member.share) for member in self.members.values())
            made = sum(member.done + 1 for member in self.members.values() if member.alive)
            for member in self.members.values():
                ahead = self._ahead(member, left * (member.done + 1) / made) if member.alive and member.ready else 0
                while len(member.tasks) < ahead and (numbers := self._next(member, own)):
                    self._give(member, numbers)

    def _ahead(self, member: _Member, expected: float) -> int:
        """How many batches a worker may have: enough to encode text together; near the end no more than it will get to.

        `expected`: what it would make of the samples that are left, if all went on as fast as they were.
        """
        assert self.shape is not None
        plenty = max(_BATCHES_AHEAD, -(-_SAMPLES_AHEAD // self.shape.now))
        if len(self.members) == 1 or member.given < _SAMPLES_AHEAD:
            return plenty
        return max(1, min(plenty, int(expected / self.shape.now)))

    def _give(self, member: _Member, numbers: list[int]) -> None:
        assert self.shape is not None
        if not member.tasks:
            member.heard = time.monotonic()  # nobody expected a sign of life while it had nothing to do
        member.tasks.append(set(numbers))
        member.given += len(numbers)
        samples = tuple(self.plan.sample(number) for number in numbers)
        alone = any(self.deaths[number] for number in numbers)
        self.crew.send(member.label, Task(samples, *self.shape, alone=alone))

    def _next(self, member: _Member, own: bool) -> list[int]:
        """What to do next: a suspect alone, else a batch of the worker's own, else of what others left or have left."""
        if own and self.suspects:
            member.total += 1
            return [self.suspects.popleft()]
        if own:
            return [] if self._nearly_through(member) else self._batch(member.share)
        if not self.orphans:
            self._pool()
        numbers = self._batch(self.orphans)
        member.total += len(numbers)
        return numbers

    def _nearly_through(self, member: _Member) -> bool:
        """Whether so few are left of a share that they would fill batches badly: each must find its place free."""
        assert self.shape is not None
        begun = len(self.members) > 1 and member.given >= _SAMPLES_AHEAD
        return begun and len(member.share) < _PLACES_AHEAD * self.shape.now

    def _pool(self) -> None:
        """What was not handed out yet becomes everybody's; those that still load the model keep theirs for a while."""
        now = time.monotonic()
        pooled: list[int] = []
        for member in self.members.values():
            if member.ready or now - member.heard > _LATE:
                pooled += member.share
                member.total -= len(member.share)
                member.share.clear()
        if pooled:
            self.orphans.extend(self.plan.in_order(np.sort(pooled)).tolist())

    def _batch(self, source: deque[int]) -> list[int]:
        """The first rows of one size, each with its own place."""
        assert self.shape is not None
        shape = self.shape.now
        batch: dict[int, int] = {}
        passed: list[int] = []
        while source and len(batch) < shape and len(passed) < _PLACES_AHEAD * shape:
            number = source[0]
            if batch and self.plan.size_of(number) != self.plan.size_of(next(iter(batch.values()))):
                break
            source.popleft()
            if batch.setdefault(self.plan.place_in(shape, number), number) != number:
                passed.append(number)  # its place is taken
        source.extendleft(reversed(passed))
        return list(batch.values())

    def _watch(self) -> None:
        """Give up workers that have been silent for too long; bring one back when none is left."""
        now = time.monotonic()
        for member in self.members.values():
            limit = self.timeout if member.ready and not member.compiling else self.timeout + _LOADING
            busy = member.tasks or not member.ready or self.measuring == member.label
            if member.alive and busy and now - member.heard > limit:
                self._lose(member, f"GPU {member.label} gave no sign of life for {limit:.0f} s and was given up.")
                self.crew.kill(member.label)
        if not any(member.alive for member in self.members.values()) and self._left():
            self._bring_back()

    def _lose(self, member: _Member, told: str) -> None:
        """A worker is gone: the others take its rows; what it was painting is painted alone from now on."""
        member.alive, member.ready = False, None
        if self.measuring == member.label:
            self.measuring = None
        open_numbers = member.open
        suspects = [number for number in dict.fromkeys(member.painting) if number in open_numbers]
        member.tasks.clear()
        member.painting = ()
        member.total = member.done + member.failed
        given_up = 0
        for number in suspects:
            self.deaths[number] += 1
            if self.deaths[number] >= _DEATHS_PER_SAMPLE:
                self._give_up(member, number)
                given_up += 1
            else:
                self.suspects.append(number)
        rows = len(open_numbers) + len(member.share) - given_up
        others = any(other.alive for other in self.members.values())
        for number in open_numbers:
            if number not in suspects:
                # Once suspected, alone for good: in a batch it would be blamed for the next death as well.
                (self.suspects if self.deaths[number] else self.orphans).append(number)
        self.orphans.extend(member.share)
        member.share.clear()
        self.screen.say(f"{told} {f'The others take its {rows:,} rows.' if rows and others else ''}".strip())

    def _give_up(self, member: _Member, number: int) -> None:
        reason = f"the worker died {_DEATHS_PER_SAMPLE} times while painting it"
        shard = Shard(self.folder.shard(member.label), self.digest)
        shard.failed(self.plan.sample(number), reason, member.label, 0.0)
        shard.close()
        member.failed += 1
        member.total += 1
        self.screen.say(f"Row {self.plan.sample(number).row + 1} is given up: {reason}.")
        self._count_failure(reason)

    def _bring_back(self) -> None:
        able = [member for member in self.members.values() if member.hopeless is None]
        if not able:
            raise next(member.hopeless for member in self.members.values() if member.hopeless)
        if self.new_lives == _NEW_LIVES:
            raise UserError(
                "All workers are gone, and so were those started in their place.",
                "Something ends them, most often a machine that runs out of memory.",
                "Run the same command to go on from what is there.",
            )
        self.new_lives += 1
        member = min(able, key=lambda member: member.lives)  # another one each time: a GPU may be broken
        self.screen.say(f"No worker is left: GPU {member.label} starts again.")
        self._start(member)

    def _count_failure(self, reason: str) -> None:
        self.reasons[reason] += 1
        made = self.made_before + sum(member.done for member in self.members.values())
        if not made and len(self.reasons) == 1 and self.reasons[reason] >= _HOPELESS_FAILURES:
            raise UserError(
                f"The first {_HOPELESS_FAILURES} pictures all failed alike.",
                f"The reason: {reason}",
                "The ledger names them; put it right and run the same command again.",
            )
