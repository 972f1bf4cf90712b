"""What the doctor says of GPUs, with a program in the place of nvidia-smi that prints what the real one prints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muralist.cli import main
from muralist.config import load
from muralist.errors import UserError
from muralist.models.complete import check_whole, stored_parameters
from muralist.scale.checks import room
from muralist.scale.checks.check import Circumstances, Status, examine
from muralist.scale.checks.hardware import CHECKS, ask_devices, match_versions
from muralist.scale.checks.room import fits_training
from muralist.scale.gpus import Gpu, Gpus, Process, ask_driver
from muralist.scale.memory import CONTEXT, Need, need_of
from muralist.settings import TRAIN_FLAT_NAMES, GenerateSettings, ModelSettings, TrainSettings
from tests.support.runs import TINY

GIGABYTE = 1024
HEADER = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4  |"


def install_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], capability: str = "9.0"
) -> None:
    """Put a program on the PATH that answers as nvidia-smi does: GPUs of 80 GiB with so many GiB in use."""
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


def finding(name: str, around: Circumstances):
    (check,) = [check for check in (*CHECKS, *room.CHECKS) if check.name == name]
    return examine(check, around).finding


def generation(**settings: object) -> GenerateSettings:
    return GenerateSettings.model_validate({"prompts_csv": "p", "output_dir": "o", "model_path": "m", **settings})


def test_the_driver_is_asked_for_memory_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0, 70))
    gpus = ask_driver()
    assert gpus.cuda == "12.4" and not gpus.trouble
    assert [gpu.free for gpu in gpus.listed] == [80 * 2**30, 10 * 2**30]
    assert gpus.listed[1].processes == (Process(4001, "/usr/bin/python3", 70 * 2**30),)
    assert gpus.listed[0].capability == 9.0


def test_the_driver_is_asked_all_questions_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer waits until all three questions are there."""
    here = f'touch "{tmp_path}/asked.$$"; while [ $(ls "{tmp_path}"/asked.* | wc -l) -lt 3 ]; do sleep 0.02; done'
    program(tmp_path, monkeypatch, f'{here}; case "$1" in --query*) ;; *) echo "{HEADER}";; esac')
    assert ask_driver(patience=20) == Gpus(cuda="12.4")


def test_busy_gpus_are_named_by_id_with_their_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(70, 60, 0, 0))
    found = finding("GPUs", Circumstances())
    assert found.status is Status.WARNING
    assert "GPU 0 is in use: 75.2 GB of 85.9 GB held by process 4000 (/usr/bin/python3, 75.2 GB)" in found.seen
    assert "Use the free ones (2 3): --gpu_ids" in found.remedy
    free = finding("GPUs", Circumstances(generate=generation(gpu_ids=[2, 3])))
    assert free.status is Status.OK and "2 free: 2 with 85.9 GB, 3 with 85.9 GB (NVIDIA H100)" in free.seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert finding("GPUs", Circumstances()).status is Status.OK


def test_gpus_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0, 0))
    found = finding("GPUs", Circumstances(generate=generation(gpu_ids=[0, 5])))
    assert found.status is Status.FAILED and "There is no GPU 5: 2 can be seen" in found.seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    found = finding("GPUs", Circumstances())
    assert found.status is Status.FAILED and "only 1 of its entries are GPUs of this machine" in found.seen
    for hidden in ("", "-1", "NoDevFiles", "MIG-1234"):  # a job for the CPU, or parts of GPUs: nothing to refuse
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert finding("GPUs", Circumstances()).status is Status.SKIPPED
        assert finding("memory", Circumstances(train=TrainSettings())).status is Status.SKIPPED


def test_a_driver_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    found = finding("GPUs", Circumstances())
    assert found.status is Status.FAILED
    assert found.seen.startswith("Nvidia-smi ended with status 18: Failed to initialize NVML")
    program(tmp_path, monkeypatch, "exec sleep 30")
    began = time.monotonic()
    assert ask_driver(patience=0.3).trouble == "nvidia-smi did not answer within 0.3 s"
    assert time.monotonic() - began < 10


def test_torch_must_fit_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert match_versions("2.13.0", "13.0", "13.0", "580").status is Status.OK
    assert match_versions("2.13.0", "12.8", "12.4", "550").status is Status.OK  # the same major version
    old = match_versions("2.13.0", "13.0", "12.4", "550")
    assert old.status is Status.FAILED and "needs CUDA 13.0; the driver 550 can run CUDA 12.4" in old.seen
    import torch

    if torch.version.cuda is None:
        install_driver(tmp_path, monkeypatch, used=(0,))
        found = finding("driver", Circumstances())
        assert found.status is Status.FAILED and "built without CUDA, and this machine has GPUs" in found.seen


def test_bf16_is_missing_on_older_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(tmp_path, monkeypatch, used=(0,), capability="7.5")
    assert "fp16 with loss scaling" in finding("bf16", Circumstances()).remedy
    assert finding("bf16", Circumstances(generate=generation())).remedy == "Give --dtype fp16."
    zero = load(TrainSettings, ["--use_amp", "--strategy", "zero2"], TRAIN_FLAT_NAMES)
    assert finding("bf16", Circumstances(train=zero)).status is Status.FAILED
    install_driver(tmp_path, monkeypatch, used=(0,))
    assert finding("bf16", Circumstances()).status is Status.OK


def test_visible_devices_may_be_uuids() -> None:
    gpus = Gpus(tuple(Gpu(n, f"GPU-{n}abc", "X", 10, 0, "1", 9.0) for n in range(3)))
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"})] == [2, 0]
    assert [gpu.index for gpu in gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-2,0"}, [1])] == [0]


def test_a_device_that_fails_or_is_silent_is_named() -> None:
    wrong = ask_devices(["cpu", "nodevice"], patience=60)
    assert wrong.status is Status.FAILED and wrong.seen.startswith("nodevice could not compute: ")
    silent = ask_devices(["cpu"], patience=0.01)
    assert silent.seen == "cpu did not answer within 0.01 s."


def test_what_fits_into_memory() -> None:
    need = Need(parameters=10**9, state=24e9, per_image=0.5e9)
    settings = load(TrainSettings, ["--batch_size", "64"], TRAIN_FLAT_NAMES)
    assert fits_training(need, settings, 24.4e9, "told").status is Status.FAILED
    short = fits_training(need, settings, 24e9 + CONTEXT + 10e9, "told")
    assert short.status is Status.WARNING and "About 20 images at once fit" in short.seen and "not 64" in short.seen
    assert fits_training(need, settings, 80e9, "told").status is Status.OK


def test_train_makes_the_quick_checks_itself(
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
    assert "A GPU has 0.00 GB free, and weights, gradients, optimizer and averages take 0.05 GB" in said.out
    assert "--strategy fsdp2" in said.out and "no data" in said.err  # an estimate refuses nothing
    program(tmp_path, monkeypatch, "echo 'No devices were found'; exit 9")
    assert main(words) == 1
    said = capfd.readouterr()
    assert "Nvidia-smi ended with status 9" in said.out and "no data" in said.err


def test_what_accelerate_was_configured_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainSettings(model=ModelSettings(name="JiT-G/16", img_size=256))
    whole = need_of(settings, 8, compiled=True).state
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert need_of(settings, 8, compiled=True).state == pytest.approx(whole / 8)


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
        check_whole(tmp_path, ["tokenizer"])
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    check_whole(tmp_path, ["tokenizer"])
