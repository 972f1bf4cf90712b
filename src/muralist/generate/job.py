"""`muralist generate`: from settings to a folder in which every row of the table has its picture."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from muralist.data.prompts import open_table
from muralist.errors import UserError
from muralist.generate import exactness, ledger, store
from muralist.generate.crew import Crew, LocalCrew
from muralist.generate.fleet import Fleet, Not, Shape
from muralist.generate.folder import Lock, OutputFolder, cannot_write, write_failures
from muralist.generate.ledger import Header
from muralist.generate.messages import Job, Ready
from muralist.generate.models import CheckedModel, check_model
from muralist.generate.plan import Plan
from muralist.generate.progress import ToldScreen
from muralist.generate.ranks import Ranks, RankScreen, Refused
from muralist.generate.screen import Screen, open_screen
from muralist.generate.shortcuts import shortcut_of
from muralist.machine import choose_devices
from muralist.runfolder import is_full
from muralist.scale.checks.check import Circumstances
from muralist.scale.doctor import refuse_trouble
from muralist.scale.slurm import adopt_ranks
from muralist.settings import GenerateSettings
from muralist.words import duration

if TYPE_CHECKING:
    from muralist.models.jit_family import JiTFamily

log = logging.getLogger("muralist")
INTERRUPTED = 130
_PATIENCE = 5.0  # seconds for workers that have nothing left to do


def generate(settings: GenerateSettings) -> int:
    """Make what is missing; returns 0 only if every row's picture exists."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    folder = OutputFolder(Path(settings.output_dir).absolute())
    adopt_ranks(os.environ)
    ranks = Ranks.of_environment(os.environ, folder, settings.images_per_prompt, settings.worker_timeout)
    with _stopped_by_signals(), ranks.telling() if ranks else nullcontext():
        try:
            return _Command.prepare(settings, folder, ranks).run()
        except Refused:
            return 1  # the one that was refused says why


