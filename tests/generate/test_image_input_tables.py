"""Tables with image inputs: sizes, batches, refusals, resuming, and rows that fail alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from muralist.cli import main
from muralist.data import ledger_reader
from muralist.data.prompts import open_prompt_table
from muralist.generate import command
from muralist.generate.plan import Plan, Sample
from tests.support.runs import finish, start
from tests.support.worker_pools import ModelThreadPool

Build = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
ROWS = 9


@pytest.fixture(autouse=True)
def clean_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", "muralist"):  # as in a process of its own
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)


def write_inputs(folder: Path, columns: str = "image,strength", rows: int = ROWS) -> Path:
    """A table and its images, of two sizes and two strengths."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    lines = [f"prompt,{columns}"]
    for row in range(rows):
        shape = (40, 52) if row % 4 == 1 else (32, 32)
        Image.fromarray(random.integers(0, 255, (*shape, 3), dtype=np.uint8)).save(folder / f"{row}.png")
        mask = np.zeros(shape, dtype=np.uint8)
        mask[8:24, 8:24] = 255
        Image.fromarray(mask).save(folder / f"{row}_mask.png")
        cells = {"image": f"{row}.png", "mask": f"{row}_mask.png", "control_image": f"{(row + 1) % rows}.png",
                 "strength": "" if row % 3 else "0.5"}  # fmt: skip
        lines.append(",".join((f"a red cube {row}", *(cells[column] for column in columns.split(",")))))
    (folder / "prompts.csv").write_text("\n".join(lines) + "\n")
    return folder / "prompts.csv"


def arguments(table: Path, model: Path, images: Path, *more: object) -> list[str]:
    given = ["--prompts_csv", table, "--output_dir", images, "--model_path", model, "--num_inference_steps", 4,
             "--dtype", "fp32", "--batch_size", 3, *more]  # fmt: skip
    return ["generate", *map(str, given)]


def files(images: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(images.glob("*.png"))}


def lines(images: Path) -> dict[int, dict[str, Any]]:
    return {line["index"]: line for line in ledger_reader.read_lines(images / "ledger.jsonl")}


