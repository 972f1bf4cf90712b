"""Folders written by version 0.1 still open: runs resume, generation continues, reports, packed data and sweeps are read.

The tests use the command line and files only, because the fixtures (fixtures/v0_1/README.txt says how they were made)
stand for folders of users.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
import yaml
from PIL import Image

from tests.support.fork_server import Command
from tests.support.runs import HARDWARE, finish

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"
INCEPTION = Path(os.environ.get("MURALIST_INCEPTION") or Path(__file__).parent.parent / ".cache" / "default_1.pt")
RUN = "JiT-T-8-16-cond-c739d9"  # the settings give this name: another would be another run
JIT = ["train", "--model", "JiT-T/8", "--img_size", "16", "--enable_condition", "--init_from", "none", "--num_workers", "0",
       "--warmup_steps", "3", "--learning_rate", "1e-3", "--no_use_tensorboard"]  # fmt: skip
TRAIN = [*JIT, "--data_path", "driving_world", "--max_samples", "64", "--batch_size", "4", "--sample_steps", "2",
         "--ckpt_every", "4"]  # fmt: skip
GENERATE = ["generate", "--prompts_csv", "prompts.csv", "--model_path", "tiny_pixart", "--height", "32", "--width", "32",
         "--dtype", "fp32", "--batch_size", "1", "--num_inference_steps", "16", "--gpu_ids", "0"]  # fmt: skip
CLASSES = ["generate", "--model_path", f"results/{RUN}/checkpoints/step_0000008", "--guidance_scale", "1.5",
           "--num_inference_steps", "4", "--dtype", "fp32", "--batch_size", "2"]  # fmt: skip
CLOCK = {"time", "train/samples_per_second", "train/tokens_per_second", "train/mfu", "train/data_wait_fraction"}
pytestmark = pytest.mark.slow  # real commands in processes of their own
needs_inception = pytest.mark.skipif(not INCEPTION.is_file(), reason="The Inception weights are missing: make weights")


@pytest.fixture()
def place(tmp_path: Path) -> Path:
    """Return a copy of the fixtures with archives unpacked."""
    shutil.copytree(FIXTURES, tmp_path, dirs_exist_ok=True)
    for archive in tmp_path.rglob("*.tar.xz"):
        with tarfile.open(archive) as content:
            content.extractall(archive.parent, filter="data")
        archive.unlink()
    return tmp_path


def muralist(place: Path, *words: object) -> str:
    """Run a command and return its output."""
    return finish(Command([*map(str, words)], place, environment(place)), timeout=240)


def environment(place: Path) -> dict[str, str]:
    apart = ("MURALIST_", "SLURM_", "NPROC", "RANK", "WORLD_SIZE", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
    return kept | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(place / "cache"), "PYTHONUNBUFFERED": "1"}


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare names in order, except those that 0.1 did not write, and values within the rounding of another CPU."""
    assert [[name for name in line if name not in HARDWARE] for line in found] == [list(line) for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in theirs.keys() - CLOCK:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4 if "grad" in name else 1e-5), (
                name,
                theirs["step"],
            )


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and modification time of every image."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.png")}


def assert_same_image(mine: Path, theirs: Path) -> None:
    """Compare pixels within one level, which another CPU may round differently, and the metadata."""
    one, other = Image.open(mine), Image.open(theirs)
    assert one.mode == other.mode and one.size == other.size
    assert list(one.info) == list(other.info)
    distance = np.abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int))
    assert distance.max() <= 1, mine.name


def tensor_names(file: Path) -> dict[str, Any]:
    """Return names, types and shapes in a safetensors file."""
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    return {name: (facts["dtype"], facts["shape"]) for name, facts in header.items() if name != "__metadata__"}


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on(place: Path) -> None:
    run = place / "results" / RUN
    before = (run / "metrics.jsonl").read_bytes()
    sample = (run / "samples" / "step_0000008" / "gpu_0_sample.png").read_bytes()
    muralist(place, *TRAIN, "--max_steps", 12)
    assert [path.name for path in (place / "results").iterdir()] == [RUN], "the same command made another run"
    assert (run / "metrics.jsonl").read_bytes().startswith(before), "lines that were there have changed"
    lines = json_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert_same_metrics(lines, json_lines(place / "expected" / "continued_metrics.jsonl"))
    assert (run / "samples" / "step_0000008" / "gpu_0_sample.png").read_bytes() == sample
    # One GPU makes more samples now; those of before keep their names.
    assert files_under(run / "samples" / "step_0000012") > files_under(run / "samples" / "step_0000008")

    old, new = run / "checkpoints" / "step_0000008", run / "checkpoints" / "step_0000012"
    assert (run / "checkpoints" / "latest").read_text().strip() == new.name
    assert files_under(new) == files_under(old)
    for which in ("model", "ema1", "ema2"):
        assert tensor_names(new / f"{which}.safetensors") == tensor_names(old / f"{which}.safetensors")
    manifest = json.loads((new / "manifest.json").read_text())
    expected = json.loads((place / "expected" / "continued_manifest.json").read_text())
    assert list(manifest) == list(expected)
    assert manifest["files"].keys() == expected["files"].keys()
    assert manifest["epoch_loss"] == pytest.approx(expected["epoch_loss"], rel=1e-5)
    assert manifest["versions"].keys() == expected["versions"].keys()
    aside = {"written", "files", "sha256", "epoch_loss", "versions"}
    assert {k: v for k, v in manifest.items() if k not in aside} == {
        k: v for k, v in expected.items() if k not in aside
    }


