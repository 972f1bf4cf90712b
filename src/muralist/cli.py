"""The `muralist` program: one entry per command. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from muralist.core.errors import UserError, closest_match, report_errors

if TYPE_CHECKING:
    from muralist.settings import (
        EvaluateSettings,
        ExportSettings,
        GenerateSettings,
        LaunchSettings,
        PackSettings,
        ReportSettings,
        TrainSettings,
    )

USAGE = """muralist: train diffusion transformers, generate images from prompt tables, evaluate them.

  muralist train    --data_path ./data/train --img_size 64 --model JiT-B/4 --batch_size 64 --epochs 100
  muralist distill  RUN --steps 2              train a student of a JiT that samples in 1, 2 or 4 network passes
  muralist hydit    --ckpt-every 500 ...       fine-tune HunyuanDiT, with the flags of its official script
  muralist pack     SRC DST --img_size 64      decode and crop a data set once, ahead of training
  muralist pack     SRC DST --img_size 512 --encode MODEL      store latents and text embeddings of a pipeline
  muralist export   SRC DST                    write weights as a folder in diffusers layout
  muralist export   SRC DST --lora_format comfy    write a LoRA alone, for ComfyUI, diffusers or PEFT
  muralist generate --prompts_csv prompts.csv --output_dir images --model_path MODEL      one image per prompt
  muralist evaluate --images DIR --reference DIR_OR_NPZ --inception_weights FILE --output_dir OUT      FID, KID, ...
  muralist sweep    --model_path RUN --reference DIR_OR_NPZ --output_dir OUT      find the best guidance and EMA
  muralist stats    DIR -o stats.npz           compute the reference statistics for evaluate once
  muralist report   EVALUATION [EVALUATION ...]    write a page for one evaluation, or to compare several
  muralist show     FILE_OR_FOLDER             show an image or a contact sheet in the terminal
  muralist board    results/                   serve a page with all runs, their samples and scores, live
  muralist launch   --nproc 4 train ...        start a command as several processes on this machine
  muralist launch   --slurm --nodes 2 --gpus-per-node 4 train ...    submit it as a SLURM job
  muralist doctor   [train ...|generate ...]   check this machine, or a planned run, for problems
  muralist estimate --from RUN|RESULT|probe    time, cost, scaling and memory from a measured speed
  muralist estimate --model.path MODEL --img_size 1024 --memory 24      what fits when a pipeline is fine-tuned
  muralist demo                                train a small model on driving scenes, five minutes on two cores

`muralist COMMAND --help` lists a command's settings. `--debug` shows tracebacks."""
_SOURCE_AND_DESTINATION = ("source", "destination")
_TEACHER = ("distill.teacher",)


class Command(NamedTuple):
    """One command: the function that runs its arguments, and the settings class that its help describes."""

    run: Callable[[Sequence[str]], int]
    settings: str
    positional: tuple[str, ...] = ()

    def help_page(self, name: str) -> str:
        """Return what `muralist NAME --help` prints."""
        if name == "hydit":
            from muralist.tools.hydit import help_page

            return help_page()
        from muralist.settings.load import settings_help

        return settings_help(name, self.settings, self.positional)


def _command(settings: str, target: str | Callable[..., int], *positional: str, flat_names: str = "") -> Command:
    """Return a command that parses its settings and passes them to `target`, a function or "module:function"."""

    def run(arguments: Sequence[str]) -> int:
        from muralist import settings as classes
        from muralist.settings.load import load

        # -o is the one short flag; commands that have no setting `output` refuse it by name.
        words = ["--output" if word == "-o" else word for word in arguments]
        parsed = load(getattr(classes, settings), words, getattr(classes, flat_names, {}), positional=positional)
        if isinstance(target, str):
            module, _, function = target.partition(":")
            return int(getattr(import_module(module), function)(parsed))
        return target(parsed)

    return Command(run, settings, positional)


def _train(arguments: Sequence[str]) -> int:
    settings, name = _load_training(arguments)
    from muralist.tools.doctor.command import check_training
    from muralist.train.trainer import train

    return train(settings, name, preflight=check_training).exit_status


def _load_training(arguments: Sequence[str]) -> tuple[TrainSettings, str]:
    """Return checked training settings and the name of their run."""
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings
    from muralist.settings.load import config_path, load, run_name
    from muralist.train.preflight import check_settings

    settings = load(TrainSettings, arguments, TRAIN_FLAT_NAMES)
    check_settings(settings)
    return settings, run_name(settings, config_path(arguments))


