"""The doctor, with every trouble made real."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from muralist.cli import main
from muralist.scale.checks.check import Check, Circumstances, Status, examine, ok
from muralist.scale.checks.every import CHECKS
from muralist.scale.checks.ranks import judge_clocks, judge_exchange
from muralist.scale.meeting import SIZES, Exchange
from muralist.scale.slurm import hosts, tasks_per_node
from muralist.scale.troubleshooting import page
from tests.conftest import REPOSITORY
from tests.support.disks import leave_free, read_only_view, small_disk
from tests.support.generating import write_table
from tests.support.runs import TINY, finish, start

NAMED_BY_THE_GUIDES = [
    "NCCL timeout", "out of memory", "loss oscillates", "error during sampling", "the model was not loaded right",
    "cannot write to directory", "permissions", "disk space", "a process that hangs", "wrong model path",
    "a GPU that does not answer", "results that differ", "GPUs without work", "1001 over 4",
]  # fmt: skip


def ask(capsys: pytest.CaptureFixture[str], *words: object, expect: int) -> dict[str, dict[str, Any]]:
    """The doctor's findings by name."""
    capsys.readouterr()
    assert main(["doctor", *map(str, words), "--json"]) == expect
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (expect == 0)
    return {one["name"]: one for one in told["checks"]}


def slurm(**variables: str):
    (check,) = [check for check in CHECKS if check.name == "SLURM"]
    return examine(check, Circumstances(environment={"SLURM_JOB_ID": "7", **variables})).finding


def test_every_trouble_of_the_guides_has_a_check_and_the_page_is_made_of_them() -> None:
    answered = " ".join(check.trouble for check in CHECKS)
    assert [trouble for trouble in NAMED_BY_THE_GUIDES if trouble.lower() not in answered.lower()] == []
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    written = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    assert written == page(), "run `make docs`"


