"""The Python API: the commands as functions, with the same settings and the same results.

Names of settings are those of the flags: `num_inference_steps=30`, or `**{"optim.learning_rate": 1e-4}`. Errors that a
user can fix are `UserError`s. Nothing heavy is imported until a function runs.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muralist.core.errors import UserError

if TYPE_CHECKING:
    from types import TracebackType

    from PIL import Image

    from muralist.data.ledger_reader import ImageFinder
    from muralist.generate.plan import Sample
    from muralist.settings import GenerateSettings, TrainSettings

__all__ = [
    "GenerationRecord",
    "LoadedPipeline",
    "TrainingResult",
    "UserError",
    "distill",
    "evaluate",
    "generate",
    "load_pipeline",
    "train",
]

StrPath = str | os.PathLike[str]
Prompts = str | Sequence[str | Mapping[str, Any]]
"""One prompt, or several; a mapping is a row of a prompt table: prompt, seed, image_id, negative_prompt, ..."""

_NO_IMAGE = "no image was generated"
_FLAG = re.compile(r"(?<![\w-])--([a-z]\w*(?:-\w+)*)")
_one_call = threading.Lock()


@dataclass(frozen=True)
class GenerationRecord:
    """One row of a prompt table, or one copy of it, and its file, or why it failed."""

    index: int
    """The row, from 0."""
    copy: int
    """Which of its images, from 0, where there are several per prompt."""
    id: str
    prompt: str
    seed: int
    width: int
    height: int
    path: Path | None
    """The image or clip; with `shards`, the tar file followed by the name in it; None if it failed."""
    error: str | None = None
    """Why it failed; None if it did not."""


@dataclass(frozen=True)
class TrainingResult:
    """A run that was trained to its last step."""

    run: Path
    """The run's folder, which `generate` and `load_pipeline` take as a model."""
    checkpoint: Path | None
    """The last checkpoint."""
    step: int
    """Optimizer steps in that checkpoint."""
    images: int
    """Training images seen in them."""
    loss: float | None
    """The last training loss in metrics.jsonl."""


def train(config: StrPath | None = None, **settings: Any) -> TrainingResult:
    """Train a model as `muralist train` does, and return when the run is complete; the same call resumes.

    `settings` override those of the YAML file `config`. Ctrl+C, or another signal to stop, saves a checkpoint and raises
    KeyboardInterrupt.
    """
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
    from muralist.settings.load import load_values

    with _call("train"):
        file = None if config is None else os.fspath(config)
        return _train(load_values(TrainSettings, settings, TRAIN_FLAT_NAMES, file), file)


def distill(teacher: StrPath, steps: int = 2, **settings: Any) -> TrainingResult:
    """Train a student of a JiT that samples in 1, 2 or 4 steps, as `muralist distill` does; the same call resumes.

    `teacher` is a run, a checkpoint or an export. `settings` are those of `train`, and `guidance`, `interval` and
    `weights` of the distillation.
    """
    from muralist.settings import DISTILL_FLAT_NAMES, DistillSettings
    from muralist.settings.load import load_values

    with _call("distill"):
        given = {"distill.teacher": os.fspath(teacher), "distill.steps": steps} | settings
        checked = load_values(DistillSettings, given, DISTILL_FLAT_NAMES)
        from muralist.train.student_settings import student_settings

        return _train(student_settings(checked), None)


def _train(settings: TrainSettings, config: str | None) -> TrainingResult:
    from torch.random import fork_rng

    from muralist.models.weights import latest_checkpoint
    from muralist.settings.load import run_name
    from muralist.tools.doctor.command import check_training
    from muralist.train.trainer import train as run_training

    with fork_rng(devices=()):  # data loaders draw from the global generator; results do not depend on it
        run, stop_signal = run_training(settings, run_name(settings, config), preflight=check_training)
    if stop_signal:
        raise KeyboardInterrupt
    folder = run.root.absolute()
    checkpoint = latest_checkpoint(folder)
    if checkpoint == folder:
        return TrainingResult(folder, None, 0, 0, None)
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return TrainingResult(folder, checkpoint, manifest["step"], manifest["images"], _last_loss(run.metrics))


def _last_loss(metrics: Path) -> float | None:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return json.loads(lines[-1]).get("train/loss") if lines else None


