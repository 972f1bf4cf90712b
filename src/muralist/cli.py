"""The commands. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from muralist.errors import UserError, nearest

if TYPE_CHECKING:
    from muralist.settings import LaunchSettings, TrainSettings

USAGE = """muralist: train diffusion transformers, watch them learn, look at what they make.

  muralist train    --data_path ./data/train --img_size 64 --model JiT-B/4 --batch_size 64 --epochs 100
  muralist hydit    --ckpt-every 500 ...       HunyuanDiT fine-tuning, with the official script's flags
  muralist pack     SRC DST --img_size 64      crop images once, ahead of training
  muralist pack     SRC DST --img_size 512 --encode MODEL      and run a HunyuanDiT's frozen parts on them
  muralist export   SRC DST                    weights as a diffusers-style folder
  muralist generate --prompts_csv prompts.csv --output_dir images --model_path MODEL      a picture for every prompt
  muralist evaluate --images DIR --reference DIR_OR_NPZ --inception_weights FILE --output_dir OUT      how good they are
  muralist sweep    --model_path RUN --reference DIR_OR_NPZ --output_dir OUT      the guidance and average with the best FID
  muralist stats    DIR -o stats.npz           what evaluate needs to know of a reference, computed once
  muralist report   EVALUATION [EVALUATION ...]    a page of one evaluation, or of several side by side
  muralist show     FILE_OR_FOLDER             a picture or a sheet of pictures, in the terminal if it can
  muralist board    results/                   a page that shows every run, its samples and scores, live
  muralist launch   --nproc 4 train ...        the same on several GPUs or CPU processes of this machine
  muralist launch   --slurm --nodes 2 --gpus-per-node 4 train ...    the same as a job of SLURM
  muralist doctor   [train ...|generate ...]   what is wrong with this machine, or would be with this run?
  muralist estimate --from RUN|RESULT|probe    how long, how much, how it scales, what fits: from a measured speed
  muralist demo                                train a small model on driving scenes, five minutes on two cores

`muralist COMMAND --help` lists a command's settings. `--debug` shows tracebacks."""
SOURCE_AND_DESTINATION = ("source", "destination")
FOLDERS = ("folders",)


def _train(arguments: Sequence[str]) -> int:
    settings, name = _checked_run(arguments)
    from muralist.train.loop import train

    return train(settings, name)


def _checked_run(arguments: Sequence[str]) -> tuple[TrainSettings, str]:
    """The settings of a training, refused if they cannot work, and the name of its run."""
    from muralist.config import config_path, load, run_name
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
    from muralist.train.contract import check

    settings = load(TrainSettings, arguments, TRAIN_FLAT_NAMES)
    check(settings)
    return settings, run_name(settings, config_path(arguments))


def _hydit(arguments: Sequence[str]) -> int:
    from muralist.hydit import train_words

    return _train(train_words(arguments))


