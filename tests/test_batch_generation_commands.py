"""The documented commands of batch generation, on models small enough for two cores."""

from __future__ import annotations

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
