"""The doctor: every problem is provoked for real; a program that prints what nvidia-smi prints stands for a driver."""

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

import pytest
import torch
from safetensors.torch import save_file
from scripts.write_troubleshooting import troubleshooting_page

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.core.slurm import expand_hosts, expand_tasks_per_node
from muralist.data.ledger_reader import TarShard
from muralist.generate.model_info import ModelInfo
from muralist.models.integrity import check_integrity, stored_parameters
from muralist.settings import TRAIN_FLAT_NAMES, GenerateSettings, ModelSettings, TrainSettings
from muralist.settings.load import load
from muralist.tools.doctor.check import CHECKS, Check, CheckContext, Finding, ok
from muralist.tools.doctor.collective_test import SIZES, CollectiveReport
from muralist.tools.doctor.hardware import (
    Gpu,
    Gpus,
    compare_training_memory,
    compare_versions,
    compute_on_devices,
    query_nvidia_smi,
)
from muralist.tools.doctor.job import check_batch, check_clocks, check_collectives, check_learning_rate, check_slurm
from muralist.train.preflight import CONTEXT, MemoryEstimate, estimate_memory
from tests.conftest import REPOSITORY
from tests.support.disks import leave_free, read_only_view, small_disk
from tests.support.generating import write_table
from tests.support.runs import TINY, finish, start

HEADER = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4  |"
KNOWN_SYMPTOMS = [
    "NCCL timeout", "out of memory", "loss oscillates", "error during sampling", "the model was not loaded right",
    "cannot write to directory", "permissions", "disk space", "a process that hangs", "wrong model path",
    "a GPU that does not answer", "results that differ", "GPUs without work", "1001 over 4",
]  # fmt: skip


def ask(capsys: pytest.CaptureFixture[str], *words: object, expect: int) -> dict[str, dict[str, Any]]:
    """Results of the doctor by the name of the check."""
    capsys.readouterr()
    assert main(["doctor", *map(str, words), "--json"]) == expect
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (expect == 0)
    return {result["name"]: result for result in report["checks"]}


def slurm(**variables: str) -> Finding:
    return check_slurm.run(CheckContext(environment={"SLURM_JOB_ID": "7", **variables}))


def test_known_symptoms_have_a_check_and_the_page_is_generated_from_the_checks() -> None:
    covered = " ".join(check.symptom for check in CHECKS).lower()
    assert [symptom for symptom in KNOWN_SYMPTOMS if symptom.lower() not in covered] == []
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert (REPOSITORY / "docs" / "troubleshooting.md").read_text() == troubleshooting_page(), "run `make docs`"


