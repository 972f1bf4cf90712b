"""The documented commands of batch generation, on models small enough for two cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.generating import SCRIPT, other_files, read_images
from tests.support.runs import finish, start

COMPLETE_EXAMPLE = (
    "--prompts_csv ./mscoco_data/prompts.csv --output_dir ./generated_images_optimized --num_samples 10000 "
    "--gpu_ids 0 1 2 3 --seed_start 42 --num_inference_steps 20 --guidance_scale 7.5 --height 480 --width 832 "
    "--enable_half_frame --dtype bf16"
)
ON_TWO_GPUS = COMPLETE_EXAMPLE.replace("0 1 2 3", "2 3").replace("generated_images_optimized", "generated_images")
ROWS = 6
EVALUATION = REPOSITORY / "run_full_evaluation.sh"
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `python` and `muralist` are


def test_the_full_evaluation_checks_its_inputs_first(tmp_path: Path) -> None:
    """A wrong reference ends it before the model, which does not exist either, is looked at."""
    (tmp_path / "prompts.csv").write_text("prompt\na cat\n")
    variables = {"MODEL_PATH": "nowhere", "PROMPTS_CSV": "prompts.csv", "REFERENCE": str(tmp_path / "absent.npz")}
    said = finish(start("bash", EVALUATION, cwd=tmp_path, PATH=_PATH, **variables), expect=1)
    assert "absent.npz was not found" in said and "nowhere" not in said
    assert not (tmp_path / "generated_images").exists()


@pytest.mark.slow
def test_the_full_evaluation(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    """Without weights and reference, it says so before it generates, and fails after the page is written."""
    (tmp_path / "prompts.csv").write_text("prompt\na cat\na dog\n")
    variables = {
        "MODEL_PATH": str(tiny_pipeline("wan21")),
        "PROMPTS_CSV": "prompts.csv",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    variables |= {"MURALIST_INCEPTION": "", "GPU_IDS": "0"}
    flags = ["--num_inference_steps", 2, "--height", 32, "--width", 32]
    said = finish(start("bash", EVALUATION, *flags, cwd=tmp_path, PATH=_PATH, **variables), expect=1)
    lines = said.splitlines()
    assert lines[0] == "Scores to be computed: none."
    assert lines[1].startswith(
        "No fid, kid, precision, recall, density, coverage, cmmd, fd_dinov2: it compares two sets"
    )
    assert "No clip_score: it needs a CLIP model" in said and "The variables at the top of" in said
    assert "muralist: Nothing was measured." in lines[-3]
    assert len(read_images(tmp_path / "generated_images")) == 2
    assert (tmp_path / "generated_images" / "evaluation" / "report" / "index.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wan21", "hunyuan"])
def test_the_complete_example(model: str, tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    (tmp_path / "mscoco_data").mkdir()
    rows = "".join(f"{i + 1:06d},a photo of {i} cats\n" for i in range(ROWS))
    (tmp_path / "mscoco_data" / "prompts.csv").write_text(f"image_id,caption\n{rows}")
    (tmp_path / SCRIPT).symlink_to(REPOSITORY / SCRIPT)
    outputs = [
        finish(start("python", SCRIPT, *command.split(), "--model_path", tiny_pipeline(model), cwd=tmp_path))
        for command in (COMPLETE_EXAMPLE, ON_TWO_GPUS)
    ]
    assert "only 6 of the 10,000 requested rows" in outputs[0] and "has no effect on one frame" in outputs[0]
    names = [f"{row + 1:06d}_seed{42 + row}.png" for row in range(ROWS)]
    on_four, on_two = tmp_path / "generated_images_optimized", tmp_path / "generated_images"
    assert sorted(read_images(on_four)) == names
    assert read_images(on_four) == read_images(on_two)
    assert other_files(on_four) == {f"failed_prompts_gpu{gpu}.txt": "" for gpu in (0, 1, 2, 3)}
    assert other_files(on_two) == {f"failed_prompts_gpu{gpu}.txt": "" for gpu in (2, 3)}
