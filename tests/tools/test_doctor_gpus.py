"""GPU checks of the doctor, with a program in place of nvidia-smi that prints what the real one prints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muralist.cli import main
from muralist.core.errors import UserError
from muralist.models.integrity import check_integrity, stored_parameters
from muralist.settings import TRAIN_FLAT_NAMES, GenerateSettings, ModelSettings, TrainSettings
from muralist.settings.load import load
from muralist.tools.doctor.check import CheckContext, Status, run_check
from muralist.tools.doctor.command import CHECKS
from muralist.tools.doctor.hardware import (
    Gpu,
    Gpus,
    compare_training_memory,
    compare_versions,
    compute_on_devices,
    query_nvidia_smi,
)
from muralist.train.preflight import CONTEXT, MemoryEstimate, estimate_memory
from tests.support.runs import TINY

GIGABYTE = 1024
HEADER = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4  |"


def install_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], capability: str = "9.0"
) -> None:
    """Put a fake nvidia-smi on the PATH that lists GPUs of 80 GiB, each with some GiB in use."""
    gpus = "".join(
        f"{number}, GPU-{number}a, NVIDIA H100, 81920, {taken * GIGABYTE}, 550.54.15, {capability}\\n"
        for number, taken in enumerate(used)
    )
    apps = "".join(
        f"GPU-{number}a, {4000 + number}, /usr/bin/python3, {taken * GIGABYTE}\\n"
        for number, taken in enumerate(used)
        if taken
    )
    program(
        folder,
        monkeypatch,
        f'case "$1" in --query-gpu*) printf "{gpus}";; --query-compute*) printf "{apps}";; *) echo "{HEADER}";; esac',
    )


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def finding(name: str, context: CheckContext):
    (check,) = [check for check in CHECKS if check.name == name]
    return run_check(check, context).finding


def generation(**settings: object) -> GenerateSettings:
    return GenerateSettings.model_validate({"prompts_csv": "p", "output_dir": "o", "model_path": "m", **settings})


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
    assert found.status is Status.WARNING
    assert "GPU 0 is in use: 75.2 GB of 85.9 GB held by process 4000 (/usr/bin/python3, 75.2 GB)" in found.message
    assert "Use the free ones (2 3): --gpu_ids" in found.fix
    free = finding("GPUs", CheckContext(generate=generation(gpu_ids=[2, 3])))
    assert free.status is Status.OK and "2 free: 2 with 85.9 GB, 3 with 85.9 GB (NVIDIA H100)" in free.message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert finding("GPUs", CheckContext()).status is Status.OK


def test_invalid_and_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0, 0))
    found = finding("GPUs", CheckContext(generate=generation(gpu_ids=[0, 5])))
    assert found.status is Status.FAILED and "GPU 5 does not exist: 2 are visible" in found.message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    found = finding("GPUs", CheckContext())
    assert found.status is Status.FAILED and "only 1 of its entries are GPUs of this machine" in found.message
    for hidden in ("", "-1", "NoDevFiles", "MIG-1234"):  # a job for the CPU, or parts of GPUs: nothing to refuse
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert finding("GPUs", CheckContext()).status is Status.SKIPPED
        assert finding("memory", CheckContext(train=TrainSettings())).status is Status.SKIPPED


def test_driver_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = finding("GPUs", CheckContext())
    assert found.status is Status.FAILED
    assert found.message.startswith("nvidia-smi ended with status 18: Failed to initialize NVML")
    program(tmp_path, monkeypatch, "exec sleep 30")
    began = time.monotonic()
    assert query_nvidia_smi(timeout=0.3).error == "nvidia-smi did not answer within 0.3 s"
    assert time.monotonic() - began < 10


def test_torch_needs_a_driver_of_its_cuda_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_versions("2.13.0", "13.0", "13.0", "580").status is Status.OK
    assert compare_versions("2.13.0", "12.8", "12.4", "550").status is Status.OK  # the same major version
    old = compare_versions("2.13.0", "13.0", "12.4", "550")
    assert old.status is Status.FAILED and "needs CUDA 13.0; driver 550 supports CUDA 12.4" in old.message
    import torch

    if torch.version.cuda is None:
        install_driver(tmp_path, monkeypatch, used=(0,))
        found = finding("driver", CheckContext())
        assert found.status is Status.FAILED and "built without CUDA, but this machine has GPUs" in found.message


def test_bf16_needs_compute_capability_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0,), capability="7.5")
    assert "fp16 with loss scaling" in finding("bf16", CheckContext()).fix
    assert finding("bf16", CheckContext(generate=generation())).fix == "Give --dtype fp16."
    zero = load(TrainSettings, ["--use_amp", "--strategy", "zero2"], TRAIN_FLAT_NAMES)
    assert finding("bf16", CheckContext(train=zero)).status is Status.FAILED
    install_driver(tmp_path, monkeypatch, used=(0,))
    assert finding("bf16", CheckContext()).status is Status.OK


def test_visible_devices_by_uuid() -> None:
    gpus = Gpus(tuple(Gpu(n, f"GPU-{n}abc", "X", 10, 0, "1", 9.0) for n in range(3)))
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"})] == [2, 0]
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"}, [1])] == [0]


def test_device_that_fails_or_hangs_is_named() -> None:
    wrong = compute_on_devices(["cpu", "nodevice"], timeout=60)
    assert wrong.status is Status.FAILED and wrong.message.startswith("nodevice could not compute: ")
    silent = compute_on_devices(["cpu"], timeout=0.01)
    assert silent.message == "cpu did not answer within 0.01 s."


def test_training_memory() -> None:
    need = MemoryEstimate(parameters=10**9, state=24e9, per_image=0.5e9)
    settings = load(TrainSettings, ["--batch_size", "64"], TRAIN_FLAT_NAMES)
    assert compare_training_memory(need, settings, 24.4e9).status is Status.FAILED
    short = compare_training_memory(need, settings, 24e9 + CONTEXT + 10e9)
    assert (
        short.status is Status.WARNING and "About 20 images at once fit" in short.message and "not 64" in short.message
    )
    assert compare_training_memory(need, settings, 80e9).status is Status.OK


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
    with pytest.raises(UserError, match="tokenizer lacks its weights"):
        check_integrity(tmp_path, ["tokenizer"])
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    check_integrity(tmp_path, ["tokenizer"])