def generate(
    model: StrPath, prompts: Prompts | os.PathLike[str], output_dir: StrPath, **settings: Any
) -> list[GenerationRecord]:
    """Generate an image for every prompt, on every GPU, as `muralist generate` does; the same call resumes.

    `prompts` is a prompt, a list of prompts or rows, or the path of a table: a path object, or text that ends like one
    (.csv, .tsv, .jsonl, .parquet, .json, .txt) or is "muralist", the built-in table. Returns a record of each image, in
    the order of the rows. A row that fails does not raise: its record has an error and no path. Ctrl+C raises
    KeyboardInterrupt; everything that was saved is kept.
    """
    from muralist.settings import GenerateSettings
    from muralist.settings.load import load_values

    names = {"model_path": "model", "prompts_csv": "prompts"}
    with _call("generate", names), _prompt_table(prompts, settings) as table:
        _refuse_launcher("generate")
        given = {"model_path": model, "prompts_csv": table, "output_dir": output_dir}
        checked = load_values(GenerateSettings, _merged(given, settings, names), {})
        import numpy as np

        from muralist.generate.command import INTERRUPTED
        from muralist.generate.command import generate as run_generation
        from muralist.tools.doctor.command import check_generation

        status, plan, output = run_generation(checked, preflight=check_generation)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        lines = {sample.sample_index: line for sample, line in output.last_lines(plan)}
        samples = plan.samples(np.arange(len(plan)))
        from muralist.data.ledger_reader import ImageFinder

        finder = ImageFinder(output.root)
        return [_record(sample, lines.get(sample.sample_index), finder) for sample in samples]


def _record(sample: Sample, line: dict[str, Any] | None, finder: ImageFinder) -> GenerationRecord:
    from muralist.data.ledger_reader import DONE
    from muralist.generate.output_dir import is_intact

    path, error = finder.folder / sample.file, _NO_IMAGE
    if line is not None and line["status"] == DONE:
        error = "" if is_intact(path, line) else f"{path} is missing or damaged"
        if error and (member := finder.tar_path(line)):
            path, error = member, ""
    elif line is not None:
        error = line["error"]
    fields = (sample.row, sample.copy, sample.id, sample.prompt, sample.seed, sample.width, sample.height)
    return GenerationRecord(*fields, path=None if error else path, error=error or None)


def evaluate(images: StrPath, reference: StrPath | None, output_dir: StrPath, **settings: Any) -> dict[str, Any]:
    """Compute FID and other metrics of a folder of images as `muralist evaluate` does; returns the content of report.json.

    `reference` is a folder of real images or an .npz file of `muralist stats`; None computes the metrics that need none.
    A metric whose inputs are missing is in the report's "missing", with the reason; one that `metrics` names is an error.
    `dry_run=True` only checks the inputs, and returns "metrics", the names of those it would compute, and "missing".
    """
    from muralist.settings import EvaluateSettings
    from muralist.settings.load import load_values

    with _call("evaluate"):
        _refuse_launcher("evaluate")
        given = {"images": images, "reference": reference, "output_dir": output_dir}
        checked = load_values(EvaluateSettings, given | settings, {})
        from muralist.evaluate.command import Evaluation, measure_and_log
        from muralist.evaluate.report import REPORT

        if checked.dry_run:
            return Evaluation(checked).plan()
        measure_and_log(checked)
        return json.loads((Path(checked.output_dir) / REPORT).read_text(encoding="utf-8"))


def load_pipeline(path: StrPath, device: str | None = None, **settings: Any) -> LoadedPipeline:
    """Load a model: a pipeline in diffusers layout, or a run, checkpoint or export of muralist.

    `path` is its folder, or its id on the Hugging Face Hub.

    It runs in a process of its own, on `device`: "cpu", "cuda" or "cuda:1"; default: the first GPU, or the CPU.
    `settings` are those of `muralist generate` that concern the model (dtype, scheduler, lora, weights, ...), and the
    defaults of those that a call may change (num_inference_steps, guidance_scale, height, width, ...).
    """
    names = {"model_path": "path"}
    with _python_names("generate", names):
        from muralist.generate.model_info import PIPELINE_SETTINGS
        from muralist.generate.pipeline_process import PipelineProcess

        _refuse_others(settings, PIPELINE_SETTINGS, "It concerns the files and workers of muralist.generate.")
        given = _pipeline_values(_merged({"model_path": path}, settings, names))
        return LoadedPipeline(given, PipelineProcess(_pipeline_settings(given), device and str(device)))