@pytest.mark.parametrize(
    ("model", "columns", "name"),
    [
        ("sd", "image,strength", "StableDiffusionImg2ImgPipeline"),
        ("sdxl", "image,mask,strength", "StableDiffusionXLInpaintPipeline"),
        ("sd_inpaint", "image,mask", "StableDiffusionInpaintPipeline"),
        ("sd_controlnet", "control_image", "StableDiffusionControlNetPipeline"),
        ("sdxl_controlnet", "image,control_image,strength", "StableDiffusionXLControlNetImg2ImgPipeline"),
        ("pix2pix", "image", "StableDiffusionInstructPix2PixPipeline"),
        ("zimage", "image,strength", "ZImageImg2ImgPipeline"),
    ],
)
@pytest.mark.usefixtures("threads")
def test_bytes_with_one_and_three_workers_and_a_broken_input(
    model: str, columns: str, name: str, tiny_pipeline: Build, tmp_path: Path, capsys: Capture
) -> None:
    table, folder = write_inputs(tmp_path / "table", columns), tiny_pipeline(model)
    assert main(arguments(table, folder, tmp_path / "one")) == 0
    expected = files(tmp_path / "one")
    assert len(set(expected.values())) == ROWS and f"with {name} (" in capsys.readouterr().err
    broken, image = table.parent / "4.png", columns.split(",")[0]
    row = 4 if image == "image" else 3  # the control image of row 3
    data, status = broken.read_bytes(), broken.stat()
    broken.write_bytes(data[: len(data) // 2])
    assert main(arguments(table, folder, tmp_path / "three", "--gpu_ids", 0, 1, 2)) == 1
    failed = [line for line in lines(tmp_path / "three").values() if line["status"] == "failed"]
    assert row in {line["index"] for line in failed} and len(failed) == (1 + ("control_image,s" in columns))
    assert all("4.png is a broken image" in line["error"] for line in failed)
    broken.write_bytes(data)
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(arguments(table, folder, tmp_path / "three", "--gpu_ids", 0, 1, 2)) == 0
    assert files(tmp_path / "three") == expected


@pytest.mark.usefixtures("threads")
def test_a_changed_input_is_refused_and_a_touched_one_is_not(
    tiny_pipeline: Build, tmp_path: Path, capsys: Capture
) -> None:
    table, images = write_inputs(tmp_path / "table", rows=3), tmp_path / "images"
    given = arguments(table, tiny_pipeline("sd"), images)
    assert main(given) == 0
    line = lines(images)[0]
    assert line["inputs"] == {"image": "0.png", "strength": 0.5} and set(line["input_files"]["image"]) == {
        "bytes", "sha256", "changed",
    }  # fmt: skip
    assert json.loads(str(Image.open(images / line["file"]).info["inputs"])) == line["inputs"]
    os.utime(table.parent / "0.png")
    shutil.move(table.parent, tmp_path / "moved")  # paths are relative to the table
    given = arguments(tmp_path / "moved" / "prompts.csv", tiny_pipeline("sd"), images)
    assert main(given) == 0
    capsys.readouterr()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "moved" / "0.png")
    assert main(given) == 1
    assert "0.png, changed since 000001_seed42.png was made from it." in capsys.readouterr().err
    (tmp_path / "moved" / "0.png").unlink()
    assert main(given) == 1
    assert "0.png, is missing, and 000001_seed42.png was made from it." in capsys.readouterr().err
    shutil.copy(tmp_path / "moved" / "2.png", tmp_path / "moved" / "0.png")
    assert main([*given, "--overwrite"]) == 0


def test_a_class_that_is_not_supported_is_refused_before_loading(
    tiny_pipeline: Build, tmp_path: Path, capsys: Capture
) -> None:
    model = shutil.copytree(tiny_pipeline("kontext"), tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxFillPipeline"}))
    assert main(arguments(write_inputs(tmp_path, "image", rows=1), model, tmp_path / "images")) == 1
    assert "FluxFillPipeline needs image inputs that generate does not support." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "columns", "sentence"),
    [
        ("hunyuan", "image", "HunyuanDiTPipeline cannot use the column image of"),
        ("sd", "control_image", "StableDiffusionPipeline cannot use the column control_image of"),
        ("sd_inpaint", "image", "StableDiffusionInpaintPipeline needs the column mask, which"),
        ("sd_controlnet", "strength", "StableDiffusionControlNetPipeline needs the column control_image, which"),
        ("kontext", "image,mask", "FluxKontextPipeline cannot use the column mask of"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_loading(
    model: str, columns: str, sentence: str, tiny_pipeline: Build, tmp_path: Path, capsys: Capture
) -> None:
    table = write_inputs(tmp_path, columns, rows=2)
    assert main(arguments(table, tiny_pipeline(model), tmp_path / "images")) == 1
    assert sentence in capsys.readouterr().err and not (tmp_path / "images").exists()


@pytest.mark.parametrize("flag", [("--preset", "fast"), ("--cfg_truncation_step", "2")])
def test_truncated_guidance_is_refused_where_it_was_not_made_for(
    flag: tuple[str, str], tiny_pipeline: Build, tmp_path: Path, capsys: Capture
) -> None:
    table = write_inputs(tmp_path, "image", rows=2)
    assert main(arguments(table, tiny_pipeline("pix2pix"), tmp_path / "images", *flag)) == 1
    assert f"{flag[0]}" in (told := capsys.readouterr().err) and "is not for StableDiffusionInstructPix2Pix" in told


@pytest.mark.usefixtures("threads")
def test_inputs_that_are_all_missing_are_refused_at_once(tiny_pipeline: Build, tmp_path: Path, capsys: Capture) -> None:
    write_inputs(tmp_path, rows=1)
    (tmp_path / "prompts.csv").write_text("prompt,image\na,x.png\nb,\n")
    given = arguments(tmp_path / "prompts.csv", tiny_pipeline("sd"), tmp_path / "images")
    assert main(given) == 1
    assert "has usable inputs. The first: The input" in capsys.readouterr().err
    (tmp_path / "prompts.csv").write_text("prompt,image\na,x.png\nb,\nc,0.png\n")
    assert main(given) == 1
    assert "2 of 3 rows will fail. The first: The input" in capsys.readouterr().err
    assert "The row has no image" in lines(tmp_path / "images")[1]["error"]


@pytest.mark.usefixtures("threads")
def test_a_strength_without_use_changes_nothing(tiny_pipeline: Build, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prompts.csv").write_text("prompt\na\n")
    given = arguments(tmp_path / "prompts.csv", tiny_pipeline("sd"), tmp_path / "images", "--height", 32, "--width", 32)
    assert main(given) == 0
    (tmp_path / "prompts.csv").write_text("prompt,strength\na,0.3\n")
    assert main(given) == 0
    assert "Unused columns of" in (told := capsys.readouterr().err) and "Nothing to do" in told


def test_samples_without_inputs_keep_their_key() -> None:
    assert Sample(0, 0, 0, "1", 42, "a", "", 8, 8, "1.png").key == "def02c301f1ba7b9"


@pytest.mark.usefixtures("threads")
def test_the_size_is_of_the_row_else_of_the_command_else_of_the_input(tiny_pipeline: Build, tmp_path: Path) -> None:
    write_inputs(tmp_path, rows=2)
    (tmp_path / "prompts.csv").write_text("prompt,image,width,height\na,0.png,,\nb,1.png,,\nc,0.png,64,48\n")
    for images, more, sizes in (
        ("own", (), [(32, 32), (40, 48), (48, 64)]),
        ("given", ("--width", 24, "--height", 40), [(40, 24), (40, 24), (48, 64)]),
    ):
        assert main(arguments(tmp_path / "prompts.csv", tiny_pipeline("sd"), tmp_path / images, *more)) == 0
        made = lines(tmp_path / images)
        assert [(made[row]["height"], made[row]["width"]) for row in range(3)] == sizes


def test_batches_share_size_and_strength(tmp_path: Path) -> None:
    table = open_prompt_table(str(write_inputs(tmp_path)))
    sizes = np.array([[32, 32], [40, 48], [0, 0]] * 3)
    plan = Plan(table, 1, 42, "", (32, 32), "png", input_columns=("image", "strength"), input_sizes=sizes)
    order = plan.grouped_by_size(np.arange(ROWS)).tolist()
    keys = [plan.batch_key(index) for index in order]
    assert (
        sorted(order) == list(range(ROWS))
        and len(set(keys)) == sum(keys[place] != keys[place - 1] for place in range(1, ROWS)) + 1
    )
    assert keys[0] == (32, 32, 0.5) and set(keys) == {(32, 32, 0.5), (40, 48, -1.0), (32, 32, -1.0)}


@pytest.mark.parametrize("value", ["0", "1.5", "-1", "nan", "x"])
def test_a_strength_out_of_range_names_its_line(value: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "prompts.csv").write_text(f"prompt,image,strength\na,b.png,{value}\n")
    assert main(arguments(tmp_path / "prompts.csv", tmp_path, tmp_path / "images")) == 1
    told = capsys.readouterr().err
    assert "holds no model" in told or f"The strength '{value}' in line 2 of" in told
    with pytest.raises(Exception, match=f"The strength '{value}' in line 2 of"):
        open_prompt_table(str(tmp_path / "prompts.csv"))


@pytest.mark.usefixtures("threads")
def test_fast_mode_counts_the_steps_that_run(tiny_pipeline: Build, tmp_path: Path) -> None:
    table = write_inputs(tmp_path, "image,mask,strength", rows=4)
    more = ("--preset", "fast", "--num_inference_steps", 10)
    assert main(arguments(table, tiny_pipeline("sd"), tmp_path / "images", *more)) == 0
    assert all(15 < line["psnr_to_exact"] < 99 for line in lines(tmp_path / "images").values())


@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_bytes(tiny_pipeline: Build, tmp_path: Path) -> None:
    table = write_inputs(tmp_path / "table", "image,mask,strength", rows=24)
    run = ["python", "-m", "muralist"]
    finish(start(*run, *arguments(table, tiny_pipeline("sd"), tmp_path / "one")))
    given = arguments(table, tiny_pipeline("sd"), tmp_path / "three", "--gpu_ids", 0, 1, 2)
    process = start(*run, *given, new_session=True)
    deadline = time.monotonic() + 120
    while not files(tmp_path / "three") and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, expect=None)
    assert 0 < len(files(tmp_path / "three")) < 24
    finish(start(*run, *given))
    assert files(tmp_path / "three") == files(tmp_path / "one")