def _pack(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import PackSettings

    settings = load(PackSettings, arguments, {}, positional=SOURCE_AND_DESTINATION)
    if settings.encode:
        from muralist.models.encode import encode

        print(encode(settings))
        return 0
    if stray := {"dtype", "random_flip"} & settings.model_fields_set:
        fix = "Add --encode MODEL_FOLDER, or leave it out."
        raise UserError(f"--{min(stray)} is for latents, and pixels are packed here.", fix=fix)
    from muralist.data.packed import pack

    report = pack(
        settings.source,
        settings.destination,
        settings.img_size,
        settings.num_workers,
        caption=settings.caption,
        cameras=settings.cameras,
    )
    print(report)
    return 0


def _generate(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import GenerateSettings

    settings = load(GenerateSettings, arguments, {})
    from muralist.compiled_code import keep_bytecode

    keep_bytecode()
    from muralist.generate.job import generate

    return generate(settings)


def _evaluate(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import EvaluateSettings

    settings = load(EvaluateSettings, arguments, {})
    from muralist.evaluate.job import evaluate

    return evaluate(settings)


def _sweep(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import SweepSettings

    settings = load(SweepSettings, arguments, {})
    from muralist.sweep.job import sweep

    return sweep(settings)


def _stats(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import StatsSettings

    settings = load(StatsSettings, _with_output(arguments), {}, positional=("source",))
    from muralist.evaluate.job import stats

    return stats(settings)


def _export(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import ExportSettings

    settings = load(ExportSettings, arguments, {}, positional=SOURCE_AND_DESTINATION)
    from muralist.models.export import export
    from muralist.train.checkpoint import require_whole

    require_whole(Path(settings.source))
    print(export(settings))
    return 0


def _report(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import ReportSettings

    settings = load(ReportSettings, arguments, {}, positional=FOLDERS)
    from muralist.evaluate.report import write_report

    page = write_report(
        [Path(folder).expanduser() for folder in settings.folders], Path(settings.output_dir).expanduser()
    )
    print(f"{page}: open it in a browser.")
    return 0


def _show(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import ShowSettings

    settings = load(ShowSettings, _with_output(arguments), {}, positional=("path",))
    from muralist.show import show

    return show(settings)


def _with_output(arguments: Sequence[str]) -> list[str]:
    return ["--output" if word == "-o" else word for word in arguments]


def _board(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import BoardSettings

    settings = load(BoardSettings, arguments, {}, positional=("root",))
    from muralist.board.server import board

    return board(settings)


def _launch(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.launch import default_processes, launch
    from muralist.settings import LaunchSettings

    # Flags before the command are the launcher's, everything from it on is the command's. A partition may be called demo.
    words = enumerate(zip(["", *arguments], arguments, strict=False))
    first = next((index for index, (before, word) in words if word in COMMANDS and before != "--partition"), None)
    if first is None:
        fix = "For example: muralist launch --nproc 4 train --config configs/base_config.yaml"
        raise UserError("`muralist launch` needs a command to start.", fix=fix)
    settings = load(LaunchSettings, arguments[:first], {})
    if settings.slurm:
        return _submit(settings, arguments[first:])
    stray = [name for name in ("nodes", "gpus_per_node", "partition", "time") if getattr(settings, name) is not None]
    if stray:
        flag = "--" + stray[0].replace("_", "-")
        raise UserError(f"{flag} is for a job of SLURM.", fix="Add --slurm, or use --nproc N for this machine alone.")
    command = [sys.executable, "-m", "muralist", *arguments[first:]]
    return launch(command, settings.nproc or default_processes())


def _submit(settings: LaunchSettings, arguments: Sequence[str]) -> int:
    from muralist.scale.slurm_submit import submit

    if bool(settings.nproc) == bool(settings.gpus_per_node):
        fix = "Give --gpus-per-node N, or --nproc N where nodes have no GPUs, but not both."
        raise UserError("How many processes is a node to run?", fix=fix)
    name = arguments[0]
    if name == "train":  # what is wrong with it is better said now than after hours in a queue
        name = _checked_run([word for word in arguments[1:] if word != "--debug"])[1]
    print(submit(settings, arguments, name))
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    import os

    from muralist.config import config_path, load, run_name
    from muralist.scale.checks.check import Circumstances
    from muralist.scale.slurm import adopt_ranks
    from muralist.settings import DOCTOR_FLAT_NAMES, TRAIN_FLAT_NAMES, DoctorSettings, GenerateSettings, TrainSettings

    # Before torch is imported: what its store says when a rank is gone, the doctor says better.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    own, rest = _split(arguments, flags=("--json",), valued=("--timeout",))
    settings = load(DoctorSettings, own, DOCTOR_FLAT_NAMES)
    job, rest = (rest[0], rest[1:]) if rest[:1] in (["train"], ["generate"]) else ("train" if rest else "", rest)
    adopt_ranks(os.environ)
    around = Circumstances()
    if job == "train":
        plan = load(TrainSettings, rest, TRAIN_FLAT_NAMES)
        around = Circumstances(train=plan, run=Path(plan.results_dir) / run_name(plan, config_path(rest)))
    elif job == "generate":
        around = Circumstances(generate=load(GenerateSettings, rest, {}))
    from muralist.scale.doctor import doctor

    return doctor(settings, around)


def _estimate(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import ESTIMATE_FLAT_NAMES, EstimateSettings

    settings = load(EstimateSettings, arguments, ESTIMATE_FLAT_NAMES)
    from muralist.scale.estimate_table import run

    return run(settings)


def _split(words: Sequence[str], flags: Sequence[str], valued: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell a command's own flags from those it hands on."""
    own: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in valued and queue:
            own += [word, queue.pop(0)]
        else:
            (own if word in flags or word.partition("=")[0] in valued else rest).append(word)
    return own, rest


def _demo(arguments: Sequence[str]) -> int:
    from muralist.config import load
    from muralist.settings import DemoSettings

    settings = load(DemoSettings, arguments, {})
    from muralist.demo import demo

    return demo(settings)


class Command(NamedTuple):
    """How a command is run, and where its help comes from."""

    run: Callable[[Sequence[str]], int]
    settings: str
    positional: tuple[str, ...] = ()


COMMANDS = {
    "train": Command(_train, "TrainSettings"),
    "hydit": Command(_hydit, "TrainSettings"),
    "pack": Command(_pack, "PackSettings", SOURCE_AND_DESTINATION),
    "generate": Command(_generate, "GenerateSettings"),
    "evaluate": Command(_evaluate, "EvaluateSettings"),
    "sweep": Command(_sweep, "SweepSettings"),
    "stats": Command(_stats, "StatsSettings", ("source",)),
    "export": Command(_export, "ExportSettings", SOURCE_AND_DESTINATION),
    "report": Command(_report, "ReportSettings", FOLDERS),
    "show": Command(_show, "ShowSettings", ("path",)),
    "board": Command(_board, "BoardSettings", ("root",)),
    "launch": Command(_launch, "LaunchSettings"),
    "doctor": Command(_doctor, "DoctorSettings"),
    "estimate": Command(_estimate, "EstimateSettings"),
    "demo": Command(_demo, "DemoSettings"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if debug and words[:1] == ["launch"]:
        words.append("--debug")  # it is the started processes that can tell
    return guarded(lambda: _dispatch(words), debug)


def guarded(run: Callable[[], int], debug: bool = False) -> int:
    """Run something; errors a user can put right are told in a few lines, without a traceback."""
    try:
        return run()
    except UserError as error:
        if debug:
            traceback.print_exc()
        for part in (f"muralist: {error.what}", error.why, error.fix):
            if part:
                print(part, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has left, as `| head` does: nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug:
            traceback.print_exc()
            return 1
        print(f"muralist: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        print("`--debug` shows where.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("muralist: interrupted; nothing that was saved is lost.", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] in ("--version", "version"):
        from muralist import __version__

        print(__version__)
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        fix = "`muralist --help` lists them."
        raise UserError(f"There is no command {command!r}.", nearest(command, COMMANDS), fix)
    entry = COMMANDS[command]
    own = rest if command != "launch" else rest[:1]
    if "--help" in own or "-h" in own:
        from muralist.help import settings_help

        print(settings_help(command, entry.settings, entry.positional))
        return 0
    return entry.run(rest)


def script(command: str) -> None:
    """Entry of the scripts in the project's root: `python train.py ...` is `muralist train ...`."""
    sys.exit(main([command, *sys.argv[1:]]))