class LoadedPipeline:
    """A loaded model, made by `muralist.load_pipeline`; calling it generates images."""

    def __init__(self, values: dict[str, Any], process: Any) -> None:
        self._values, self._process = values, process

    @property
    def device(self) -> str:
        """The device that holds the model."""
        return self._process.device

    def __call__(
        self, prompts: Prompts, seeds: int | Sequence[int] | None = None, batch_size: int = 1, **settings: Any
    ) -> list[Image.Image]:
        """Generate an image for every prompt; with `num_frames` above 1, a list of frames for each.

        `seeds` has one seed per prompt; default: 42, 43, ..., or the seeds of the rows. `settings` of this call replace
        those of `load_pipeline`. Image i has the pixels that `muralist generate` gives row i with the same seed,
        settings and batch size.
        """
        import numpy as np
        from PIL import Image

        from muralist.generate.pipeline import SAMPLING_SETTINGS

        with _python_names("generate", {"prompts_csv": "prompts"}):
            if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
                raise UserError(f"batch_size is {batch_size!r:.60}: expected an integer above 0.")
            _refuse_others(settings, SAMPLING_SETTINGS, "It belongs to the loaded model: give it to load_pipeline.")
            rows = _with_seeds(_rows(prompts), seeds)
            if not rows:
                return []
            with _prompt_table(rows, settings) as table:
                checked = _pipeline_settings(self._values | settings, table)
                from muralist.generate.command import read_plan
                from muralist.generate.model_info import inspect_model

                model = inspect_model(checked) if settings else self._process.model
                checked, model, plan = read_plan(checked, model)
                samples = list(plan.samples(np.arange(len(rows))))
            # The table is gone: what it held is in the samples.
            plain = checked.model_copy(update={"prompts_csv": self._values["prompts_csv"]})
            arrays = self._process.generate(plain, model, samples, batch_size)
        if arrays[0].ndim == 4:
            clips: list[Any] = [[Image.fromarray(frame) for frame in clip] for clip in arrays]
            return clips
        return [Image.fromarray(array) for array in arrays]

    def close(self) -> None:
        """Free the model's memory; this happens too when the object is deleted."""
        self._process.close()

    def __enter__(self) -> LoadedPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pipeline_values(values: dict[str, Any]) -> dict[str, Any]:
    """Add what the settings of generate require: a pipeline has no table and no folder. Its clips stay in memory."""
    return {"prompts_csv": "muralist", "output_dir": ".", "video_format": "webp"} | values


def _pipeline_settings(values: dict[str, Any], table: str | None = None) -> GenerateSettings:
    from muralist.settings import GenerateSettings
    from muralist.settings.load import load_values

    return load_values(GenerateSettings, values | ({"prompts_csv": table} if table else {}), {})


