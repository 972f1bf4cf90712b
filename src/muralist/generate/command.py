"""`muralist generate`: from settings to a folder in which every row of the table has its image."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from muralist.core.errors import UserError
from muralist.core.formatting import format_list
from muralist.core.hardware import select_devices
from muralist.core.run_dir import FileLock, is_disk_full
from muralist.core.slurm import set_rank_environment
from muralist.data.prompts import open_prompts, reads_stdin
from muralist.generate import console, output_dir
from muralist.generate.console import INTERRUPTED, ProgressLines, WorkerProgress
from muralist.generate.image_inputs import choose_pipeline, read_input_sizes
from muralist.generate.model_info import SHARD_SETTINGS, ModelInfo, inspect_model, settings_identity
from muralist.generate.output_dir import Header, OutputDir
from muralist.generate.plan import Plan
from muralist.generate.ranks import RankCoordinator, RankRefused
from muralist.generate.scheduler import BatchSize, Scheduler, Undecided
from muralist.generate.tar_shards import TarShardWriter, write_index
from muralist.generate.workers import GenerationJob, WorkerReady, open_pool, ray_devices
from muralist.settings import GenerateSettings

__all__ = ["INTERRUPTED", "GenerationResult", "Preflight", "generate", "read_plan"]

log = logging.getLogger("muralist")
_EXIT_SECONDS = 5.0  # for workers that have nothing left to do
_NAMES_SHOWN = 5
_TAR_INTERVAL = 1.0  # seconds

Preflight = Callable[[GenerateSettings, ModelInfo, int], None]
"""Checks settings, the model and the number of images before anything is loaded; raises what cannot work."""


class GenerationResult(NamedTuple):
    """What came of a command: its exit status, its samples, and the folder whose ledger tells about each of them."""

    status: int
    plan: Plan
    output: OutputDir


def generate(settings: GenerateSettings, preflight: Preflight | None = None) -> GenerationResult:
    """Generate the missing images; the status is 0 only if every row's image exists."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    output = OutputDir(Path(settings.output_dir).absolute())
    set_rank_environment(os.environ)
    ranks = RankCoordinator.from_environment(os.environ, output, settings.images_per_prompt, settings.worker_timeout)
    with _sigterm_interrupts(), ranks.reporting_refusal() if ranks else nullcontext():
        command = _Command.prepare(settings, output, ranks, preflight)
        try:
            return GenerationResult(command.run(), command.plan, output)
        except RankRefused:
            return GenerationResult(1, command.plan, output)  # the refused rank says why
        except OSError as error:
            if error.filename is None and not is_disk_full(error):
                raise
            with output_dir.explain_write_errors(output.root):
                raise