def test_printed_list_and_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "no GPU" in output or "free:" in output
    assert main(["doctor", "--data_path", str(tmp_path / "nothing"), "--results_dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (index,) = [index for index, line in enumerate(lines) if line.startswith("failed")]
    assert "data set" in lines[index] and "nothing" in lines[index]
    assert lines[index + 1].strip().startswith("why: ") and lines[index + 2].strip().startswith("fix: ")
    assert "1 failed" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_broken_image_in_the_data_set(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data" / "train"
    shutil.copytree(photo_folder, data)
    words = ["train", *TINY, "--data_path", data, "--results_dir", tmp_path / "results"]
    found = ask(capsys, *words, expect=0)
    assert found["data set"]["seen"].startswith("48 images, 48 decoded at ")
    (data / "meadow" / "007.jpg").write_bytes((data / "meadow" / "007.jpg").read_bytes()[:200])
    found = ask(capsys, *words, expect=1)
    assert "1 of them broken" in found["data set"]["seen"] and "007.jpg" in found["data set"]["seen"]
    assert "muralist pack" in found["data set"]["remedy"]


def test_full_and_read_only_disks(photo_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--data_path", photo_folder, "--max_steps", "1"]
    with small_disk(tmp_path / "disk", "60m") as disk:
        found = ask(capsys, "train", *words, "--results_dir", disk, expect=0)
        assert found["disk space"]["status"] == "warning" and "--keep_last" in found["disk space"]["remedy"]
        leave_free(disk, 4 * 4096)
        found = ask(capsys, "train", *words, "--results_dir", disk, expect=1)
        assert "No space left on the disk" in found["disk space"]["seen"]
        # train itself refuses before it reads data or loads anything
        assert main(["train", *map(str, words), "--results_dir", str(disk)]) == 1
        assert "a checkpoint takes 0.04 GB" in capsys.readouterr().err
        assert [path.name for path in disk.iterdir()] == ["filler"]
    with read_only_view(tmp_path / "there", tmp_path / "view") as view:
        found = ask(capsys, "train", *words, "--results_dir", view / "results", expect=1)
        assert "Read-only file system" in found["write permission"]["seen"]
        assert found["write permission"]["remedy"] == "Mount the disk for writing, or give another --results_dir."
        assert main(["train", *map(str, words), "--results_dir", str(view)]) == 1
        assert "Read-only file system" in capsys.readouterr().err


def write_model(folder: Path) -> Path:
    """Write what the checks read of a folder in diffusers layout."""
    for part, file in (("transformer", "config.json"), ("scheduler", "scheduler_config.json")):
        (folder / part).mkdir(parents=True)
        (folder / part / file).write_text("{}")
    parts = {"transformer": ["diffusers", "Network"], "scheduler": ["diffusers", "Scheduler"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **parts}))
    save_file({"a": torch.zeros(64)}, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def test_model_with_a_missing_or_truncated_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "is incomplete" in capsys.readouterr().err and not (tmp_path / "out").exists()
    index.unlink()
    shards[0].rename(whole)
    whole.write_bytes(whole.read_bytes()[:-10])
    found = ask(capsys, *words, expect=1)
    assert f"{whole} is damaged or truncated" in found["model folder"]["seen"]


def test_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = ask(capsys, expect=1)
        assert "is in use on this machine" in found["port"]["seen"] and "ss -ltnp" in found["port"]["remedy"]
    assert ask(capsys, expect=0)["port"]["status"] == "ok"
    monkeypatch.setenv("MASTER_PORT", "many")
    assert "is not a port" in ask(capsys, expect=1)["port"]["seen"]


def test_contradicting_slurm_variables() -> None:
    assert slurm().status == "ok"
    sane = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu[07-08]"}  # fmt: skip
    assert slurm(**sane).status == "ok"
    for change, message in (
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID is 8, but the step has 8 tasks"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "SLURM_JOB_NUM_NODES is 3, but SLURM_JOB_NODELIST names 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,3"}, "which is not 8"),
        ({"SLURM_LOCALID": "6"}, "SLURM_LOCALID 6 on node 1 does not fit"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK 0 of WORLD_SIZE 2 is not SLURM_PROCID 5"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3, but WORLD_SIZE is 2"),
    ):
        found = slurm(**sane | change)
        assert found.status == "failed" and message in found.message, found
    assert slurm(SLURM_GPUS_ON_NODE="512").status == "warning"  # no machine has a thousand cores to spare
    assert expand_hosts("gpu[07-09,12],head") == ["gpu07", "gpu08", "gpu09", "gpu12", "head"]
    assert expand_tasks_per_node("4(x2),3") == [4, 4, 3]


def test_weights_and_biases_login_and_server(
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
        assert f"127.0.0.1 cannot be reached at port {port}" in found["seen"]
        assert "WANDB_MODE=offline" in found["remedy"]
        server.listen()
        assert "No login for 127.0.0.1" in ask(capsys, *words, expect=1)["Weights & Biases"]["seen"]
        monkeypatch.setenv("WANDB_API_KEY", "x")
        assert ask(capsys, *words, expect=0)["Weights & Biases"]["status"] == "ok"


def test_indivisible_batch_and_scaled_learning_rate(tmp_path: Path) -> None:
    def find(check: Check, ranks: int, *words: str):
        settings = load(TrainSettings, ["--data_path", "driving_world", *words], TRAIN_FLAT_NAMES)
        return check.run(CheckContext(train=settings, environment={"WORLD_SIZE": str(ranks)}))

    assert "cannot be divided by 3 processes" in find(check_batch, 3, "--global_batch_size", "16").message
    grown = ["--batch_size", "512", "--lr_rule", "linear"]
    assert find(check_learning_rate, 8, *grown, "--warmup_steps", "0").status == "warning"
    assert find(check_learning_rate, 8, *grown).status == "ok"


def test_slow_ranks_and_wrong_clocks_are_named() -> None:
    report = CollectiveReport(["a", "a", "b", "b"], dict.fromkeys(SIZES, 1e9), [1, 1, 1.1, 5], [1, 1.1, 1, 1])
    context = CheckContext(exchange=report)
    found = check_collectives.run(context)
    assert found.status == "warning" and "rank 3 on b computes 5.0 times slower" in found.message
    report.compute[3] = 1.2
    assert check_collectives.run(context).status == "ok"
    for ahead, status in ((0.2, "ok"), (120.0, "failed"), (-5.0, "warning")):
        report.clocks = {"b": (ahead, 0.001)}
        found = check_clocks.run(context)
        assert found.status == status
    assert "The clock of b is 5.000 s behind the clock of a" in found.message


def test_exception_in_a_check_is_a_finding() -> None:
    def broken(context: CheckContext):
        raise ZeroDivisionError("ours")

    found = Check("x", broken, why="why.", fix="do.").run(CheckContext())
    assert found.status == "warning" and "ZeroDivisionError: ours" in found.message and found.fix == "do."
    assert Check("x", lambda _: ok("fine"), why="why.").run(CheckContext()).why == ""


def install_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], capability: str = "9.0"
) -> None:
    """Put a fake nvidia-smi on the PATH that lists GPUs of 80 GiB, each with some GiB in use."""
    gpus = apps = ""
    for number, taken in enumerate(used):
        gpus += f"{number}, GPU-{number}a, NVIDIA H100, 81920, {taken * 1024}, 550.54.15, {capability}\\n"
        apps += f"GPU-{number}a, {4000 + number}, /usr/bin/python3, {taken * 1024}\\n" if taken else ""
    answers = f'--query-gpu*) printf "{gpus}";; --query-compute*) printf "{apps}";; *) echo "{HEADER}";;'
    program(folder, monkeypatch, f'case "$1" in {answers} esac')


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in place of nvidia-smi."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def finding(name: str, context: CheckContext) -> Finding:
    (check,) = [check for check in CHECKS if check.name == name]
    return check.run(context)


def generation(**settings: object) -> GenerateSettings:
    return GenerateSettings.model_validate({"prompts_csv": "p", "output_dir": "o", "model_path": "m", **settings})


def test_disk_space_of_formats_and_shards(tmp_path: Path) -> None:
    resolved = {"height": 1000, "width": 1000, "num_frames": 1}

    def needed(**settings: object) -> float:
        asked = generation(output_dir=str(tmp_path), **settings)
        context = CheckContext(generate=asked)
        context.model, context.images = ModelInfo(resolved, {}), 100
        found = finding("disk space", context)
        return found.facts["needed"] / 1e6

    assert needed() == needed(image_format="webp", image_quality="lossless") == pytest.approx(160)
    assert needed(image_format="jpg") == pytest.approx(100) and needed(image_format="webp") == pytest.approx(60)
    assert needed(shards=10) == pytest.approx(176)  # a tar file and its images at the same time
    (tmp_path / "00000.tar").write_bytes(b"")
    shard = TarShard("00000.tar", 1, 0, 9, 0, "", 0, [0] * 10)
    (tmp_path / "ledger.jsonl").write_text(json.dumps(shard.line()) + "\n")
    assert needed(shards=10) == pytest.approx(160)


def test_nvidia_smi_lists_memory_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0, 70))
    gpus = query_nvidia_smi()
    assert gpus.cuda == "12.4" and not gpus.error
    assert [gpu.free for gpu in gpus.listed] == [80 * 2**30, 10 * 2**30]
    assert gpus.listed[1].processes == ("process 4001 (/usr/bin/python3, 75.2 GB)",)
    assert gpus.listed[0].capability == 9.0


def test_nvidia_smi_queries_run_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query waits until all three have started."""
    here = f'touch "{tmp_path}/asked.$$"; while [ $(ls "{tmp_path}"/asked.* | wc -l) -lt 3 ]; do sleep 0.02; done'
    program(tmp_path, monkeypatch, f'{here}; case "$1" in --query*) ;; *) echo "{HEADER}";; esac')
    assert query_nvidia_smi(timeout=20) == Gpus(cuda="12.4")


def test_busy_gpus_are_named_with_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(70, 60, 0, 0))
    found = finding("GPUs", CheckContext())
    assert found.status == "warning"
    assert "GPU 0 is in use: 75.2 GB of 85.9 GB held by process 4000 (/usr/bin/python3, 75.2 GB)" in found.message
    assert "Use the free ones (2 3): --gpu_ids" in found.fix
    free = finding("GPUs", CheckContext(generate=generation(gpu_ids=[2, 3])))
    assert free.status == "ok" and "2 free: 2 with 85.9 GB, 3 with 85.9 GB (NVIDIA H100)" in free.message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert finding("GPUs", CheckContext()).status == "ok"


def test_invalid_and_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0, 0))
    found = finding("GPUs", CheckContext(generate=generation(gpu_ids=[0, 5])))
    assert found.status == "failed" and "GPU 5 does not exist: 2 are visible" in found.message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    found = finding("GPUs", CheckContext())
    assert found.status == "failed" and "only 1 of its entries are GPUs of this machine" in found.message
    for hidden in ("", "-1", "NoDevFiles", "MIG-1234"):  # a job for the CPU, or parts of GPUs: nothing to refuse
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert finding("GPUs", CheckContext()).status == "skipped"
        assert finding("memory", CheckContext(train=TrainSettings())).status == "skipped"


def test_driver_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = finding("GPUs", CheckContext())
    assert found.status == "failed"
    assert found.message.startswith("nvidia-smi ended with status 18: Failed to initialize NVML")
    program(tmp_path, monkeypatch, "exec sleep 30")
    began = time.monotonic()
    assert query_nvidia_smi(timeout=0.3).error == "nvidia-smi did not answer within 0.3 s"
    assert time.monotonic() - began < 10


def test_torch_needs_a_driver_of_its_cuda_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_versions("2.13.0", "13.0", "13.0", "580").status == "ok"
    assert compare_versions("2.13.0", "12.8", "12.4", "550").status == "ok"  # the same major version
    old = compare_versions("2.13.0", "13.0", "12.4", "550")
    assert old.status == "failed" and "needs CUDA 13.0; driver 550 supports CUDA 12.4" in old.message
    if torch.version.cuda is None:
        install_driver(tmp_path, monkeypatch, used=(0,))
        found = finding("driver", CheckContext())
        assert found.status == "failed" and "built without CUDA, but this machine has GPUs" in found.message


def test_bf16_needs_compute_capability_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0,), capability="7.5")
    assert "fp16 with loss scaling" in finding("bf16", CheckContext()).fix
    assert finding("bf16", CheckContext(generate=generation())).fix == "Give --dtype fp16."
    zero = load(TrainSettings, ["--use_amp", "--strategy", "zero2"], TRAIN_FLAT_NAMES)
    assert finding("bf16", CheckContext(train=zero)).status == "failed"
    install_driver(tmp_path, monkeypatch, used=(0,))
    assert finding("bf16", CheckContext()).status == "ok"


def test_visible_devices_by_uuid() -> None:
    gpus = Gpus(tuple(Gpu(n, f"GPU-{n}abc", "X", 10, 0, "1", 9.0) for n in range(3)))
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"})] == [2, 0]
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"}, [1])] == [0]


def test_device_that_fails_or_hangs_is_named() -> None:
    wrong = compute_on_devices(["cpu", "nodevice"], timeout=60)
    assert wrong.status == "failed" and wrong.message.startswith("nodevice could not compute: ")
    silent = compute_on_devices(["cpu"], timeout=0.01)
    assert silent.message == "cpu did not answer within 0.01 s."


def test_training_memory() -> None:
    need = MemoryEstimate(parameters=10**9, state=24e9, per_image=0.5e9)
    settings = load(TrainSettings, ["--batch_size", "64"], TRAIN_FLAT_NAMES)
    assert compare_training_memory(need, settings, 24.4e9).status == "failed"
    short = compare_training_memory(need, settings, 24e9 + CONTEXT + 10e9)
    assert short.status == "warning" and re.search("About 20 images at once fit.* not 64", short.message)
    assert compare_training_memory(need, settings, 80e9).status == "ok"


def test_train_runs_the_quick_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *TINY, "--data_path", str(tmp_path / "no data"), "--results_dir", str(tmp_path / "results")]
    install_driver(tmp_path, monkeypatch, used=(70, 80))  # one process takes the first
    assert main(words) == 1  # after a warning, there is no data
    said = capfd.readouterr()
    assert "GPU 0 is in use: 75.2 GB of 85.9 GB held by process 4000" in said.out and "no data" in said.err
    assert "GPU 1" not in said.out
    install_driver(tmp_path, monkeypatch, used=(80, 0))
    assert main(words) == 1
    said = capfd.readouterr()
    assert "A GPU has 0.00 GB free, but weights, gradients, optimizer and EMA take 0.05 GB" in said.out
    assert "--strategy fsdp2" in said.out and "no data" in said.err  # an estimate refuses nothing
    program(tmp_path, monkeypatch, "echo 'No devices were found'; exit 9")
    assert main(words) == 1
    said = capfd.readouterr()
    assert "nvidia-smi ended with status 9" in said.out and "no data" in said.err


def test_memory_estimate_uses_the_accelerate_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainSettings(model=ModelSettings(name="JiT-G/16", img_size=256))
    whole = estimate_memory(settings, 8, compiled=True).state
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert estimate_memory(settings, 8, compiled=True).state == pytest.approx(whole / 8)


def test_weights_in_two_precisions_are_counted_once(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(10, 4)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(10, 4).half()}, tmp_path / "model.fp16.safetensors")
    save_file({"a": torch.zeros(5)}, tmp_path / "other-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(6)}, tmp_path / "other-00002-of-00002.safetensors")
    assert stored_parameters(tmp_path) == 40


def test_a_tokenizer_with_a_configuration_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer lacks tokenizer_config.json, its vocabulary"):
        check_integrity(tmp_path, {"tokenizer": "T5Tokenizer"})
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer" / "spiece.model").write_bytes(b"pieces")
    check_integrity(tmp_path, {"tokenizer": "T5Tokenizer"})


@pytest.mark.slow
def test_collective_test_names_a_stopped_rank(tmp_path: Path) -> None:
    report = json.loads(finish(start("muralist", "launch", "--nproc", "2", "doctor", "--json"), timeout=120))
    found = {result["name"]: result for result in report["checks"]}
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
    assert re.search(r"Rank 1(, 2)? did not connect within 6 s", lines[-1]), lines[-1]
    while "1 failed" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert "Traceback" not in finish(process, expect=None, timeout=60)
    assert process.returncode


@pytest.mark.slow
def test_clock_offset_is_measured_through_the_store(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "from muralist.tools.doctor.collective_test import CollectiveTest\n"
        "test = CollectiveTest(os.environ, 30)\n"
        "error = 7.5 if test.rank else 0.0\n"
        "offset = test.clock_offset(1, lambda: time.time() + error)\n"
        "if test.rank == 0: print(*offset)\n"
        "test.gather('finished', None)\n"
    )
    launcher = (
        f"import sys; from muralist.tools.launch import launch; sys.exit(launch([sys.executable, '-c', {code!r}], 2))"
    )
    ahead, doubt = map(float, finish(start("python", "-c", launcher), timeout=120).split()[:2])
    assert abs(ahead - 7.5) <= doubt + 0.01 and doubt < 1.0
