"""Which devices a command works on."""

from __future__ import annotations

import pytest

from muralist.core.errors import UserError
from muralist.core.hardware import nvidia_capability, select_devices, share_devices


def test_labels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("NPROC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert select_devices([]) == {"0": "cpu"}
    assert select_devices([2, 3]) == {"2": "cpu", "3": "cpu"}
    monkeypatch.setenv("NPROC", "3")
    assert select_devices([]) == {"0": "cpu", "1": "cpu", "2": "cpu"}
    with pytest.raises(UserError, match="names a GPU twice"):
        select_devices([1, 1])


def test_labels_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert select_devices([2, 3]) == {"2": "cuda:2", "3": "cuda:3"}
    assert list(select_devices([])) == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match="GPU 4 does not exist: 4 are visible"):
        select_devices([0, 4])


def test_amd_gpus_have_no_nvidia_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4 if device == gpu else 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert nvidia_capability(gpu) == (9, 4) and nvidia_capability() == (9, 0)
    assert nvidia_capability(torch.device("cpu")) == (0, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert nvidia_capability(gpu) == nvidia_capability() == (0, 0)


@pytest.mark.parametrize(("processes", "expected"), [("", ["cuda:0", "cuda:1"]), ("1", ["cuda:0", "cuda:1"]),
                                                     ("3", ["cuda:0", "cuda:1", "cuda:0"])])  # fmt: skip
def test_more_processes_than_gpus_share_them(
    monkeypatch: pytest.MonkeyPatch, processes: str, expected: list[str]
) -> None:
    monkeypatch.setenv("NPROC", processes)
    assert list(share_devices({"0": "cuda:0", "1": "cuda:1"}).values()) == expected