@dataclass
class _Command:
    """One call of `muralist generate`, checked as far as possible before anything is loaded."""

    settings: GenerateSettings  # with the defaults that depend on the model
    model: ModelInfo
    identity: dict[str, Any]  # everything that shapes an image
    plan: Plan
    output: OutputDir
    ranks: RankCoordinator | None
    header: Header | None = None
    display: ProgressLines | None = None
    lock: FileLock | None = None  # of the process that found the missing samples
    tars: TarShardWriter | None = None  # of the process that assembles the tar files of --shards
    next_tar: float = 0.0  # when to look for complete ones

    @classmethod
    def prepare(
        cls, settings: GenerateSettings, output: OutputDir, ranks: RankCoordinator | None, preflight: Preflight | None
    ) -> _Command:
        """Read the table and the model's description, and run the checks."""
        if ranks and settings.engine == "ray":
            raise UserError(
                f"--engine ray under a launcher of {ranks.size} ranks: each rank would use the whole cluster.",
                fix="Run the command once, without srun or torchrun, or leave --engine ray out.",
            )
        if ranks and reads_stdin(settings):
            raise UserError(
                f"--prompts_csv - under a launcher of {ranks.size} ranks: they would not all read the same prompts.",
                "How a launcher passes standard input on differs; every rank needs the whole table.",
                "Save the prompts to a file that all ranks see, and give its path.",
            )
        if ranks and ranks.rank:
            log.setLevel(logging.ERROR)  # rank 0 logs for all
        settings = output_dir.keep_folder_settings(settings)
        model = inspect_model(settings)
        settings, model, plan = read_plan(settings, model)
        if model.is_jit:
            _check_class_names(plan, model)
        if preflight:  # before torch looks for GPUs: it would wait for a driver that does not answer
            preflight(settings, model, len(plan))
        return cls(settings, model, settings_identity(settings, model), plan, output, ranks)

    @property
    def _is_first(self) -> bool:
        return self.ranks is None or self.ranks.rank == 0

    def run(self) -> int:
        """Generate what is missing and log the result; returns the exit status."""
        devices = self._devices()
        self.output.create()
        started = time.monotonic()
        interrupted, first_image_at, merged = False, None, False
        with ExitStack() as stack:
            todo = self._share_missing(stack)
            if len(todo):
                interrupted, first_image_at, merged = self._generate(todo, devices)
            elif self._is_first:
                merged = self._close_output(list(devices), finished=True)
            missing = self.ranks.missing() if self.ranks and not merged else np.sum(~self.output.finished(self.plan))
        first = first_image_at - started if first_image_at else None
        counts = (len(self.plan), len(todo), int(missing))
        return console.summarize(self.settings, self.output, *counts, time.monotonic() - started, first, interrupted)

    def _devices(self) -> dict[str, str]:
        """Return label and device of each worker of this process."""
        if self.settings.engine == "ray":
            return ray_devices(self.settings.gpu_ids)
        devices = select_devices(self.settings.gpu_ids)
        if self.ranks is None:
            return devices
        local = list(devices.values())
        return {str(self.ranks.rank): local[self.ranks.local_rank % len(local)]}

    # What is missing.

    def _share_missing(self, stack: ExitStack) -> np.ndarray:
        """Hold the folder and return the samples to generate, the same for all ranks."""
        if self.ranks is None:
            return self._find_missing(stack)
        self.ranks.agree_on_samples(lambda: self._find_missing(stack))
        if self.lock:
            self.lock.share()
        elif len(self.ranks.todo):
            stack.enter_context(self.output.lock(shared=True))
        return self.ranks.todo

    def _find_missing(self, stack: ExitStack) -> np.ndarray:
        """Hold the folder, recover what an earlier command left, and find the samples that have no image."""
        self.lock = stack.enter_context(self.output.lock())
        if self.settings.overwrite:
            self.output.clear()
        header = Header.read(self.output.ledger)
        if header is None:
            self.output.check_unclaimed(self.plan)
        elif header.settings != self.identity and not self.output.has_images():
            self.output.clear()  # settings that made no image, such as an impossible size, bind nobody
            header = None
        else:
            self.output.check_settings(self.identity, header)
            self._check_batch_size(header)
        self.output.recover()
        lost = self.output.recover_tar_shards(self.plan) if self.plan.samples_per_tar else []
        done = self.output.finished(self.plan)
        for shard in lost:
            if again := np.sum(~done[shard.first : shard.last + 1]):
                log.warning(
                    "%s was damaged or removed: %s of its samples are generated again.", shard.name, f"{again:,}"
                )
        if done.any():
            log.info(
                "%s of %s %s exist already.", f"{done.sum():,}", f"{len(self.plan):,}", console.noun(self.settings)
            )
        if header and not done.all():
            output_dir.note_plan(self.output.ledger, len(self.plan))
        self.header = header
        return self.plan.grouped_by_size(np.flatnonzero(~done))

    def _check_batch_size(self, header: Header) -> None:
        asked = self.settings.batch_size
        if asked in ("auto", header.batch_size) or header.one_at_a_time or self.settings.allow_batch_change:
            return
        raise UserError(
            f"The images in {self.output.root} were made with batch size {header.batch_size}, not {asked}.",
            "The last bits of an image depend on it.",
            "Leave --batch_size out, or give --allow_batch_change: such images are marked in the ledger.",
        )

    # Generating.

    def _generate(self, todo: np.ndarray, devices: dict[str, str]) -> tuple[bool, float | None, bool]:
        """Run the scheduler; returns whether it was interrupted, when the first image came, and if the ledger is merged."""
        ranks, labels = self.ranks, list(devices)
        digest = Header(self.identity, 1).digest
        # The bytes of an image do not depend on whether it goes into a tar file.
        identity = {name: value for name, value in self.identity.items() if name not in SHARD_SETTINGS}
        metadata = {"model": self.identity["model"], "settings": identity, "software": "muralist"}
        pool = open_pool(GenerationJob(self.settings, self.model, self.output.root, digest, metadata), devices)
        display = self.display = console.open_display(self.output) if self._is_first else ProgressLines()
        scheduler = Scheduler(
            self.plan,
            self.output,
            digest,
            pool,
            display,
            self._decide_batch_size,
            self.settings.worker_timeout,
            on_progress=self._on_progress,
            images_before=len(self.plan) - len(todo),
        )
        if ranks:
            scheduler.more_samples = ranks.take_lost_samples
        interrupted, finished, grace = False, False, 0.0
        try:
            if self._is_first:
                all_labels = ranks.labels if ranks else labels
                on_cpu = "cpu" in devices.values()
                task = self.model.inputs.task if self.model.inputs else ""
                job = self.settings, self.identity, self.plan, todo, all_labels, on_cpu, self.model.origins, task
                display.print(console.describe_job(*job))
            scheduler.run(labels, ranks.own if ranks else todo)
            finished, grace = True, _EXIT_SECONDS
        except KeyboardInterrupt:
            interrupted = True
        finally:
            try:
                pool.close(grace)
            finally:
                display.close()  # whatever happens, the terminal gets its cursor back
            if self.tars and not finished:
                self.tars.cancel()
            merged = self._close_output(labels, finished)
        return interrupted, scheduler.first_image_at, merged

    def _on_progress(self, workers: Mapping[str, WorkerProgress], unassigned: int) -> None:
        assert self.display is not None
        if self.lock:
            self.lock.beat()
        if self.plan.samples_per_tar and self.header and time.monotonic() > self.next_tar:
            self.next_tar = time.monotonic() + _TAR_INTERVAL
            if self.ranks is None or self.ranks.is_leader():
                self._open_tars().poll()
        shown = self.ranks.exchange_progress(*workers.values()) if self.ranks else (workers, unassigned)
        if shown:
            self.display.update(*shown)

    def _decide_batch_size(self, ready: WorkerReady, measured: int | None) -> BatchSize | Undecided:
        """Return the ledger's batch size, else the requested or measured one, with which a ledger is started."""
        assert self.display is not None
        if self.lock and not self.lock.is_current():
            raise UserError(
                f"{self.output.root}, or the file lock in it, was deleted while the model was being loaded.",
                "Another command may be using the folder by now.",
                "Run the same command again.",
            )
        if self.ranks and self.header is None:
            self.header = Header.read(self.output.ledger)  # another rank may have started it meanwhile
            if self.header is None and not self.ranks.is_leader():
                return Undecided.WAIT
        asked = self.settings.batch_size
        if not ready.supports_batching and asked not in ("auto", 1):
            self.display.print("Images of this model depend on the others in their batch: the batch size is 1.")
        if self.header:
            self._compare_environment(ready.environment, self.header.made_with)
            current = 1 if not ready.supports_batching else self.header.batch_size if asked == "auto" else asked
            return BatchSize(current, self.header.batch_size)
        if ready.supports_batching and asked == "auto" and measured is None:
            return Undecided.MEASURE
        size = 1 if not ready.supports_batching else measured if asked == "auto" else asked
        assert isinstance(size, int)
        self.header = Header(self.identity, size, ready.environment, not ready.supports_batching)
        if measured is not None and size > 1:
            self.display.print(f"Batch size {size}, recorded in the ledger: the last bits of an image depend on it.")
        output_dir.start_ledger(self.output.ledger, self.header)
        output_dir.note_plan(self.output.ledger, len(self.plan))
        return BatchSize(size, size)

    def _compare_environment(self, now: dict[str, str], before: dict[str, str]) -> None:
        names = [name for name in now | before if now.get(name) != before.get(name)]
        if names:
            assert self.display is not None
            changes = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)
            self.display.print(f"The environment changed ({changes}): the last bits of images may differ.")

    def _close_output(self, labels: list[str], finished: bool) -> bool:
        """Merge the workers' lines once nobody writes any more; False where another rank or command does that.

        After a command that `finished`, the tar files of --shards are completed.
        """
        if self.lock and not self.lock.is_current():
            return False  # deleted meanwhile; a second command may work in its place
        if self.tars and self.ranks:
            self.tars.cancel()  # the rank that merges the ledger completes them
            self.tars = None
        if self.ranks and len(self.ranks.todo) and not self.ranks.should_merge_ledger():
            return False
        log.setLevel(logging.INFO)
        has_tars = self.plan.samples_per_tar and self.output.ledger.is_file()
        try:
            if has_tars and finished:
                self._complete_tars()
        finally:
            self.output.close()
        if has_tars and self.output.intact_tar_shards():
            write_index(self.output)
        output_dir.write_failures(self.output, self.ranks.labels if self.ranks else labels)
        return True

    def _open_tars(self) -> TarShardWriter:
        if self.tars is None:
            digest = Header(self.identity, 1).digest
            self.tars = TarShardWriter(self.output, self.plan, digest, self.output.finished(self.plan))
        return self.tars

    def _complete_tars(self) -> None:
        tars = self._open_tars()
        tars.finish()
        if incomplete := tars.incomplete:
            log.warning(
                "%s of the tar files are not written, because rows of them have no image: %s. The images of their "
                "other rows are files of their own until the same command completes them.",
                f"{len(incomplete):,}", format_list(incomplete, _NAMES_SHOWN),
            )  # fmt: skip


