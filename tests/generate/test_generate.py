"""The complete command with real models; its workers are threads here and processes in tests/faults."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.data import ledger_reader
from muralist.generate import command, console
from muralist.generate.model_info import ModelInfo, inspect_model
from muralist.generate.output_dir import Header
from muralist.generate.workers import GenerateBatch, MeasureBatchSize
from muralist.models.weights import read_weights
from muralist.settings import GenerateSettings
from tests.support.jit_models import checkpoint, family, network_of
from tests.support.pipelines import build_pipeline
from tests.support.runs import only_run, train
from tests.support.worker_pools import ModelThreadPool

Capture = pytest.CaptureFixture[str]
SMALL = ("--height", 32, "--width", 32)


@pytest.fixture(scope="session")
def run(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JiT trained for a moment on two classes."""
    results = tmp_path_factory.mktemp("results")
    train("--data_path", photo_folder, "--enable_condition", "--results_dir", results, "--max_steps", 1,
          "--samples_per_gpu", 0)  # fmt: skip
    return only_run(results)


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pipeline("wan21", tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_pool", ModelThreadPool)
    for name in ("", "muralist"):  # as in a process of its own: another command may have set up its log here
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


def table(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "prompts.csv").write_text(text)
    return folder / "prompts.csv"


def generate(folder: Path, model: Path, *more: object, expect: int = 0) -> Path:
    arguments = ["--prompts_csv", folder / "prompts.csv", "--output_dir", folder / "images", "--model_path", model,
             "--num_inference_steps", 2, "--dtype", "fp32", *more]  # fmt: skip
    assert main(["generate", *map(str, arguments)]) == expect
    return folder / "images"


def files(images: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(images.iterdir()) if path.suffix in (".png", ".webp", ".mp4")
    }


def lines(images: Path) -> list[dict[str, Any]]:
    return list(ledger_reader.read_lines(images / "ledger.jsonl"))


def test_class_names_as_prompts_with_several_images_each(run: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt\nmeadow\nsunrise\nmoon\nmeadow\n")
    images = generate(tmp_path, run, "--images_per_prompt", 2, "--gpu_ids", 2, 3, expect=1)
    names = {f"00000{row}_seed{seed}.png" for row, seed in ((1, 42), (2, 43), (4, 45)) for seed in (seed, seed + 10**6)}
    made = files(images)
    assert set(made) == names and len(set(made.values())) == 6
    output = capsys.readouterr().err
    assert "1 of 4 rows will fail. The first: The prompt 'moon' does not name a class of this model." in output
    assert "8 images, 16 x 16, from" in output and "on 2 CPU processes: 2 3" in output
    assert "6 of 8 images are in" in output and "2 missing: failed_prompts_gpu*.txt give the reasons" in output
    assert (images / "failed_prompts_gpu2.txt").read_text().startswith("000003\t44\tmoon\t")
    assert (images / "failed_prompts_gpu3.txt").read_text().startswith("000003\t1000044\tmoon\t")
    ordered = sorted(lines(images), key=lambda line: (line["index"], line["copy"]))
    assert [line["gpu"] for line in ordered] == ["2", "3"] * 4
    assert sorted(path.name for path in images.iterdir() if path.name not in names) == [
        "failed_prompts_gpu2.txt", "failed_prompts_gpu3.txt", "ledger.jsonl",
    ]  # fmt: skip


def test_preflight_runs_before_devices_are_looked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: GenerateSettings, model: ModelInfo, images: int) -> None:
        assert settings.height == 16 and model.is_jit and images == 2
        raise UserError("No.")

    monkeypatch.setattr("muralist.tools.doctor.command.check_generation", refuse)
    monkeypatch.setattr(command, "select_devices", lambda ids: pytest.fail("devices were looked for"))
    table(tmp_path, "prompt\nmeadow\n")
    generate(tmp_path, run, "--images_per_prompt", 2, expect=1)


def test_the_measured_batch_size_is_kept(run: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt\n" + "meadow\n" * 5)
    images = generate(tmp_path, run, "--num_samples", 2)
    assert [type(message) for _, message in ModelThreadPool.last.sent].count(MeasureBatchSize) == 1
    header = Header.read(images / "ledger.jsonl")
    assert header is not None and header.batch_size == 1 and header.settings["num_inference_steps"] == 2
    generate(tmp_path, run, "--num_samples", 3)  # the ledger knows
    assert not any(isinstance(message, MeasureBatchSize) for _, message in ModelThreadPool.last.sent)
    before = files(images)
    generate(tmp_path, run, "--batch_size", 2, expect=1)
    assert "were made with batch size 1, not 2." in capsys.readouterr().err and files(images) == before
    generate(tmp_path, run, "--batch_size", 2, "--allow_batch_change")
    assert {line["index"]: line.get("batch_size") for line in lines(images)} == {0: None, 1: None, 2: None, 3: 2, 4: 2}
    assert before.items() <= files(images).items()
    generate(tmp_path, run)
    assert "Nothing to do: 5 of 5 images" in capsys.readouterr().err
    output = [json.loads(line) for line in (images / "ledger.jsonl").read_text().splitlines()]
    planned = [line["planned"] for line in output if "planned" in line]
    assert planned == [2, 3, 5], "by each command that had something to do, for those who watch"


def test_weights_and_guidance_interval_are_recorded(run: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt\nmeadow\n")
    asked = ("--weights", "ema2", "--guidance_interval", 0, 0.5)
    images = generate(tmp_path, run, *asked)
    printed = capsys.readouterr().err
    assert "(fp32, ema2, 2 steps, guidance 2.9 between 0 and 0.5; guidance is the model's default)" in printed
    told = json.loads(Image.open(images / "000001_seed42.png").info["settings"])  # type: ignore[arg-type]
    assert (told["weights"], told["guidance_interval"]) == ("ema2", [0, 0.5])
    generate(tmp_path, run, *asked)
    assert "Nothing to do" in capsys.readouterr().err
    generate(tmp_path, run, *asked[:2], expect=1)
    assert "Changed: guidance_interval [0.0, 0.5] -> default." in capsys.readouterr().err


def test_the_solver_of_a_jit_belongs_to_the_folder(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("one", "two", "usual"):
        table(tmp_path / name, "prompt\nmeadow\nsunrise\nmeadow\nsunrise\nmeadow\n")
    solver = ("--scheduler", "abm2", "--num_inference_steps", 5, "--batch_size", 2)
    one = generate(tmp_path / "one", run, *solver, "--gpu_ids", 0)
    assert "(fp32, 5 steps, guidance 2.9, abm2; guidance is the model's default)" in capsys.readouterr().err
    assert Header.read(one / "ledger.jsonl").settings["scheduler"] == "abm2"
    two = generate(tmp_path / "two", run, *solver, "--gpu_ids", 2, 3)
    usual = generate(tmp_path / "usual", run, "--num_inference_steps", 5, "--batch_size", 2)
    assert len(files(one)) == 5 and files(one) == files(two)
    pixels = [np.asarray(Image.open(images / "000001_seed42.png")) for images in (one, usual)]
    assert not np.array_equal(*pixels)
    capsys.readouterr()
    for another in ((), ("--scheduler", "heun"), ("--scheduler", "euler")):
        generate(tmp_path / "one", run, *another, "--num_inference_steps", 5, "--batch_size", 2, expect=1)
        changed = "abm2 -> euler" if "euler" in another else "abm2 -> None"
        assert f"scheduler {changed}" in " ".join(capsys.readouterr().err.split())
    generate(tmp_path / "one", run, *solver)


def test_a_model_without_batching_resumes_with_the_same_command(tmp_path: Path, capsys: Capture) -> None:
    lumina = build_pipeline("lumina2", tmp_path)
    table(tmp_path, "prompt\ncar\ntree\n")
    asked = [*SMALL, "--batch_size", 5]
    generate(tmp_path, lumina, *asked, "--num_samples", 1)
    assert "the batch size is 1" in capsys.readouterr().err
    images = generate(tmp_path, lumina, *asked)
    assert {message.batch_size for _, message in ModelThreadPool.last.sent if isinstance(message, GenerateBatch)} == {1}
    assert [line.get("batch_size") for line in lines(images)] == [None, None]
    generate(tmp_path, lumina, *asked)
    assert "Nothing to do: 2 of 2 images" in capsys.readouterr().err


def test_a_changed_setting_is_refused_without_overwrite(run: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt\nmeadow\nsunrise\n")
    images = generate(tmp_path, run)
    first = files(images)
    times = {path.name: path.stat().st_mtime_ns for path in images.glob("*.png")}
    for words, change in (
        (["--num_inference_steps", 3], "num_inference_steps 2 -> 3"),
        (["--seed_start", 7], "seed_start 42 -> 7"),
        (["--guidance_scale", 1.5], "guidance_scale 2.9 -> 1.5"),
        (["--dtype", "bf16"], "dtype fp32 -> bf16"),
    ):
        generate(tmp_path, run, *words, expect=1)
        assert f"Changed: {change}." in capsys.readouterr().err
    table(tmp_path, "prompt\nmeadow\nmeadow\n")
    generate(tmp_path, run, expect=1)
    assert "Row 2 of the table is not the one" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in images.glob("*.png")} == times
    generate(tmp_path, run, "--seed_start", 7, "--overwrite")
    second = files(images)
    assert list(second) == ["000001_seed7.png", "000002_seed8.png"] and not set(first.values()) & set(second.values())
    assert len(lines(images)) == 2


def test_settings_that_made_no_image_can_be_corrected_in_the_same_folder(
    wan: Path, tmp_path: Path, capsys: Capture
) -> None:
    table(tmp_path, "prompt,height,width\ncar,33,32\n")
    images = generate(tmp_path, wan, *SMALL, expect=1)
    assert files(images) == {} and [line["status"] for line in lines(images)] == ["failed"]
    table(tmp_path, "prompt\ncar\n")
    generate(tmp_path, wan, *SMALL, "--seed_start", 7)
    assert "1 image, 32 x 32, from" in capsys.readouterr().err
    assert list(files(images)) == ["000001_seed7.png"] and [line["status"] for line in lines(images)] == ["done"]
    generate(tmp_path, wan, *SMALL, "--seed_start", 8, expect=1)
    assert "Changed: seed_start 7 -> 8." in capsys.readouterr().err


def test_images_do_not_depend_on_workers_or_interruptions(wan: Path, tmp_path: Path) -> None:
    rows = "".join(f"a red car {number}{' in the rain' * (number % 4)}\n" for number in range(7))
    small = [*SMALL, "--batch_size", 3]
    made = []
    for name, labels in (("one", [0]), ("two", [5, 1]), ("three", [0, 1, 2])):
        table(tmp_path / name, "prompt\n" + rows)
        made.append(files(generate(tmp_path / name, wan, *small, "--gpu_ids", *labels)))
    table(tmp_path / "bit", "prompt\n" + rows)
    for count in (1, 5, 7):
        generate(tmp_path / "bit", wan, *small, "--num_samples", count)
    made.append(files(tmp_path / "bit" / "images"))
    assert len(set(made[0].values())) == 7
    assert made[0] == made[1] == made[2] == made[3]


def test_prompts_that_are_too_long_are_counted(
    tiny_pipeline: Callable[[str], Path], tmp_path: Path, capsys: Capture
) -> None:
    long = "many " * 120
    table(tmp_path, f"prompt\na car\n{long}one\n{long}two\na car\n{long}one\n")
    words = ["--height", "64", "--width", "64", "--guidance_scale", "3", "--batch_size", "2"]
    images = generate(tmp_path, tiny_pipeline("sdxl"), *words)
    cut = {line["index"]: line.get("prompt_cut") for line in lines(images)}
    assert cut == {0: None, 1: True, 2: True, 3: None, 4: True}
    tokens = {line["index"]: line.get("prompt_tokens") for line in lines(images)}
    assert tokens[0] is None and tokens[4] == tokens[1] == {
        "text_encoder": {"class": "CLIPTextModel", "tokens": 485, "limit": 77},
        "text_encoder_2": {"class": "CLIPTextModelWithProjection", "tokens": 485, "limit": 77},
    }  # fmt: skip
    output = capsys.readouterr()
    summary = (
        "3 of 5 prompts are longer than a text encoder reads and were truncated: to 77 tokens by CLIPTextModel "
        '(text_encoder), to 77 tokens by CLIPTextModelWithProjection (text_encoder_2) ("prompt_cut" in ledger.jsonl).'
    )
    assert summary in output.err
    assert (output.out + output.err).count("truncated") == 1  # nobody wants to read it for every prompt
    generate(tmp_path, tiny_pipeline("sdxl"), *words)
    assert "longer than" not in capsys.readouterr().err  # nothing was made


def test_rows_with_their_own_size_and_an_impossible_one(wan: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt,height,width\ncar,,\ntree,48,32\nhouse,33,32\nbike,48,32\nboat,,\n")
    images = generate(tmp_path, wan, *SMALL, "--batch_size", 2, expect=1)
    sizes = {path.name[:6]: Image.open(path).size for path in images.glob("*.png")}
    assert sizes == {"000001": (32, 32), "000002": (32, 48), "000004": (32, 48), "000005": (32, 32)}
    assert "5 images, of 3 sizes, from" in capsys.readouterr().err
    reason = (images / "failed_prompts_gpu0.txt").read_text()
    assert reason.startswith("000003\t44\thouse\tWanPipeline cannot generate images of 32 x 33 pixels")
    before = files(images)
    table(tmp_path, "prompt,height,width\ncar,,\ntree,48,32\nhouse,32,32\nbike,48,32\nboat,,\n")
    generate(tmp_path, wan, *SMALL, "--batch_size", 2)  # a failed row may be put right
    assert before.items() <= files(images).items() and len(files(images)) == 5
    assert "1 image, 32 x 32, from" in capsys.readouterr().err
    assert (images / "failed_prompts_gpu0.txt").read_text() == ""


def test_a_table_without_a_known_class_is_refused_before_anything_is_made(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    table(tmp_path, "prompt\nmedow\nmoon\n")
    images = generate(tmp_path, run, expect=1)
    assert not images.exists()
    output = capsys.readouterr().err
    assert "None of the 2 prompts names a class of this model." in output and "Did you mean meadow?" in output


def test_prompts_of_an_unconditional_model_are_warned_about(tmp_path: Path, capsys: Capture) -> None:
    spec = family()
    run = checkpoint(tmp_path / "plain", spec.describe(), network_of(spec).state_dict())
    for prompt, warned in (("a red car", True), ("unconditional", False)):
        table(tmp_path / prompt, f"prompt\n{prompt}\n")
        generate(tmp_path / prompt, run, "--num_inference_steps", 2)
        said = capsys.readouterr()
        assert ("The model is unconditional: prompts only name the images" in said.err) == warned
        assert ", guidance 1)" in said.out + said.err


def test_a_row_of_another_size_than_that_of_the_jit_fails_alone(run: Path, tmp_path: Path) -> None:
    table(tmp_path, "prompt,height,width\nmeadow,32,32\nsunrise,,\n")
    images = generate(tmp_path, run, expect=1)
    assert list(files(images)) == ["000002_seed43.png"]
    assert "16 x 16 pixels, not 32 x 32" in (images / "failed_prompts_gpu0.txt").read_text()


@pytest.mark.parametrize("kind", ["webp", "mp4"])
def test_clips(wan: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    table(tmp_path, "prompt\ncar\ntree\n")
    small = [*SMALL, "--num_frames", 5, "--video_format", kind]
    images = generate(tmp_path, wan, *small)
    assert list(files(images)) == [f"000001_seed42.{kind}", f"000002_seed43.{kind}"]
    if kind == "webp":
        with Image.open(images / "000001_seed42.webp") as clip:
            assert clip.n_frames == 5 and clip.size == (32, 32)
            frames = []
            for number in range(5):
                clip.seek(number)
                frames.append(np.asarray(clip.convert("RGB")))
        assert all(not np.array_equal(one, other) for one, other in pairwise(frames))
    (images / f"000001_seed42.{kind}").write_bytes(b"cut off")
    before = files(images)
    generate(tmp_path, wan, *small)
    assert files(images)[f"000002_seed43.{kind}"] == before[f"000002_seed43.{kind}"]
    assert len(files(images)[f"000001_seed42.{kind}"]) > 100


def test_folders_that_are_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    table(tmp_path, "prompt\nmeadow\n")
    (tmp_path / "images").write_text("a file")
    generate(tmp_path, run, expect=1)
    assert "Cannot write" in capsys.readouterr().err
    (tmp_path / "images").unlink()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "000001_seed42.png").write_bytes(b"somebody else's")
    generate(tmp_path, run, expect=1)
    assert "holds 000001_seed42.png, but no ledger" in capsys.readouterr().err
    (tmp_path / "images" / "ledger.jsonl").write_text("my own notes\n")
    generate(tmp_path, run, expect=1)
    assert "is not a ledger that this muralist can read" in capsys.readouterr().err
    assert (tmp_path / "images" / "000001_seed42.png").read_bytes() == b"somebody else's"
    assert (tmp_path / "images" / "ledger.jsonl").read_text() == "my own notes\n"


def test_rows_that_fail_alike_do_not_keep_later_rows_from_being_made(
    wan: Path, tmp_path: Path, capsys: Capture
) -> None:
    bad = "prompt,height,width\n" + "car,33,32\n" * 17
    table(tmp_path, bad)
    small = [*SMALL, "--batch_size", 2]
    images = generate(tmp_path, wan, *small, expect=1)
    assert "The first 16 images all failed for the same reason." in capsys.readouterr().err and files(images) == {}
    table(tmp_path, "prompt,height,width\ncar,,\n" + bad.partition("\n")[2])
    generate(tmp_path, wan, *small, "--num_samples", 1)
    table(tmp_path, "prompt,height,width\ncar,,\n" + bad.partition("\n")[2] + "tree,,\n")
    generate(tmp_path, wan, *small, expect=1)
    assert list(files(images)) == ["000001_seed42.png", "000019_seed60.png"]
    assert "2 of 19 images are in" in capsys.readouterr().err


def test_fast_mode_tells_how_far_it_is_from_exact_mode(wan: Path, tmp_path: Path, capsys: Capture) -> None:
    steps = ("--num_inference_steps", 8, "--height", 64, "--width", 64, "--gpu_ids", 0, 1)
    prompts = "prompt\n" + "".join(f"car number {row}\n" for row in range(10))
    for folder in ("fast", "exact"):
        table(tmp_path / folder, prompts)
    fast = generate(tmp_path / "fast", wan, "--preset", "fast", "--batch_size", 2, *steps)
    output = capsys.readouterr().err
    exact = generate(tmp_path / "exact", wan, "--batch_size", 2, *steps)
    compared = {file.name: file for file in (fast / ".exact").glob("*.png")}
    assert sorted(compared) == [f"{row + 1:06d}_seed{row + 42}.png" for row in range(8)]
    for name, file in compared.items():
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(Image.open(exact / name)))
    distances = [line.get("psnr_to_exact") for line in ledger_reader.read_lines(fast / "ledger.jsonl")]
    distances = [distance for distance in distances if distance is not None]
    assert len(distances) == 8 and all(5 < distance < 99 for distance in distances)
    assert f"Fast mode: PSNR {np.mean(distances):.1f} dB (worst {min(distances):.1f} dB) to exact mode on 8" in output
    header = Header.read(fast / "ledger.jsonl")
    assert header and header.settings["preset"] == "fast: guidance in 4 and the network in 5 of 8 steps, fp8"
    assert "preset" not in Header.read(exact / "ledger.jsonl").settings  # type: ignore[union-attr]
    generate(tmp_path / "fast", wan, "--batch_size", 2, *steps, expect=1)
    assert "preset fast: guidance in 4 and the network in 5 of 8 steps, fp8 -> " in capsys.readouterr().err
    generate(tmp_path / "fast", wan, "--overwrite", "--batch_size", 2, *steps)
    assert files(fast) == files(exact) and not (fast / ".exact").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the worker's, told by the command
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_deleted_while_the_model_loads_is_reported_and_not_recreated(
    wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    table(tmp_path, "prompt\ncar\ntree\n")
    describe = console.describe_job

    def delete(*arguments: Any) -> str:
        shutil.rmtree(tmp_path / "images")
        return describe(*arguments)

    monkeypatch.setattr(console, "describe_job", delete)  # just before the model is loaded
    images = generate(tmp_path, wan, *SMALL, expect=1)
    assert "was deleted while the model was being loaded. " in " ".join(capsys.readouterr().err.split("\n"))
    assert not images.exists() and not any(thread.is_alive() for thread in ModelThreadPool.last.threads)


def test_an_official_checkpoint_is_read_once_by_each_worker_and_only_looked_at_by_the_command(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {f"net.{name}": value for name, value in read_weights(run, "ema1").items()}
    torch.save({"model_ema1": states}, tmp_path / "official.pth")
    loads, verified = [], []
    load, open_member = torch.load, zipfile.ZipFile.open
    monkeypatch.setattr(torch, "load", lambda file, **more: loads.append(more["mmap"]) or load(file, **more))
    monkeypatch.setattr(
        zipfile.ZipFile,
        "open",
        lambda archive, member: verified.append(member.filename) or open_member(archive, member),
    )
    inspect_model(GenerateSettings(prompts_csv="", output_dir="", model_path=str(tmp_path / "official.pth")))
    assert loads == [True] and not verified  # the data is mapped and not read
    loads.clear()
    table(tmp_path, "prompt\n0\n1\n0\n")
    generate(tmp_path, tmp_path / "official.pth", "--gpu_ids", 0, 1)
    assert loads == [True] * 3 and len(verified) == 2 * len(set(verified))  # the command and two workers


@pytest.mark.parametrize("name", ["zimage", "qwenimage"])
def test_prompts_of_varying_length_are_batched_by_length(name: str, tmp_path: Path) -> None:
    """Their embeddings are as long as the prompt: rows of one length share batches, with the same bytes on any worker."""
    model = build_pipeline(name, tmp_path)
    texts = ["a red car", "snow", "night in the rain with many lights and a long way to go home", "a long road " * 9]
    prompts = "prompt\n" + "".join(f"{texts[row % 4]} {row}\n" for row in range(11))
    one, three = tmp_path / "one", tmp_path / "three"
    for folder, gpus in ((three, (0, 1, 2)), (one, (0,))):
        table(folder, prompts)
        generate(folder, model, *SMALL, "--batch_size", 3, "--gpu_ids", *gpus)
    sizes = [len(message.samples) for _, message in ModelThreadPool.last.sent if isinstance(message, GenerateBatch)]
    assert sum(sizes) == 11 and max(sizes) == 3
    made = files(one / "images")
    assert len(set(made.values())) == 11 and files(three / "images") == made
    header = Header.read(one / "images" / "ledger.jsonl")
    assert header is not None and header.batch_size == 3 and not header.one_at_a_time