def _distill(arguments: Sequence[str]) -> int:
    settings, name = _load_distillation(arguments)
    from muralist.tools.doctor.command import check_training
    from muralist.train.trainer import train

    return train(settings, name, preflight=check_training).exit_status


def _load_distillation(arguments: Sequence[str]) -> tuple[TrainSettings, str]:
    """Return checked settings of a distillation, completed by those of the teacher, and the name of its run."""
    from muralist.settings import DISTILL_FLAT_NAMES, DistillSettings
    from muralist.settings.load import config_path, load, run_name
    from muralist.train.preflight import check_settings
    from muralist.train.student_settings import student_settings

    settings = student_settings(load(DistillSettings, arguments, DISTILL_FLAT_NAMES, positional=_TEACHER))
    check_settings(settings)
    return settings, run_name(settings, config_path(arguments))


def _hydit(arguments: Sequence[str]) -> int:
    from muralist.tools.hydit import translate_flags

    return _train(translate_flags(arguments))


def _pack(settings: PackSettings) -> int:
    if settings.encode:
        from muralist.tools.encode import encode

        print(encode(settings))
        return 0
    if stray := {"dtype", "random_flip"} & settings.model_fields_set:
        raise UserError(
            f"--{min(stray)} applies to latents only, and this command packs pixels.",
            fix=f"Add --encode MODEL_FOLDER, or remove --{min(stray)}.",
        )
    from muralist.tools.pack import pack

    place = settings.source, settings.destination, settings.img_size
    print(pack(*place, settings.num_workers, caption=settings.caption, cameras=settings.cameras))
    return 0


def _generate(settings: GenerateSettings) -> int:
    from muralist.generate.command import generate
    from muralist.tools.doctor.command import check_generation

    return generate(settings, preflight=check_generation).status


def _evaluate(settings: EvaluateSettings) -> int:
    from muralist.evaluate.decoders import workers_before_torch

    no_workers = nullcontext()  # a dry run computes nothing
    output = Path(settings.output_dir)
    with no_workers if settings.dry_run else workers_before_torch(settings.gpu_ids, output) as pool:
        from muralist.evaluate.command import evaluate

        return evaluate(settings, pool)


def _export(settings: ExportSettings) -> int:
    from muralist.models.weights import export
    from muralist.train.checkpoint import require_intact

    if settings.sigma_rel is None:
        require_intact(Path(settings.source))
        print(export(settings))
        return 0
    from muralist.tools.post_hoc_ema import assemble

    if "weights" in settings.model_fields_set:
        raise UserError(f"--weights {settings.weights} has no effect with --sigma_rel.", fix="Leave one of them out.")
    print(export(settings, assemble(Path(settings.source), settings.sigma_rel)))
    return 0


def _report(settings: ReportSettings) -> int:
    from muralist.evaluate.page import write_report

    folders = [Path(folder).expanduser() for folder in settings.folders]
    page = write_report(folders, Path(settings.output_dir).expanduser())
    print(f"{page}: open it in a browser.")
    return 0


def _launch(arguments: Sequence[str]) -> int:
    from muralist.core.hardware import default_processes
    from muralist.settings import LaunchSettings
    from muralist.settings.load import load
    from muralist.tools.launch import launch

    # Flags before the command belong to the launcher, the rest to the command. A partition may have a command's name.
    pairs = enumerate(zip(["", *arguments], arguments, strict=False))
    first = next((index for index, (before, word) in pairs if word in COMMANDS and before != "--partition"), None)
    if first is None:
        raise UserError(
            "`muralist launch` needs a command to start.",
            next(filter(None, (closest_match(word, COMMANDS) for word in arguments if word[:1] != "-")), ""),
            "For example: muralist launch --nproc 4 train --config base_config.yaml",
        )
    settings = load(LaunchSettings, arguments[:first], {})
    if settings.slurm:
        return _submit(settings, arguments[first:])
    stray = [name for name in ("nodes", "gpus_per_node", "partition", "time") if getattr(settings, name) is not None]
    if stray:
        flag = "--" + stray[0].replace("_", "-")
        raise UserError(f"{flag} applies to SLURM jobs only.", fix="Add --slurm, or use --nproc N on this machine.")
    command = [sys.executable, "-m", "muralist", *arguments[first:]]
    return launch(command, settings.nproc or default_processes())


