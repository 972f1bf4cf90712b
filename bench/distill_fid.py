"""Few steps for a time: distill a JiT for some seconds, and score the student beside its teacher.

python bench/speedrun.py TEACHER.json --data cifar10.npz --inception_weights WEIGHTS --folder FOLDER --seconds 300
python bench/distill_fid.py RECORD.json --data cifar10.npz --inception_weights WEIGHTS --folder FOLDER --seconds 300 \\
    [--teacher FOLDER/runs/best-0] [--recipe two one four two+lr1e-4 ...] [--teacher_guidance 1.5]
    [--solvers heun:50 abm2:20 abm2:10 abm2:5] [flags of distill]

Students are timed, planned and scored as the trainings of bench/speedrun.py are, and the record is written and continued in
the same way. A recipe is STUDENT with changes from RECIPES, joined by +. The teacher is scored with every solver and number
of steps, on the same classes and seeds. FOLDER/sheet.png has the first images of all: columns are seeds.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from bench.speedrun import Flags, Record, Speedrun, add_options, read_flags, start
from PIL import Image

from muralist.core.images import contact_sheet
from muralist.core.run_dir import atomic_open
from muralist.diffusion import samplers
from muralist.evaluate.inputs import find_images
from muralist.models.jit_distill import read_teacher_spec
from muralist.models.weights import latest_checkpoint

STUDENT = (
    "--batch_size=512 --use_amp=true --optimizer=adamw --learning_rate=2e-4 --warmup_steps=50 --lr_schedule=cosine "
    "--samples_per_gpu=0 --log_every=50 --use_tensorboard=false"
)
RECIPES = {
    "two": "--steps=2",
    "one": "--steps=1",
    "four": "--steps=4",
    "lr1e-4": "--learning_rate=1e-4",
    "lr4e-4": "--learning_rate=4e-4",
    "beta0.5": "--beta1=0.5 --beta2=0.99",
    "muon": "--optimizer=muon",
    "batch256": "--batch_size=256",
}
EXAMPLES = 20  # images of each row of the sheet


class Distillation(Speedrun):
    """One call of this script."""

    script, recipes = "bench/distill_fid.py", RECIPES

    def __init__(self, options: argparse.Namespace, further: Flags) -> None:
        guidance = {"--guidance": [f"{options.teacher_guidance:g}"]}
        super().__init__(options, read_flags(shlex.split(STUDENT)) | guidance | further)
        self.teacher = latest_checkpoint(options.teacher or options.folder / "runs" / "best-0")
        self.spec = read_teacher_spec(self.teacher, "ema1")

    def run_all(self) -> None:
        """Train and score the students; score the teacher, first in as many steps as it is judged by."""
        super().run_all()
        words = {"recipe": "teacher", "seed": 0, "path": str(self.teacher)}
        if (teacher := self.record.get("teacher", {})).get("path") != words["path"]:
            self.record["teacher"] = teacher = {**words, "scores": []}
        for word in self.options.solvers:
            solver, _, steps = word.partition(":")
            sampler = {"sampler steps": int(steps), "solver": solver, "guidance": self.options.teacher_guidance}
            sampler["passes"] = passes(solver, int(steps), self.options.teacher_guidance)
            wanted = {"step": int(self.teacher.name.split("_")[1]), **sampler, "images": self.options.teacher_images}
            self.score(teacher, self.teacher, wanted)

    def command(self) -> tuple[list[object], int]:
        """Return the command that distills, and its batch size."""
        return ["distill", self.teacher], int(self.further["--batch_size"][0])

    def samplers(self) -> list[Record]:
        """Return the sampler of a student, which is its own."""
        return [{}]

    def sampler_name(self, wanted: Record) -> str:
        """Name a sampler in the names of folders."""
        return "{solver}{sampler steps}".format_map(wanted) if "solver" in wanted else "own"

    def sampler_flags(self, wanted: Record) -> list[object]:
        """Return the flags of generate for a sampler."""
        if "solver" not in wanted:
            return []
        return ["--scheduler", wanted["solver"], *super().sampler_flags(wanted)]

    def keep_examples(self, name: str, images: Path) -> None:
        """Copy the first images, and draw the sheet of all models."""
        folder = self.folder / "examples"
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        for path in find_images(images, "--images")[:EXAMPLES]:
            shutil.copy(path, folder / name)
        names = sorted(path.name for path in folder.iterdir())
        rows = [[Image.open(path).convert("RGB") for path in sorted((folder / one).iterdir())] for one in names]
        size = rows[0][0].size
        with atomic_open(self.folder / "sheet.png") as file:
            contact_sheet(rows, EXAMPLES, size, 2, labels=names).save(file, "PNG")

    def table(self) -> str:
        """Return the scores of students and teacher, the best FID first."""
        columns = ("model", "seed", "s", "images seen", "sampler", "passes", "scored", "FID (95%)", "KID test",
                   "precision test", "recall test", "images/s")  # fmt: skip
        runs = [*self.record["runs"], *([self.record["teacher"]] if "teacher" in self.record else [])]
        rows = [(run, score) for run in runs for score in run["scores"] if "kid, test images" in score]
        lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for run, score in sorted(rows, key=lambda pair: pair[1]["fid"]):
            low, high = score["fid, 95%"]
            own = run.get("settings", {}).get("distill", {}).get("steps")
            cells = (run["recipe"], run["seed"], f"{run.get('seconds', 0):.0f}", f"{run.get('images', 0):,}",
                     self.sampler_name(score), score.get("passes", own), f"{score['images']:,}",
                     f"{score['fid']:.2f} ({low:.2f} to {high:.2f})", f"{score['kid, test images']:.5f}",
                     f"{score['precision, test images']:.3f}", f"{score['recall, test images']:.3f}",
                     f"{score['images per second']:,.0f}")  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)


def passes(solver: str, steps: int, guidance: float) -> int:
    """Return the network passes of an image."""
    settings = samplers.SamplerSettings(solver, steps, guidance, (0.1, 1.0))  # type: ignore[arg-type]
    times = samplers.time_grid(steps, settings.solver)
    evaluated = [*times[:-1], *(times[1:-1] if solver == "heun" else [])]
    return sum(1 + (samplers.guidance_at(t, settings) != 1) for t in evaluated)


def main() -> None:
    """Measure distillations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser, RECIPES)
    parser.add_argument("--teacher", type=Path, help="its run or checkpoint; default: FOLDER/runs/best-0")
    parser.add_argument("--teacher_guidance", type=float, default=1.5, help="folded into the students")
    parser.add_argument(
        "--solvers", nargs="*", default=["heun:50", "abm2:20", "abm2:10", "abm2:5"], help="of the teacher"
    )
    parser.add_argument("--teacher_images", type=int, default=50_000, help="generated and scored for each of them")
    start(Distillation, parser)


if __name__ == "__main__":
    main()
