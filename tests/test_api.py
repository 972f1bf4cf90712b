"""The Python API: the results of the commands, in scripts, notebooks and threads, and a process that stays as it was."""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import muralist
from muralist.cli import main
from muralist.data.ledger_reader import read_lines
from tests.conftest import REPOSITORY
from tests.support.evaluating import inception_weights, scenes, write_images
from tests.support.generating import made_by, read_images
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.runs import environment, finish, losses, metrics, start

STEPS = ["--num_inference_steps", 3]
SMALL = {"height": 32, "width": 32, "dtype": "fp32", "num_inference_steps": 3}
TINY_RUN = {"model": "JiT-T/8", "img_size": 16, "batch_size": 4, "sample_steps": 2, "use_tensorboard": False}
PROMPTS = [f"a red cube on table {row}" for row in range(5)]


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a JiT with three classes."""
    spec = family("cat", "dog", "bird")
    folder = tmp_path_factory.mktemp("runs") / "pets"
    return checkpoint(folder, spec.describe(), network_of(spec).state_dict())


def command(model: Path, output: Path, rows: list[dict[str, Any]], *more: object) -> dict[str, bytes]:
    """Return the images of `muralist generate` by name."""
    table = output.parent / f"{output.name}.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--prompts_csv", table, "--model_path", model, "--output_dir", output, *more]
    assert main(["generate", *map(str, words)]) == 0
    return read_images(output)


def pixels(images: Any) -> list[bytes]:
    return [image.tobytes() for image in images]


def stored_pixels(files: dict[str, bytes], folder: Path) -> list[bytes]:
    return [Image.open(folder / name).tobytes() for name in sorted(files)]


# Importing.


def test_importing_costs_nothing() -> None:
    code = """
        import sys, muralist
        heavy = {"torch", "diffusers", "pydantic", "numpy", "PIL", "yaml", "rich"} & sys.modules.keys()
        assert not heavy, heavy
        assert dir(muralist) == sorted(muralist.__all__)
        assert callable(muralist.generate) and callable(muralist.train) and callable(muralist.evaluate)
        heavy = {"torch", "diffusers", "pydantic", "numpy"} & sys.modules.keys()
        assert not heavy, heavy
        muralist.UserError, muralist.load_pipeline, muralist.GenerationRecord, muralist.TrainingResult
        assert not {"torch", "diffusers", "pydantic", "numpy"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=REPOSITORY)


def test_packages_are_functions_and_packages() -> None:
    import muralist.generate.plan  # sets the attribute `generate` of the root package

    assert muralist.generate.plan.SEED_STRIDE == 1_000_000
    assert list(inspect.signature(muralist.generate).parameters) == ["model", "prompts", "output_dir", "settings"]
    assert muralist.evaluate is sys.modules["muralist.evaluate"]
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        muralist.generat  # noqa: B018


# Generating.