def test_an_earlier_checkpoint_goes_on_too(place: Path) -> None:
    """Resuming from step 4 gives the metrics that version 0.1 wrote."""
    (run := place / "results" / RUN).rename(place / "kept")
    muralist(place, *TRAIN, "--max_steps", 8, "--resume", "kept/checkpoints/step_0000004")
    found = {line["step"]: line for line in json_lines(run / "metrics.jsonl")}
    expected = {line["step"]: line for line in json_lines(place / "expected" / "continued_metrics.jsonl")}
    assert_same_metrics([found[step] for step in range(5, 9)], [expected[step] for step in range(5, 9)])
    assert_same_image(*(top / "samples" / "step_0000008" / "gpu_0_sample.png" for top in (run, place / "kept")))


def test_a_configuration_is_read(place: Path) -> None:
    """The settings in config.yaml give the same run name."""
    shutil.copy(place / "results" / RUN / "config.yaml", place / "config.yaml")
    muralist(place, "train", "--config", "config.yaml", "--max_steps", 1, "--samples_per_gpu", 0)
    run = place / "results" / f"config-{RUN[-6:]}"
    before, after = (yaml.safe_load((file / "config.yaml").read_text()) for file in (place, run))
    before["max_steps"], before["samples"]["per_gpu"] = 1, 0
    for name, value in before.items():
        kept = {key: after[name].get(key) for key in value} if isinstance(value, dict) else after.get(name)
        assert kept == value, f"{name}: a setting is gone, or has another default"


def test_a_checkpoint_generates(place: Path) -> None:
    muralist(place, *CLASSES, "--prompts_csv", "classes.csv", "--output_dir", "again")
    theirs, mine = place / "finished", place / "again"
    assert files_under(mine) == files_under(theirs)
    for image in sorted(theirs.glob("*.png")):
        assert_same_image(mine / image.name, image)
    ours, old = json_lines(mine / "ledger.jsonl"), json_lines(theirs / "ledger.jsonl")
    assert list(ours[0]) == list(old[0])
    assert ours[0]["settings"] == old[0]["settings"], "settings that tell one folder from another, or the fingerprint"
    by_row = [{line["index"]: line for line in lines if "index" in line} for lines in (ours, old)]
    for row, line in by_row[1].items():
        assert list(by_row[0][row]) == list(line)
        same = line.keys() - {"seconds", "changed", "bytes", "sha256"}
        assert {name: by_row[0][row][name] for name in same} == {name: line[name] for name in same}


def test_a_finished_folder_is_extended(place: Path) -> None:
    before = contents(place / "finished")
    table = place / "classes.csv"
    table.write_text(table.read_text() + "scene4,A rural road with natural scenery and minimal traffic\n")
    muralist(place, *CLASSES, "--prompts_csv", "classes.csv", "--output_dir", "finished")
    after = contents(place / "finished")
    assert {name: after[name] for name in before} == before, "existing images were generated again"
    assert after.keys() - before.keys() == {"scene4_seed46.png"}


def test_an_unfinished_folder_is_finished(place: Path) -> None:
    folder, expected = place / "unfinished", place / "expected" / "unfinished"
    before, ledger = contents(folder), (folder / "ledger.jsonl").read_bytes()
    assert len(before) == 5 and (folder / ".ledger" / "gpu0.jsonl").is_file()
    muralist(place, *GENERATE, "--output_dir", "unfinished")
    after = contents(folder)
    assert {name: after[name] for name in before} == before, "existing images were generated again"
    assert after.keys() - before.keys() == {path.name for path in expected.iterdir()}
    for image in expected.iterdir():
        assert_same_image(folder / image.name, image)
    assert (folder / "ledger.jsonl").read_bytes().startswith(ledger)
    rows = [line["index"] for line in json_lines(folder / "ledger.jsonl") if line.get("status") == "done"]
    assert rows == list(range(8))
    other = {path.name for path in folder.iterdir() if path.suffix != ".png"}
    assert other == {"ledger.jsonl", "failed_prompts_gpu0.txt"}