def _submit(settings: LaunchSettings, arguments: Sequence[str]) -> int:
    from muralist.tools.launch import submit

    if bool(settings.nproc) == bool(settings.gpus_per_node):
        raise UserError(
            "The number of processes per node is not defined.",
            "It needs exactly one of --gpus-per-node and --nproc.",
            "Set --gpus-per-node N, or --nproc N on nodes without GPUs.",
        )
    name = arguments[0]
    loaders = {"train": _load_training, "distill": _load_distillation}
    if name in loaders:  # settings are checked now rather than after hours in a queue
        name = loaders[name]([word for word in arguments[1:] if word != "--debug"])[1]
    print(submit(settings, arguments, name))
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    from muralist.core.slurm import set_rank_environment
    from muralist.settings import DOCTOR_FLAT_NAMES, TRAIN_FLAT_NAMES, DoctorSettings, GenerateSettings, TrainSettings
    from muralist.settings.load import config_path, load, run_name
    from muralist.tools.doctor.check import CheckContext

    # Before torch is imported: the doctor reports a missing rank better than torch's store does.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    own: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):  # the other flags are those of the job
        is_own = word.partition("=")[0] in ("--json", "--timeout") or before == "--timeout"
        (own if is_own else rest).append(word)
    settings = load(DoctorSettings, own, DOCTOR_FLAT_NAMES)
    job, rest = (rest[0], rest[1:]) if rest[:1] in (["train"], ["generate"]) else ("train" if rest else "", rest)
    set_rank_environment(os.environ)
    context = CheckContext()
    if job == "train":
        planned = load(TrainSettings, rest, TRAIN_FLAT_NAMES)
        context = CheckContext(train=planned, run=Path(planned.results_dir) / run_name(planned, config_path(rest)))
    elif job == "generate":
        context = CheckContext(generate=load(GenerateSettings, rest, {}))
    from muralist.tools.doctor.command import doctor

    return doctor(settings, context)


COMMANDS = {
    "train": Command(_train, "TrainSettings"),
    "distill": Command(_distill, "DistillSettings", _TEACHER),
    "hydit": Command(_hydit, "TrainSettings"),
    "pack": _command("PackSettings", _pack, *_SOURCE_AND_DESTINATION),
    "generate": _command("GenerateSettings", _generate),
    "evaluate": _command("EvaluateSettings", _evaluate),
    "sweep": _command("SweepSettings", "muralist.tools.sweep:sweep"),
    "stats": _command("StatsSettings", "muralist.evaluate.command:stats", "source"),
    "export": _command("ExportSettings", _export, *_SOURCE_AND_DESTINATION),
    "report": _command("ReportSettings", _report, "folders"),
    "show": _command("ShowSettings", "muralist.tools.show:show", "path"),
    "board": _command("BoardSettings", "muralist.board.app:board", "root"),
    "launch": Command(_launch, "LaunchSettings"),
    "doctor": Command(_doctor, "DoctorSettings"),
    "estimate": _command("EstimateSettings", "muralist.tools.estimate:run", flat_names="ESTIMATE_FLAT_NAMES"),
    "demo": _command("DemoSettings", "muralist.demo.command:demo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if debug and words[:1] == ["launch"]:
        words.append("--debug")  # the tracebacks are those of the started processes
    return report_errors(lambda: _dispatch(words), debug)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] in ("--version", "version"):
        from muralist import __version__

        print(__version__)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UserError(f"Unknown command {name!r}.", closest_match(name, COMMANDS), "`muralist --help` lists all.")
    command = COMMANDS[name]
    own = rest if name != "launch" else rest[:1]
    if "--help" in own or "-h" in own:
        print(command.help_page(name))
        return 0
    return command.run(rest)


def script(command: str) -> None:
    """Run a command as the scripts in the project's root do: `python train.py ...` is `muralist train ...`."""
    sys.exit(main([command, *sys.argv[1:]]))


def batch_generate_script() -> None:
    """Run batch_generate_t2i_multigpu.py: `muralist generate` with the defaults of `BatchScriptSettings`."""
    COMMANDS["generate"] = _command("BatchScriptSettings", _generate)
    script("generate")