def test_image_inputs_have_the_pixels_of_the_command(
    tmp_path: Path, tiny_pipeline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_pipeline("sd")
    for row, color in enumerate(("red", "green", "blue")):
        Image.new("RGB", (32, 40), color).save(tmp_path / f"{row}.png")
    rows = [{"prompt": f"a cat {row}", "image": f"{row}.png", "strength": (0.6, 0.9)[row % 2]} for row in range(3)]
    steps = ("--num_inference_steps", 3, "--dtype", "fp32", "--batch_size", 2)
    expected = stored_pixels(command(model, tmp_path / "command", rows, *steps), tmp_path / "command")
    monkeypatch.chdir(tmp_path)
    settings = {"num_inference_steps": 3, "dtype": "fp32"}
    with_paths = [row | {"image": Path(str(row["image"]))} for row in rows]
    records = muralist.generate(model, with_paths, "api", **settings, batch_size=2)
    assert [record.error for record in records] == [None] * 3 and {record.height for record in records} == {40}
    assert stored_pixels(read_images(tmp_path / "api"), tmp_path / "api") == expected
    with muralist.load_pipeline(model, "cpu", **settings) as pipeline:
        text = pixels(pipeline("a cat 0", height=40, width=32))
        assert pixels(pipeline(rows, batch_size=2)) == expected
        assert pixels(pipeline("a cat 0", height=40, width=32)) == text != expected[:1]  # loaded again
        with pytest.raises(muralist.UserError, match="gone.png does not exist"):
            pipeline([{"prompt": "a cat", "image": "gone.png"}])
        with pytest.raises(muralist.UserError, match="The image of a row is <PIL.Image.Image .*, not a path"):
            pipeline([{"prompt": "a cat", "image": Image.new("RGB", (8, 8))}])
        assert pixels(pipeline(rows, batch_size=2)) == expected


def test_pipelines_that_need_images_can_be_loaded(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    Image.new("RGB", (32, 40), "red").save(tmp_path / "red.png")
    settings: dict[str, Any] = {"num_inference_steps": 2, "dtype": "fp32"}
    with muralist.load_pipeline(tiny_pipeline("sd_controlnet"), "cpu", **settings) as pipeline:
        images = pipeline([{"prompt": "a cat", "control_image": tmp_path / "red.png"}])
        assert images[0].size == (32, 40)
        with pytest.raises(muralist.UserError, match="needs the column control_image, which prompts does not have"):
            pipeline("a cat")


def test_generate_makes_the_files_of_the_command_and_resumes(tmp_path: Path, pets: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": name} for name in ("cat", "dog", "bird", "dog", "cat")]
    rows[1] |= {"seed": 7, "image_id": "seven"}
    expected = command(pets, tmp_path / "command", rows, *STEPS, "--batch_size", 3)
    output, steps = tmp_path / "api", {"num_inference_steps": 3}
    first = muralist.generate(pets, rows[:3], output, **steps, batch_size=3)
    assert {record.path.name for record in first if record.path} == read_images(output).keys()
    before = {path: path.stat().st_mtime_ns for path in output.glob("*.png")}
    records = muralist.generate(pets, rows, output, **steps, batch_size=3, gpu_ids=[4, 2])  # two rows are appended
    assert read_images(output) == expected
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [(record.index, record.copy, record.error) for record in records] == [(row, 0, None) for row in range(5)]
    assert records[1] == muralist.GenerationRecord(1, 0, "seven", "dog", 7, 16, 16, output / "seven_seed7.png")
    assert [record.seed for record in records] == [42, 7, 44, 45, 46]
    assert muralist.generate(pets, tmp_path / "command.jsonl", output, **steps) == records
    assert {file.name for file in output.iterdir()} == {*expected, "ledger.jsonl"} | {
        f"failed_prompts_gpu{label}.txt" for label in (0, 2, 4)
    }
    with pytest.raises(muralist.UserError, match="Row 1 of the table is not the one .* 'bird'"):
        muralist.generate(pets, ["bird", *rows[1:]], output, **steps)
    with pytest.raises(muralist.UserError, match="num_inference_steps 3 -> 4.*or give overwrite"):
        muralist.generate(pets, rows, output, num_inference_steps=4)
    assert read_images(output) == expected


def test_rows_that_fail_have_an_error_and_no_path(tmp_path: Path, pets: Path) -> None:
    records = muralist.generate(
        pets, ["cat", "unicorn", {"prompt": "dog", "seed": np.int64(3)}], tmp_path / "out", num_inference_steps=2,
        images_per_prompt=2,
    )  # fmt: skip
    assert [(record.prompt, record.copy, record.seed) for record in records] == [
        ("cat", 0, 42), ("cat", 1, 1_000_042), ("unicorn", 0, 43), ("unicorn", 1, 1_000_043), ("dog", 0, 3),
        ("dog", 1, 1_000_003),
    ]  # fmt: skip
    for record in records:
        failed = record.prompt == "unicorn"
        assert (record.path is None) == failed
        assert ("does not name a class" in (record.error or "")) == failed
        assert failed or Image.open(record.path).size == (record.width, record.height)  # type: ignore[arg-type]
    (tmp_path / "out" / "000001_seed42.png").unlink()
    again = muralist.generate(pets, "cat", tmp_path / "out", num_inference_steps=2)  # one prompt, one copy
    assert len(again) == 1 and again[0].path == records[0].path and again[0].path.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts is empty."),
        ({"prompts": ["cat", 3]}, "Item 1 of prompts is 3, neither text nor a mapping."),
        ({"prompts": [{"text": "cat"}]}, "There is no prompt or caption in line 1 of prompts."),
        ({"prompts": [{"prompt": "cat", "seed": -1}]}, "The seed -1 in line 1 of prompts is not an integer"),
        ({"prompts": "missing.csv"}, "The prompt table missing.csv was not found. .* Give prompts a file"),
        ({"num_inference_step": 4}, "Unknown setting num_inference_step. Did you mean num_inference_steps?"),
        ({"num_inference_step": 4}, "`muralist generate --help` lists every setting."),
        ({"num_inference_steps": "many"}, "num_inference_steps is 'many': expected an integer above 0."),
        ({"num_inference_steps": True}, "num_inference_steps is True: expected an integer above 0."),
        ({"prompts_csv": "x.csv"}, "prompts_csv is the argument prompts here. Leave prompts_csv out."),
        (
            {"height": 8},
            "This JiT model generates images of 16 x 16 pixels, not 16 x 8. .* Leave height and width out.",
        ),
        ({"model": "nothing"}, "The model nothing was not found. .* on the Hugging Face Hub, as model"),
    ],
)
def test_refusals_name_arguments(arguments: dict[str, Any], message: str, tmp_path: Path, pets: Path) -> None:
    with pytest.raises(muralist.UserError, match=message) as error:
        muralist.generate(**({"model": pets, "prompts": "cat", "output_dir": tmp_path / "out"} | arguments))
    assert " --" not in str(error.value).replace("`muralist generate --help`", "")
    assert not (tmp_path / "out").exists()


def test_a_launcher_of_several_ranks_is_refused(tmp_path: Path, pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(muralist.UserError, match="called by each of 4 ranks"):
        muralist.generate(pets, "cat", tmp_path / "out")
    with pytest.raises(muralist.UserError, match="called by each of 4 ranks"):
        muralist.evaluate(tmp_path, None, tmp_path / "out")


# Loaded pipelines.


def test_a_pipeline_has_the_pixels_of_the_command_at_every_batch_size(tmp_path: Path, tiny_pipeline: Any) -> None:
    model = tiny_pipeline("sd")
    rows = [{"prompt": prompt, "seed": 3 * row} for row, prompt in enumerate(PROMPTS)]
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    flags += ["--guidance_scale", 3, "--negative_prompt", "blue"]
    expected = {}
    for batch_size in (1, 3):
        folder = tmp_path / f"batches of {batch_size}"
        expected[batch_size] = stored_pixels(command(model, folder, rows, *flags, "--batch_size", batch_size), folder)
    assert expected[1] != expected[3]  # their last bits
    seeds = [row["seed"] for row in rows]
    with muralist.load_pipeline(model, **SMALL, guidance_scale=3, negative_prompt="blue") as pipeline:
        assert pipeline.device == "cpu"
        assert pixels(pipeline(PROMPTS, seeds)) == expected[1]
        assert pixels(pipeline(PROMPTS, seeds=np.array(seeds), batch_size=3)) == expected[3]
        assert pixels(pipeline(rows, batch_size=3)) == expected[3]
        assert pipeline([]) == []
        # Settings of one call do not stay.
        other = pipeline(PROMPTS[:2], num_inference_steps=2, guidance_scale=1.0, height=40, width=48)
        assert [image.size for image in other] == [(48, 40)] * 2
        assert pixels(pipeline(PROMPTS[:1], seeds[0])) == expected[1][:1]
    with pytest.raises(muralist.UserError, match="The pipeline is closed."):
        pipeline("a car")
    with muralist.load_pipeline(str(model), dtype="fp32", device="cpu") as fresh:
        same = fresh(
            PROMPTS[:2], num_inference_steps=2, guidance_scale=1, height=40, width=48, negative_prompt="blue",
            cfg_truncation_step=None,
        )  # fmt: skip
        assert pixels(same) == pixels(other)
        guided = {"guidance_scale": 3, "negative_prompt": "blue", "cfg_truncation_step": 1}
        truncated = fresh(PROMPTS[:1], [0], height=32, width=32, num_inference_steps=3, **guided)
    folder = tmp_path / "truncated"
    files = command(model, folder, rows[:1], *flags, "--cfg_truncation_step", 1)
    assert pixels(truncated) == stored_pixels(files, folder)
    assert pixels(truncated) != expected[1][:1]


def test_clips_are_lists_of_frames(tmp_path: Path, tiny_pipeline: Any) -> None:
    model, prompts = tiny_pipeline("wan21"), PROMPTS[:2]
    clips = {"num_frames": 5, "video_format": "webp"}
    records = muralist.generate(model, prompts, tmp_path / "clips", **SMALL, **clips, batch_size=2)
    with muralist.load_pipeline(model, **SMALL) as pipeline:
        found: Any = pipeline(prompts, num_frames=5, batch_size=2)
        assert [image.size for image in pipeline(prompts)] == [(32, 32)] * 2
    for frames, record in zip(found, records, strict=True):
        assert len(frames) == 5 and record.path is not None
        stored = Image.open(record.path)  # lossless
        for index, frame in enumerate(frames):
            stored.seek(index)
            assert stored.convert("RGB").tobytes() == frame.tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["sd", "wan21"])
def test_a_pipeline_on_a_gpu_has_the_pixels_of_the_command(name: str, tmp_path: Path, tiny_pipeline: Any) -> None:
    """Compiled and with CUDA graphs, though this process may have used the GPU with other settings before."""
    torch.ones(2, device="cuda")
    size = {"height": 32, "width": 32, "num_inference_steps": 3}
    records = muralist.generate(tiny_pipeline(name), PROMPTS, tmp_path / "out", **size, batch_size=2)
    with muralist.load_pipeline(tiny_pipeline(name), **size) as pipeline:
        assert pipeline.device == "cuda:0"
        pipeline(PROMPTS[:1], num_inference_steps=5, guidance_scale=2.0)
        expected = [Image.open(record.path).tobytes() for record in records if record.path]
        assert pixels(pipeline(PROMPTS, batch_size=2)) == expected


def test_a_pipeline_of_a_run_here(tmp_path: Path, pets: Path) -> None:
    records = muralist.generate(pets, ["cat", "dog"], tmp_path, num_inference_steps=4, batch_size=1)
    pipeline = muralist.load_pipeline(pets)
    assert pixels(pipeline(["cat", "dog"], num_inference_steps=4)) == pixels(Image.open(r.path) for r in records)  # type: ignore[arg-type]
    assert pixels(pipeline("dog", seeds=43, num_inference_steps=4)) == pixels([Image.open(records[1].path)])  # type: ignore[arg-type]
    guided = pipeline("cat", num_inference_steps=4, guidance_scale=8.0, guidance_interval=(0.2, 0.7))
    assert pixels(guided) != pixels([Image.open(records[0].path)])  # type: ignore[arg-type]
    for arguments, message in (
        ({"prompts": "unicorn"}, "The prompt 'unicorn' does not name a class of this model."),
        ({"prompts": ["cat"], "seeds": [1, 2]}, "There are 2 seeds for 1 prompts."),
        ({"prompts": ["cat"], "seeds": ["one"]}, "expected integers"),
        ({"prompts": ["cat"], "batch_size": 0}, "batch_size is 0: expected an integer above 0."),
        ({"prompts": ["cat"], "dtype": "fp32"}, "dtype cannot be set here. It belongs to the loaded model"),
        ({"prompts": ["cat"], "steps": 4}, "Unknown setting steps."),
        ({"prompts": ["cat"], "height": 8, "width": 8}, "This JiT model generates images of 16 x 16 pixels"),
    ):
        with pytest.raises(muralist.UserError, match=message):
            pipeline(**arguments)
    assert pixels(pipeline("cat", num_inference_steps=4)) == pixels([Image.open(records[0].path)])  # type: ignore[arg-type]
    (process,) = [worker.process for worker in pipeline._process._pool._workers.values()]
    process.kill()
    with pytest.raises(muralist.UserError, match="The process of the pipeline was killed by SIGKILL."):
        pipeline("cat")
    for arguments, message in (
        ({"path": tmp_path / "nothing"}, "was not found"),
        ({"path": pets, "output_dir": "x"}, "output_dir cannot be set here. It concerns the files and workers"),
        ({"path": pets, "gpu_ids": [0]}, "gpu_ids cannot be set here."),
        ({"path": pets, "device": "tpu"}, "device is 'tpu': expected cpu, cuda or cuda:N."),
        ({"path": pets, "scheduler": "EulerDiscrete"}, "The scheduler eulerdiscrete does not fit a JiT model."),
    ):
        with pytest.raises(muralist.UserError, match=message):
            muralist.load_pipeline(**arguments)


# Scripts without `if __name__ == "__main__":`, notebooks, threads and interrupts.

GENERATE = """
    import muralist
    print("the script runs", flush=True)
    records = muralist.generate(MODEL, ["cat", "dog"], "out", num_inference_steps=2)
    assert [record.path.is_file() for record in records] == [True] * 2
"""
NOTEBOOK = """
import asyncio, __main__, threading

async def cell():  # a notebook's kernel runs cells inside its event loop
    exec(CODE, vars(__main__))
    failures = []
    def work():
        try:
            vars(__main__)["records"] = muralist.generate(MODEL, ["cat"], "thread", num_inference_steps=2)
            muralist.train(data_path="driving_world", max_samples=8, max_steps=1, results_dir="results", **TINY_RUN)
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures
    assert records[0].path.is_file()

del __main__.__spec__
__main__.__spec__ = None
asyncio.run(cell())
"""


def write_script(folder: Path, model: Path, code: str) -> str:
    script = f"MODEL, TINY_RUN = {str(model)!r}, {TINY_RUN!r}\n{textwrap.dedent(code)}"
    (folder / "script.py").write_text(script)
    return script


def test_a_notebook_needs_no_main_guard(tmp_path: Path, pets: Path) -> None:
    """Its code has no file that workers could import."""
    script = write_script(tmp_path, pets, f"CODE = {textwrap.dedent(GENERATE)!r}\n{NOTEBOOK}")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the script runs") == 1


def test_training_and_evaluating_need_no_main_guard_when_loaders_are_spawned(tmp_path: Path) -> None:
    write_images(tmp_path / "images", scenes(6, seed=1))
    write_script(tmp_path, tmp_path, """
        import multiprocessing
        import muralist
        print("the script runs", flush=True)
        multiprocessing.set_start_method("spawn")
        result = muralist.train(
            data_path="driving_world", max_samples=8, max_steps=2, results_dir="results", num_workers=1, **TINY_RUN
        )
        assert result.step == 2 and result.checkpoint.is_dir(), result
        from muralist.evaluate.decoders import DecoderPool
        with DecoderPool(2, 1) as pool:
            pass
        print(muralist.evaluate("images", "images", "evaluation")["images"]["count"], "images")
    """)  # fmt: skip
    said = finish(start("python", "script.py", cwd=tmp_path))
    assert said.count("the script runs") == 1 and "6 images" in said


def test_a_script_without_main_guard_is_interrupted_and_the_same_call_resumes(tmp_path: Path, pets: Path) -> None:
    """Workers that imported the script would call its commands again."""
    write_script(
        tmp_path,
        pets,
        """
        import muralist
        print("the script runs", flush=True)
        call = dict(model=MODEL, prompts=["cat", "dog"] * 10, output_dir="out", num_inference_steps=12)
        try:
            muralist.generate(**call)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        records = muralist.generate(**call, gpu_ids=[0, 1])
        print(len([record.path.name for record in records]), "images")
        assert records == muralist.generate(**call)
        with muralist.load_pipeline(MODEL) as pipeline:
            print("sizes", [image.size for image in pipeline(["cat", "dog"], num_inference_steps=2)], flush=True)
        """,
    )
    process = start("python", "script.py", cwd=tmp_path)
    while not made_by(tmp_path / "out", 0):
        assert process.poll() is None, finish(process, expect=None)
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = finish(process)
    done = [line["index"] for line in read_lines(tmp_path / "out" / "ledger.jsonl")]
    assert "interrupted\n" in said and "of 20 images exist already" in said and "20 images" in said
    assert sorted(done) == list(range(20))  # each was made once
    assert len(read_images(tmp_path / "out")) == 20
    assert said.count("the script runs") == 1
    assert "sizes [(16, 16), (16, 16)]" in said


def test_an_interrupted_pipeline_answers_the_next_call(tmp_path: Path, tiny_pipeline: Any) -> None:
    with muralist.load_pipeline(tiny_pipeline("sd"), **SMALL) as pipeline:
        expected = pixels(pipeline("a car"))
        timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pipeline("a car", num_inference_steps=900)
        assert pixels(pipeline("a car")) == expected
        assert time.monotonic() - started < 10  # it did not take the 900 steps first


def test_an_interrupt_of_training_saves_a_checkpoint(tmp_path: Path) -> None:
    write_script(tmp_path, tmp_path, """
        import muralist
        call = dict(data_path="driving_world", max_samples=64, results_dir="results", **TINY_RUN)
        try:
            muralist.train(**call, epochs=10_000)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)  # fmt: skip
    process = start("python", "script.py", cwd=tmp_path)
    while not (found := list(tmp_path.glob("results/*/metrics.jsonl"))) or not found[0].read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "interrupted\n" in finish(process)
    run = found[0].parent
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{metrics(run)[-1]['step']:07d}"


# Training and evaluating.


def test_train_is_the_command_and_returns_its_run(tmp_path: Path, photo_folder: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {name: JiT-T/8, img_size: 16}\nbatch_size: 8\nlearning_rate: 1e-3\nmax_steps: 3\n")
    common: dict[str, Any] = {"data_path": str(photo_folder), "num_workers": 0, "use_tensorboard": False}
    flags = [word for name, value in common.items() for word in (f"--{name}", str(value))]
    assert main(["train", "--config", str(config), "--results_dir", str(tmp_path / "command"), *flags]) == 0
    dotted = {"checkpoint.every": 2, "samples.per_gpu": 0}
    result = muralist.train(config, results_dir=tmp_path / "api", **common, **dotted)
    (expected,) = (tmp_path / "command").iterdir()
    assert (result.run, result.step, result.images) == (tmp_path / "api" / expected.name, 3, 24)
    assert result.checkpoint == result.run / "checkpoints" / "step_0000003"
    assert losses(result.run) == losses(expected) and result.loss == losses(expected)[-1]
    assert muralist.train(config, results_dir=tmp_path / "api", **common, **dotted) == result  # nothing left to do
    longer = muralist.train(config, results_dir=tmp_path / "api", **common, **dotted, max_steps=5)
    assert (longer.run, longer.step, len(losses(longer.run))) == (result.run, 5, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sise": 4}, "Unknown setting batch_sise. Did you mean batch_size?"),
        (
            {"lr": 1e-3, "learning_rate": 1e-4},
            "lr is 0.001, and learning_rate is 0.0001. Both are names of the setting",
        ),
        ({"optim.blr": 1e-3, "lr": 1e-3}, "lr and optim.blr cannot both be given."),
        ({"epochs": 0}, "epochs is 0: expected an integer above 0."),
        ({"data_path": "nowhere"}, "nowhere"),
        ({"config": "nowhere.yaml"}, "Cannot read the config file nowhere.yaml"),
    ],
)
def test_refused_settings_of_training(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(muralist.UserError, match=message):
        muralist.train(**({"data_path": "driving_world", "results_dir": tmp_path / "results"} | arguments))
    assert not (tmp_path / "results").exists()


def test_evaluate_returns_the_report(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", scenes(5, seed=1))
    report = muralist.evaluate(images, None, tmp_path / "evaluation", seed=3)
    assert report == json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert report["fid"] is None and report["images"]["count"] == 5 and report["settings"]["seed"] == 3
    assert "fid" in [line["metric"] for line in report["missing"]]
    with pytest.raises(muralist.UserError, match="nowhere"):
        muralist.evaluate(tmp_path / "nowhere", None, tmp_path / "evaluation")
    with pytest.raises(muralist.UserError, match="Unknown setting refrence"):
        muralist.evaluate(images, None, tmp_path / "evaluation", refrence="x")


# The caller's process.


def process_state() -> dict[str, Any]:
    loggers = [logging.getLogger(), logging.getLogger("muralist")]
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    return {
        "environment": dict(os.environ),
        "logging": [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers],
        "signals": [signal.getsignal(number) for number in signals],
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "hooks": (sys.excepthook, threading.excepthook),
        "folder": Path.cwd(),
        "main": sys.modules["__main__"],
        "threads": torch.get_num_threads(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),
    }


def test_calls_leave_the_process_as_it_was(tmp_path: Path, pets: Path, photo_folder: Path) -> None:
    handler = logging.StreamHandler()
    logging.getLogger("muralist").addHandler(handler)
    interrupts: list[int] = []
    before_test = signal.signal(signal.SIGCHLD, lambda number, frame: interrupts.append(number))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = process_state()
        calls: list[Callable[[], object]] = [
            lambda: muralist.generate(pets, ["cat", "dog"], tmp_path / "out", num_inference_steps=2),
            lambda: muralist.train(data_path=photo_folder, results_dir=tmp_path / "r", max_steps=1, **TINY_RUN),
            lambda: muralist.evaluate(tmp_path / "out", None, tmp_path / "evaluation"),
            lambda: muralist.load_pipeline(pets)("cat", num_inference_steps=2),
        ]
        for call in calls:
            call()
            assert process_state() == before
        with pytest.raises(muralist.UserError):
            muralist.train(data_path="nowhere")
        assert process_state() == before
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGCHLD, before_test)
        logging.getLogger("muralist").removeHandler(handler)
    assert "images are in" not in (next((tmp_path / "r").iterdir()) / "logs" / "train.log").read_text()


# The page in the docs.


def blocks_of_the_page() -> tuple[list[str], list[str]]:
    """Return the code blocks of docs/python.md, and those that need the Inception weights."""
    page = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    found = re.findall(r"(<!-- needs.*?-->\n)?```python\n(.*?)```", page, re.DOTALL)
    return [code for mark, code in found if not mark], [code for mark, code in found if mark]


def run_script(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a script in this process, where the heavy packages are imported already; return what it printed."""
    (folder / "script.py").write_text(code)
    monkeypatch.chdir(folder)
    runpy.run_path("script.py", run_name="__main__")
    said = capfd.readouterr()
    return said.out + said.err


def test_the_page_is_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, _ = blocks_of_the_page()
    assert len(plain) == 4
    said = run_script("\n".join(plain), tmp_path, monkeypatch, capfd)
    assert "2 44 /" in said and "3 45 The prompt 'no such class' does not name a class of this model." in said
    assert "3 images; it compares two sets" in said
    first, again = (Image.open(tmp_path / name) for name in ("first.png", "images/000001_seed7.png"))
    assert first.size == again.size == (32, 32)


def test_the_block_of_the_page_that_needs_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "default_1.pt").symlink_to(inception_weights().absolute())
    for folder, seed in (("images", 1), ("real_images", 2)):
        write_images(tmp_path / folder, scenes(4, seed))
    (code,) = blocks_of_the_page()[1]
    said = run_script(f"import muralist\n{code}", tmp_path, monkeypatch, capfd)
    report = json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert report["fid"] > 0 and f"{report['fid']} {report['kid']}\n" in said