def test_the_list_and_the_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "no GPU" in said or "free:" in said
    assert main(["doctor", "--data_path", str(tmp_path / "nothing"), "--results_dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("failed")]
    assert "data set" in lines[place] and "nothing" in lines[place]
    assert lines[place + 1].strip().startswith("why: ") and lines[place + 2].strip().startswith("do:  ")
    assert "1 failed" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_a_broken_image_among_the_data(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data" / "train"
    shutil.copytree(photo_folder, data)
    words = ["train", *TINY, "--data_path", data, "--results_dir", tmp_path / "results"]
    found = ask(capsys, *words, expect=0)
    assert found["data set"]["seen"].startswith("48 images, 48 decoded at ")
    (data / "meadow" / "007.jpg").write_bytes((data / "meadow" / "007.jpg").read_bytes()[:200])
    found = ask(capsys, *words, expect=1)
    assert "1 of them broken" in found["data set"]["seen"] and "007.jpg" in found["data set"]["seen"]
    assert "muralist pack" in found["data set"]["remedy"]


def test_a_full_disk_and_one_nobody_may_write(
    photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "--data_path", photo_folder, "--max_steps", "1"]
    with small_disk(tmp_path / "disk", "60m") as disk:
        found = ask(capsys, "train", *words, "--results_dir", disk, expect=0)
        assert found["disk space"]["status"] == "warning" and "--keep_last" in found["disk space"]["remedy"]
        leave_free(disk, 4 * 4096)
        found = ask(capsys, "train", *words, "--results_dir", disk, expect=1)
        assert "No space left on the disk" in found["disk space"]["seen"]
        # train itself says so before it reads data or loads anything
        assert main(["train", *map(str, words), "--results_dir", str(disk)]) == 1
        assert "a checkpoint takes 0.04 GB" in capsys.readouterr().err
        assert [path.name for path in disk.iterdir()] == ["filler"]
    with read_only_view(tmp_path / "there", tmp_path / "view") as view:
        found = ask(capsys, "train", *words, "--results_dir", view / "results", expect=1)
        assert "Read-only file system" in found["write permission"]["seen"]
        assert (
            found["write permission"]["remedy"] == "Have the disk mounted for writing, or give another --results_dir."
        )
        assert main(["train", *map(str, words), "--results_dir", str(view)]) == 1
        assert "Read-only file system" in capsys.readouterr().err


def write_model(folder: Path) -> Path:
    """A folder in diffusers layout, as far as it is looked at before anything is loaded."""
    for part, file in (("transformer", "config.json"), ("scheduler", "scheduler_config.json")):
        (folder / part).mkdir(parents=True)
        (folder / part / file).write_text("{}")
    parts = {"transformer": ["diffusers", "Network"], "scheduler": ["diffusers", "Scheduler"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **parts}))
    save_file({"a": np.zeros(64, np.float32)}, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def test_a_model_that_lacks_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    table = write_table(tmp_path, rows=5)
    words = ["generate", "--prompts_csv", table, "--model_path", model, "--output_dir", tmp_path / "out",
             "--height", "32", "--width", "32", "--gpu_ids", "0", "1"]  # fmt: skip
    found = ask(capsys, *words, expect=0)
    assert found["rows over GPUs"]["seen"] == "5 over 2: 2, 3"
    assert found["prompts table"]["seen"].startswith("5 rows, 5 of them read")
    whole = next((model / "transformer").glob("*.safetensors"))
    shards = [whole.with_name(f"diffusion_pytorch_model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    index = whole.with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"a": shards[0].name, "b": shards[1].name}}))
    whole.rename(shards[0])
    found = ask(capsys, *words, expect=1)
    assert f"transformer lacks {shards[1].name}" in found["model folder"]["seen"]
    assert main(list(map(str, words))) == 1  # generate itself refuses it before anything is loaded
    assert "is not whole" in capsys.readouterr().err and not (tmp_path / "out").exists()
    index.unlink()
    shards[0].rename(whole)
    whole.write_bytes(whole.read_bytes()[:-10])
    found = ask(capsys, *words, expect=1)
    assert f"{whole} is cut short" in found["model folder"]["seen"]


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = ask(capsys, expect=1)
        assert "is in use on this machine" in found["port"]["seen"] and "ss -ltnp" in found["port"]["remedy"]
    assert ask(capsys, expect=0)["port"]["status"] == "ok"
    monkeypatch.setenv("MASTER_PORT", "many")
    assert "is no port" in ask(capsys, expect=1)["port"]["seen"]


def test_slurm_variables_that_contradict_each_other() -> None:
    assert slurm().status is Status.OK
    sane = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu[07-08]"}  # fmt: skip
    assert slurm(**sane).status is Status.OK
    for change, told in (
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID is 8, but the step has 8 tasks"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "SLURM_JOB_NUM_NODES is 3, but SLURM_JOB_NODELIST names 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, "which is not 8"),
        ({"SLURM_LOCALID": "6"}, "SLURM_LOCALID 6 on node 1 does not fit"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK 0 of WORLD_SIZE 2 is not SLURM_PROCID 5"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3, but WORLD_SIZE is 2"),
    ):
        found = slurm(**sane | change)
        assert found.status is Status.FAILED and told in found.seen, found
    assert slurm(SLURM_GPUS_ON_NODE="512").status is Status.WARNING  # no machine has a thousand cores to spare
    assert hosts("gpu[07-09,12],head") == ["gpu07", "gpu08", "gpu09", "gpu12", "head"]
    assert tasks_per_node("4(x2),3") == [4, 4, 3]


def test_weights_and_biases_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *TINY, "--data_path", "driving_world", "--max_samples", "4", "--results_dir", tmp_path,
             "--use_wandb"]  # fmt: skip
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "files only" in ask(capsys, *words, expect=0)["Weights & Biases"]["seen"]
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        found = ask(capsys, *words, expect=1)["Weights & Biases"]
        assert (
            f"127.0.0.1 cannot be reached at port {port}" in found["seen"] and "WANDB_MODE=offline" in found["remedy"]
        )
        server.listen()
        assert "There is no login" in ask(capsys, *words, expect=1)["Weights & Biases"]["seen"]
        monkeypatch.setenv("WANDB_API_KEY", "x")
        assert ask(capsys, *words, expect=0)["Weights & Biases"]["status"] == "ok"


def test_a_batch_that_ranks_cannot_share_and_a_rate_that_grew(tmp_path: Path) -> None:
    from muralist.config import load
    from muralist.settings import TRAIN_FLAT_NAMES, TrainSettings

    def find(name: str, ranks: int, *words: str):
        settings = load(TrainSettings, ["--data_path", "driving_world", *words], TRAIN_FLAT_NAMES)
        (check,) = [check for check in CHECKS if check.name == name]
        return examine(check, Circumstances(train=settings, environment={"WORLD_SIZE": str(ranks)})).finding

    assert "cannot be shared equally by 3" in find("batch", 3, "--global_batch_size", "16").seen
    grown = ["--batch_size", "512", "--lr_rule", "linear"]
    assert find("learning rate", 8, *grown, "--warmup_steps", "0").status is Status.WARNING
    assert find("learning rate", 8, *grown).status is Status.OK


def test_slow_ranks_and_wrong_clocks_are_named() -> None:
    found = Exchange(["a", "a", "b", "b"], dict.fromkeys(SIZES, 1e9), [1.0, 1.0, 1.1, 5.0], [1.0, 1.1, 1.0, 1.0])
    judged = judge_exchange(found)
    assert judged.status is Status.WARNING and "rank 3 on b computes 5.0 times slower" in judged.seen
    found.compute[3] = 1.2
    assert judge_exchange(found).status is Status.OK
    for ahead, status in ((0.2, Status.OK), (-5.0, Status.WARNING), (120.0, Status.FAILED)):
        found.clocks = {"b": (ahead, 0.001)}
        assert judge_clocks(found).status is status
    found.clocks = {"b": (-5.0, 0.001)}
    assert "The clock of b is 5.000 s behind a's" in judge_clocks(found).seen


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken(around: Circumstances):
        raise ZeroDivisionError("ours")

    check = Check("x", "what", "trouble", "why.", "do.", broken)
    found = examine(check, Circumstances()).finding
    assert found.status is Status.WARNING and "ZeroDivisionError: ours" in found.seen and found.remedy == "do."
    assert examine(Check("x", "", "", "why", "do", lambda _: ok("fine")), Circumstances()).finding.why == ""


@pytest.mark.slow
def test_ranks_meet_and_a_stopped_one_is_named(tmp_path: Path) -> None:
    told = json.loads(finish(start("muralist", "launch", "--nproc", "2", "doctor", "--json"), timeout=120))
    found = {one["name"]: one for one in told["checks"]}
    assert found["collective test"]["seen"].startswith("2 ranks on 1 machine exchange")
    assert found["collective test"]["facts"]["bytes per second"] > 1e6
    assert len(found["collective test"]["facts"]["sending, seconds by rank"]) == 2

    process = start("muralist", "launch", "--nproc", "3", "doctor", "--timeout", "6", new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(ranks := children.read_text().split()) < 3:
        time.sleep(0.01)
    os.kill(int(ranks[1]), signal.SIGSTOP)
    lines: list[str] = []
    assert process.stdout
    while not lines or not lines[-1].startswith("failed"):
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    # On a busy machine rank 2 may be late as well.
    assert re.search(r"Rank 1(, 2)? did not come within 6 s", lines[-1]), lines[-1]
    while "1 failed" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert "Traceback" not in finish(process, expect=None, timeout=60)
    assert process.returncode


@pytest.mark.slow
def test_a_clock_is_compared_through_the_group(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "import torch.distributed as dist\n"
        "from muralist.scale.meeting import Meeting\n"
        "meeting = Meeting(os.environ, 30)\n"
        "meeting.see_who_comes()\n"
        "dist.init_process_group('gloo', store=meeting.store, rank=meeting.rank, world_size=2)\n"
        "wrong = 7.5 if meeting.rank else 0.0\n"
        "found = meeting.offset(1, lambda: time.time() + wrong)\n"
        "if meeting.rank == 0: print(*found)\n"
        "dist.destroy_process_group()\n"
    )
    launcher = f"import sys; from muralist.launch import launch; sys.exit(launch([sys.executable, '-c', {code!r}], 2))"
    ahead, doubt = map(float, finish(start("python", "-c", launcher), timeout=120).split()[:2])
    assert abs(ahead - 7.5) <= doubt + 0.01 and doubt < 1.0