def read_plan(settings: GenerateSettings, model: ModelInfo) -> tuple[GenerateSettings, ModelInfo, Plan]:
    """Read the table; choose the pipeline that its image inputs ask for, and resolve the settings with its defaults.

    Refuses a table whose rows would overwrite each other's files, or whose inputs the model cannot use.
    """
    table = open_prompts(settings)
    for note in table.notes:
        log.warning("%s", note)
    model = choose_pipeline(model, table, settings)
    sizes = read_input_sizes(model, table, settings) if model.inputs else None
    if sizes is not None:
        model = model.without_default_size()
    settings = settings.model_copy(update=model.resolved)
    assert settings.height and settings.width
    columns = tuple(model.inputs.arguments) if model.inputs else ()
    size, copies = (settings.height, settings.width), settings.images_per_prompt
    plan = Plan(
        table,
        copies,
        settings.seed_start,
        settings.negative_prompt,
        size,
        output_dir.file_extension(settings),
        settings.shards or 0,
        columns,
        sizes,
    )
    plan.check_file_names()
    return settings, model, plan


def _check_class_names(plan: Plan, model: ModelInfo) -> None:
    """Refuse a table none of whose prompts names a class; warn where some do not, whose rows fail."""
    from muralist.models.jit_spec import UNCONDITIONAL, spec_from_description

    spec = spec_from_description(model.description)
    if not spec.label_names:
        if any(sample.prompt != UNCONDITIONAL for sample in plan.samples(np.arange(0, len(plan), plan.copies))):
            log.warning("The model is unconditional: prompts only name the images, and do not change them.")
        return
    find_label = functools.cache(spec.find_label)
    first_copies = plan.samples(np.arange(0, len(plan), plan.copies))
    unknown = [sample.prompt for sample in first_copies if find_label(sample.prompt) is None]
    if not unknown:
        return
    try:
        spec.label_of(unknown[0])
    except UserError as first:
        if len(unknown) == len(plan.table):
            what = f"None of the {len(unknown):,} prompts names a class of this model. The first: {first.what}"
            raise UserError(what, first.why, first.fix) from None
        log.warning("%s of %s rows will fail. The first: %s", f"{len(unknown):,}", f"{len(plan.table):,}", first)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM, which a cluster's scheduler sends, like Ctrl+C; only the main thread may have handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