@dataclass
class _Command:
    """One call of `muralist generate`, checked as far as it can be before anything is loaded."""

    settings: GenerateSettings  # with every default that depends on the model settled
    identity: dict[str, Any]  # what shapes a picture
    plan: Plan
    folder: OutputFolder
    ranks: Ranks | None
    around: Circumstances
    header: Header | None = None
    screen: Screen | None = None
    lock: Lock | None = None  # of the process that took stock

    @classmethod
    def prepare(cls, settings: GenerateSettings, folder: OutputFolder, ranks: Ranks | None) -> _Command:
        """Read the table and what the model says of itself."""
        if ranks and settings.engine == "ray":
            raise UserError(
                f"--engine ray under a launcher of {ranks.size} ranks: each would hire the whole cluster.",
                fix="Give the command once, without srun or torchrun, or leave --engine ray out.",
            )
        if ranks and ranks.rank:
            log.setLevel(logging.ERROR)  # the first rank speaks for all
        model = check_model(settings)
        settings = settings.model_copy(update=model.settled)
        assert settings.height and settings.width
        table = open_table(settings.prompts_csv, settings.num_samples)
        for note in table.notes:
            log.warning("%s", note)
        suffix = store.extension(settings.num_frames, settings.video_format)
        size = (settings.height, settings.width)
        plan = Plan(table, settings.images_per_prompt, settings.seed_start, settings.negative_prompt, size, suffix)
        plan.check()
        if model.family and model.family.label_names:
            _look_at_prompts(plan, model.family)
        around = Circumstances(generate=settings, starting=True, known_model=model, known_pictures=len(plan))
        return cls(settings, identity_of(settings, model), plan, folder, ranks, around)

    def run(self) -> int:
        """Take stock, work, and say what came of it."""
        try:
            return self._run()
        except OSError as error:
            if error.filename is None and not is_full(error):
                raise
            raise cannot_write(error, self.folder.root) from None

    def _run(self) -> int:
        interrupted, first = False, None
        with ExitStack() as stack:
            early = stack.enter_context(LocalCrew.early()) if self.settings.engine != "ray" else []
            self._ask_driver_while_importing()
            refuse_trouble(self.around)  # before torch looks for GPUs: it would wait for a driver that does not answer
            devices = self._devices()
            self.folder.create()
            started = time.monotonic()
            todo, own, beat = self._share_stock(stack)
            if len(todo):
                crew = self._crew(devices, early)
                screen: Screen = RankScreen(self.ranks) if self.ranks else ToldScreen(open_screen(), self.folder)
                self.screen = screen
                more = self.ranks.more if self.ranks else lambda: None
                timeout = self.settings.worker_timeout
                stack.callback(screen.close)  # whatever happens, the terminal gets its cursor back
                made_before = len(self.plan) - len(todo)
                fleet = Fleet(
                    self.plan, self.folder, self._digest, crew, screen, self._settle, more, beat, timeout, made_before
                )
                patience = 0.0
                try:
                    if self._is_first:
                        screen.say(self._contract(todo, devices))
                    fleet.run(list(devices), own)
                    patience = _PATIENCE
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    first = fleet.first_made
                    crew.close(patience)
                    screen.close()
                    closed = self._close(list(devices))
            else:
                closed = self._is_first and self._close(list(devices))
            missing = self.ranks.missing() if self.ranks and not closed else self._missing()
        waited = first - started if first else None
        return self._conclude(len(todo), missing, time.monotonic() - started, waited, interrupted)

    def _ask_driver_while_importing(self) -> None:
        """Import torch, which takes as long as the driver's answer."""

        def ask() -> None:
            with suppress(Exception):  # the check that needs the answer asks again, and tells what is wrong
                _ = self.around.gpus

        asking = threading.Thread(target=ask, daemon=True)
        if self.around.local_rank == 0:  # whose check it is
            asking.start()
        import torch  # noqa: F401

        if self.around.local_rank == 0:
            asking.join()

    @property
    def _is_first(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def _share_stock(self, stack: ExitStack) -> tuple[np.ndarray, np.ndarray, Callable[[], None]]:
        """What there is to do, what of it is this process's own, and its sign of life."""
        if self.ranks is None:
            todo, lock = self._take_stock(stack)
            return todo, todo, lock.beat
        ranks, locks = self.ranks, []

        def take_stock() -> np.ndarray:
            todo, lock = self._take_stock(stack)
            lock.share()
            locks.append(lock)
            return todo

        ranks.share_stock(take_stock)
        if ranks.rank and len(ranks.todo):
            stack.enter_context(self.folder.locked(_job(), shared=True))

        def beat() -> None:
            ranks.beat()
            for lock in locks:
                lock.beat()

        return ranks.todo, ranks.own, beat

    def _close(self, labels: list[str]) -> bool:
        """Merge the workers' lines, once nobody writes any more; False where that is left to another rank or command."""
        if self.lock and not self.lock.is_there():
            return False  # deleted meanwhile; a second command may be at work in its place
        if self.ranks and len(self.ranks.todo) and not self.ranks.closes_the_folder():
            return False
        log.setLevel(logging.INFO)
        self.folder.remove_unfinished()
        self.folder.end()
        write_failures(self.folder, self.ranks.labels if self.ranks else labels)
        return True

    @property
    def _digest(self) -> str:
        return Header(self.identity, 0).digest

    def _take_stock(self, stack: ExitStack) -> tuple[np.ndarray, Lock]:
        """Hold the folder, take up what an earlier command left, and find what is missing."""
        lock = self.lock = stack.enter_context(self.folder.locked(_job()))
        if self.settings.overwrite:
            self.folder.clear()
        header = Header.read(self.folder.ledger)
        if header is None:
            self.folder.check_unclaimed(self.plan)
        elif header.settings != self.identity and not self.folder.has_pictures():
            self.folder.clear()  # settings that made nothing, a size that cannot be say, bind nobody
            header = None
        else:
            self.folder.check_settings(self.identity, header)
            self._check_batch(header)
        self.folder.sweep()
        done = self.folder.finished(self.plan) if header else np.zeros(len(self.plan), dtype=bool)
        if done.any():
            log.info("%s of %s %s are there already.", f"{done.sum():,}", f"{len(self.plan):,}", self._things())
        if header and not done.all():
            ledger.note_plan(self.folder.ledger, len(self.plan))
        self.header = header
        return self.plan.in_order(np.flatnonzero(~done)), lock

    def _check_batch(self, header: Header) -> None:
        asked = self.settings.batch_size
        if asked in ("auto", header.batch_size) or header.one_at_a_time or self.settings.allow_batch_change:
            return
        raise UserError(
            f"The pictures in {self.folder.root} were made {header.batch_size} at once, not {asked}.",
            "A picture's last bits depend on it.",
            f"Leave --batch_size out, or give --allow_batch_change: pictures made {asked} at once are marked in the ledger.",
        )

    def _devices(self) -> dict[str, str]:
        if self.settings.engine == "ray":
            from muralist.generate.ray_crew import ray_labels

            return ray_labels(self.settings.gpu_ids)
        if self.ranks is None:
            return choose_devices(self.settings.gpu_ids)
        here = list(choose_devices(self.settings.gpu_ids).values())
        return {str(self.ranks.rank): here[self.ranks.local_rank % len(here)]}

    def _crew(self, devices: dict[str, str], early: list[Any]) -> Crew:
        facts = {"model": self.identity["model"], "settings": self.identity, "software": "muralist"}
        job = Job(self.settings, self.folder.root, self._digest, facts)
        if self.settings.engine == "ray":
            from muralist.generate.ray_crew import RayCrew

            return RayCrew(job, devices)
        return LocalCrew(job, devices, early)

    def _settle(self, ready: Ready, measured: int | None) -> Shape | Not:
        """The shape of batches: the ledger's, else as asked, else as measured; on disk before any picture."""
        if self.lock and not self.lock.is_there():
            raise UserError(
                f"{self.folder.root}, or the file lock in it, was deleted while the model was being loaded.",
                "Another command may be at work there by now.",
                "Run the same command again.",
            )
        if self.ranks and self.header is None:
            self.header = Header.read(self.folder.ledger)  # which the first rank may have begun meanwhile
            if self.header is None and not self.ranks.decides():
                return Not.DECIDED
        asked = self.settings.batch_size
        if not ready.batches and asked not in ("auto", 1):
            self._say("This model's pictures depend on what is painted beside them: one is made at a time.")
        if self.header:
            now = 1 if not ready.batches else self.header.batch_size if asked == "auto" else asked
            shape = Shape(now, self.header.batch_size)
            self._compare(ready.made_with, self.header.made_with)
        elif not ready.batches:
            shape = Shape(1, 1)
        elif asked == "auto" and measured is None:
            return Not.MEASURED
        else:
            size = measured if asked == "auto" else asked
            assert isinstance(size, int)
            shape = Shape(size, size)
        if self.header is None:
            self.header = Header(self.identity, shape.agreed, ready.made_with, not ready.batches)
            ledger.start(self.folder.ledger, self.header)
            ledger.note_plan(self.folder.ledger, len(self.plan))
        return shape

    def _compare(self, now: dict[str, str], before: dict[str, str]) -> None:
        changed = [
            f"{name} {before.get(name)} -> {now.get(name)}"
            for name in now | before
            if now.get(name) != before.get(name)
        ]
        if changed:
            self._say(f"Not made with the same as before ({', '.join(changed)}): last bits may differ.")

    def _say(self, sentence: str) -> None:
        assert self.screen is not None
        self.screen.say(sentence)  # which knows where the bars are

    def _contract(self, todo: np.ndarray, devices: dict[str, str]) -> str:
        """What is about to happen."""
        settings, sizes = self.settings, self.plan.sizes_of(todo)
        size = "{} x {}".format(*sizes[0]) if len(sizes) == 1 else f"of {len(sizes)} sizes"
        labels = self.ranks.labels if self.ranks else list(devices)
        kind = {True: ("CPU process", "CPU processes"), False: ("GPU", "GPUs")}["cpu" in devices.values()]
        guidance = f"guidance {settings.guidance_scale:g}"
        if "guidance_interval" in self.identity:
            guidance += " between {:g} and {:g}".format(*settings.guidance_interval)
        if "preset" in self.identity:
            guidance += f"; {self.identity['preset']}"
        elif settings.cfg_truncation_step is not None:
            guidance += f" for {settings.cfg_truncation_step} steps"
        last = ", the official last step" if settings.official_last_step else ""
        clip = f" of {settings.num_frames} frames" if settings.num_frames > 1 else ""
        weights = f", {settings.weights}" if "weights" in self.identity else ""
        return (
            f"{len(todo):,} {self._things(len(todo))}{clip}, {size}, from {settings.prompts_csv} with "
            f"{self.identity['model']} ({settings.dtype}{weights}, {settings.num_inference_steps} steps, {guidance}{last}) "
            f"on {len(labels)} {kind[len(labels) > 1]}: {' '.join(labels)}. Loading the model."
        )

    def _things(self, count: int = 0) -> str:
        return f"{'clip' if self.settings.num_frames > 1 else 'picture'}{'' if count == 1 else 's'}"

    def _missing(self) -> int:
        done = self.folder.finished(self.plan) if self.folder.ledger.is_file() else np.zeros(len(self.plan), dtype=bool)
        return int((~done).sum())

    def _conclude(self, tried: int, missing: int, seconds: float, waited: float | None, interrupted: bool) -> int:
        """Say what came of it; `waited`: seconds until the first picture was there."""
        there = len(self.plan) - missing
        pace = f", {(tried - missing) / seconds:.2f} images/s with loading" if tried > missing else ""
        began = f", the first after {waited:.1f} s" if waited else ""
        took = f"{duration(seconds)}{pace}{began}"
        told = f"{there:,} of {len(self.plan):,} {self._things()} are in {self.settings.output_dir} ({took})."
        if interrupted:
            log.warning("Interrupted. %s The same command goes on.", told)
            return INTERRUPTED
        if not tried:
            told = f"Nothing to do: {told}"
        if missing:
            log.warning(
                "%s %s missing: failed_prompts_gpu*.txt say why; the same command tries again.", told, f"{missing:,}"
            )
            return 1
        log.info("%s", told)
        for sentence in self._measured() if tried else ():
            log.info("%s", sentence)
        return 0

    def _measured(self) -> Iterator[str]:
        """What the ledger says of this folder's prompts, speed and distance to exact mode."""
        busy: list[float] = []
        distances: list[float] = []
        cut: set[Any] = set()
        for line in ledger.read_lines(self.folder.ledger):
            if isinstance(share := line.get("gpu_busy"), float):
                busy.append(share)
            if (distance := exactness.distance_in(line)) is not None:
                distances.append(distance)
            if line.get(ledger.CUT) is True:
                cut.add(line.get("index"))
        if cut:
            longer = f"{len(cut):,} prompts are" if len(cut) > 1 else "One prompt is"
            yield (
                f"{longer} longer than a text encoder of this model reads: what followed was not seen there "
                f'("{ledger.CUT}" in ledger.jsonl).'
            )
        if busy:
            yield f"The GPU had work for {100 * sum(busy) / len(busy):.1f}% of the time after its first batch."
        if told := exactness.told(distances, str(self.folder.exact)):
            yield told


def identity_of(settings: GenerateSettings, model: CheckedModel) -> dict[str, Any]:
    """Everything that shapes a picture beside its row."""
    settings = settings.model_copy(update=model.settled)
    names = [
        "dtype",
        "num_inference_steps",
        "guidance_scale",
        "cfg_truncation_step",
        "height",
        "width",
        "negative_prompt",
        "seed_start",
        "num_frames",
        "scheduler",
    ]
    if settings.num_frames > 1:
        names.append("video_format")
    identity = model.identity | {name: getattr(settings, name) for name in names}
    if settings.preset == "fast":  # else nothing: a folder made before there were presets stays what it is
        pipeline = "HunyuanDiTPipeline" if model.kind == "hunyuandit" else identity["model"]
        words = shortcut_of(pipeline).words(settings.num_inference_steps, settings.cfg_truncation_step)
        identity["preset"] = words
    return identity


def _look_at_prompts(plan: Plan, family: JiTFamily) -> None:
    """Some prompts that name no class are their rows' mistake, and the others are made; all are the table's."""
    unknown = plan.prompts_not(functools.cache(lambda prompt: family.find_label(prompt) is not None))
    if not unknown:
        return
    try:
        family.label_of(unknown[0])
    except UserError as first:
        if len(unknown) < len(plan.table):
            log.warning("%s of %s rows will fail. The first: %s", f"{len(unknown):,}", f"{len(plan.table):,}", first)
        elif len(unknown) == 1:
            raise
        else:
            raise UserError(
                f"None of the {len(unknown):,} prompts names a class of this model.",
                f"The first: {first.what} {first.why}".strip(),
                first.fix,
            ) from None


def _job() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """A request to end from a scheduler is as good as Ctrl+C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