def _merged(given: dict[str, Any], settings: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Join arguments and settings, none of which may be given twice."""
    for name, argument in names.items():
        if name in settings:
            raise UserError(f"{name} is the argument {argument} here.", fix=f"Leave {name} out.")
    return given | settings


def _refuse_others(settings: Mapping[str, Any], known: Sequence[str], why: str) -> None:
    """Refuse settings of the command that would have no effect; unknown names are refused when settings are loaded."""
    from muralist.settings import GenerateSettings

    for name in settings:
        if name in GenerateSettings.model_fields and name not in known:
            raise UserError(f"{name} cannot be set here.", why, "Leave it out.")


# Prompts.


def _rows(prompts: Prompts) -> list[dict[str, Any]]:
    given = [prompts] if isinstance(prompts, str | Mapping) else prompts
    rows: list[dict[str, Any]] = []
    for index, row in enumerate(given):
        if not isinstance(row, str | Mapping):
            raise UserError(
                f"Item {index} of prompts is {row!r:.60}, neither text nor a mapping.",
                fix='Give texts, or rows such as {"prompt": "a red car", "seed": 7}.',
            )
        rows.append({"prompt": row} if isinstance(row, str) else dict(row))
    return rows


def _with_seeds(rows: list[dict[str, Any]], seeds: int | Sequence[int] | None) -> list[dict[str, Any]]:
    if seeds is None:
        return rows
    given = list(seeds) if isinstance(seeds, Sequence) or hasattr(seeds, "__iter__") else [seeds]
    if len(given) != len(rows):
        raise UserError(f"There are {len(given)} seeds for {len(rows)} prompts.", fix="Give one seed per prompt.")
    try:
        return [row | {"seed": operator.index(seed)} for row, seed in zip(rows, given, strict=True)]
    except TypeError:
        raise UserError(f"seeds is {seeds!r:.60}: expected integers.") from None


@contextmanager
def _prompt_table(prompts: Prompts | os.PathLike[str], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of a table with these prompts; rows in memory become a temporary one, which errors call `prompts`."""
    from muralist.data.prompts import ColumnNames, is_table_name

    if isinstance(prompts, os.PathLike) or (isinstance(prompts, str) and is_table_name(prompts)):
        yield os.fspath(prompts)
        return
    named = (settings.get(f"{role}_column") for role in ColumnNames._fields)
    roles = {str(column).strip().lower() for column in named if column is not None}
    rows = [_with_absolute_paths(row, roles) for row in _rows(prompts)]
    if not rows:
        raise UserError("prompts is empty.", fix="Give at least one prompt.")
    with tempfile.TemporaryDirectory(prefix="muralist-") as folder:
        table = Path(folder) / "prompts.jsonl"
        table.write_text("".join(json.dumps(row, default=_plain) + "\n" for row in rows), encoding="utf-8")
        try:
            yield str(table)
        except UserError as error:
            _reword(error, lambda text: text.replace(str(table), "prompts"))
            raise


def _with_absolute_paths(row: dict[str, Any], roles: Collection[str]) -> dict[str, Any]:
    """Let paths of image inputs be relative to the working directory; `roles` are columns that hold something else."""
    from muralist.data.image_inputs import IMAGE_COLUMNS

    paths: dict[str, Any] = {}
    for name, value in row.items():
        column = str(name).strip().lower()
        if column not in IMAGE_COLUMNS or column in roles or value is None or value == "":
            continue
        if not isinstance(value, str | os.PathLike):
            raise UserError(
                f"The {column} of a row is {value!r:.60}, not a path.", fix="Give the path of an image file."
            )
        paths[name] = str(Path(value).absolute())
    return row | paths


def _plain(value: Any) -> Any:
    """Return a path as text and a NumPy number as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        return value.item()
    raise UserError(f"prompts holds {value!r:.60}, which is neither text nor a number.")


# A call in the caller's process.


@contextmanager
def _call(command: str, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """For one command at a time, in a process that is the caller's: what a command changes in its own is undone."""
    with _one_call, _restored_process(), _python_names(command, names or {}):
        logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
        yield


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restore environment variables, logging, the hook for exceptions in threads and the handler of SIGCHLD."""
    environment, hook = dict(os.environ), threading.excepthook
    loggers = [logging.getLogger(), logging.getLogger("muralist")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    on_main_thread = threading.current_thread() is threading.main_thread()
    child_handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            for handler in [handler for handler in logger.handlers if handler not in handlers]:
                handler.close()
            logger.level, logger.propagate, logger.handlers = level, propagate, handlers
            logger.setLevel(level)  # forgets which levels were enabled
        threading.excepthook = hook
        if on_main_thread and child_handler is not None:
            signal.signal(signal.SIGCHLD, child_handler)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _python_names(command: str, names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name arguments instead of flags; `names` are arguments that are called otherwise than their flags."""

    def argument(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return names.get(name, name)

    def reword(text: str) -> str:
        text = text.replace("`--help`", f"`muralist {command} --help`")
        parts = text.split("`")  # commands are in backquotes
        parts[::2] = [_FLAG.sub(argument, part) for part in parts[::2]]
        return "`".join(parts)

    try:
        yield
    except UserError as error:
        _reword(error, reword)
        raise


def _reword(error: UserError, change: Any) -> None:
    error.what, error.why, error.fix = map(change, (error.what, error.why, error.fix))
    error.args = (error.what,)


def _refuse_launcher(command: str) -> None:
    """Refuse several ranks, of which only one would return the complete result."""
    from muralist.core.slurm import set_rank_environment

    environment = dict(os.environ)
    set_rank_environment(environment)
    if (ranks := int(environment.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"muralist.{command} was called by each of {ranks} ranks of a launcher.",
            "It uses every GPU of this machine by itself.",
            f"Call it once, without srun or torchrun, or start `muralist {command}` with the launcher.",
        )
