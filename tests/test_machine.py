"""Which devices a command works on."""

from __future__ import annotations

import pytest

from muralist.errors import UserError
from muralist.machine import choose_devices


def test_labels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("NPROC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert choose_devices([]) == {"0": "cpu"}
    assert choose_devices([2, 3]) == {"2": "cpu", "3": "cpu"}
    monkeypatch.setenv("NPROC", "3")
    assert choose_devices([]) == {"0": "cpu", "1": "cpu", "2": "cpu"}
    with pytest.raises(UserError, match="names a GPU twice"):
        choose_devices([1, 1])


def test_labels_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_devices([2, 3]) == {"2": "cuda:2", "3": "cuda:3"}
    assert list(choose_devices([])) == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match="There is no GPU 4: 4 can be seen"):
        choose_devices([0, 4])
