"""Which devices a command works on."""

from __future__ import annotations

import pytest

from muralist.core.errors import UserError
from muralist.core.hardware import select_devices


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