def test_an_evaluation_is_shown(place: Path) -> None:
    muralist(place, "report", "evaluation", "sweep/small-4/ema1_cfg1/evaluation", "--output_dir", "page")
    page = (place / "page" / "index.html").read_text()
    assert "A rainy street with reflections on the pavement and buildings" in page
    for folder in ("evaluation", "sweep/small-4/ema1_cfg1/evaluation"):
        fid = json.loads((place / folder / "report.json").read_text())["fid"]
        assert f">{fid:.0f}<" in page, "FID is not on the page"


def test_the_board_shows_everything(place: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "muralist", "board", ".", "--port", "0"],
        cwd=place, env=environment(place), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]

        def ask(what: str, **query: str) -> Any:
            with urllib.request.urlopen(f"{address}api/{what}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
                return json.load(answer)

        overview = ask("overview")
        listed = {kind: {thing["id"] for thing in overview[kind]} for kind in ("run", "generation", "evaluation")}
        assert listed["run"] == {f"results/{RUN}"}
        assert {"finished", "unfinished", "sweep/small-4/ema1_cfg1"} <= listed["generation"]
        assert {"evaluation", "sweep/full-4/ema1_cfg2_0.1-1/evaluation"} <= listed["evaluation"]
        assert "train/loss" in json.dumps(ask("curves", run=f"results/{RUN}"))
        assert ask("samples", run=f"results/{RUN}")["steps"] == [4, 8]
        assert "cube4_seed104.png" in json.dumps(ask("images", folder="unfinished"))
    finally:
        server.terminate()
        server.wait(timeout=20)


def test_packed_data_is_read_and_written_alike(place: Path) -> None:
    muralist(place, *JIT, "--data_path", "packed", "--batch_size", 2, "--samples_per_gpu", 0, "--val_fraction", 0,
             "--max_steps", 3, "--run_name", "packed_run")  # fmt: skip
    found = json_lines(place / "results" / "packed_run" / "metrics.jsonl")
    assert_same_metrics(found, json_lines(place / "expected" / "packed_metrics.jsonl"))
    muralist(place, "pack", "pictures", "packed_again", "--img_size", 16, "--num_workers", 1)
    ours, old = place / "packed_again", place / "packed"
    assert files_under(ours) == files_under(old)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (ours, old)]
    for manifest in manifests:
        for file in manifest["files"]:  # another pyarrow may write the same rows in other bytes
            del file["bytes"], file["sha256"]
    assert manifests[0] == manifests[1]
    tables = [pyarrow.ipc.open_file(folder / "00000.arrow").read_all() for folder in (ours, old)]
    assert tables[0].equals(tables[1], check_metadata=True)


@needs_inception
def test_an_evaluation_uses_its_cached_features(place: Path) -> None:
    old = json.loads((place / "evaluation" / "report.json").read_text())
    output = muralist(place, "evaluate", "--images", "finished", "--reference", "pictures", "--inception_weights", INCEPTION,
                      "--output_dir", "evaluation")  # fmt: skip
    assert "features of 0 computed, of 12 cached" in output
    new = json.loads((place / "evaluation" / "report.json").read_text())
    assert old.keys() <= new.keys() and old["scores"].keys() <= new["scores"].keys()
    for name, score in old["scores"].items():
        if score["value"] is not None:
            # 0.1.0 gave scores without any spread, such as a precision of 0, an interval of no width.
            for part in ("value", "low", "high") if score["low"] < score["high"] else ("value",):
                assert new["scores"][name][part] == pytest.approx(score[part], rel=1e-6), name


@needs_inception
def test_a_sweep_is_complete(place: Path) -> None:
    before = json.loads((place / "sweep" / "sweep.json").read_text())
    images = {top: contents(top) for top in (place / "sweep").glob("*/*")}
    muralist(place, "sweep", "--model_path", f"results/{RUN}", "--reference", "pictures", "--output_dir", "sweep",
             "--weights", "ema1", "--guidance_scale", 1, 2, "--num_samples", 4, "--full_samples", 4,
             "--num_inference_steps", 2, "--inception_weights", INCEPTION)  # fmt: skip
    assert json.loads((place / "sweep" / "sweep.json").read_text()) == before
    assert {top: contents(top) for top in images} == images
