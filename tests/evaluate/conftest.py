"""Fixtures that several tests of evaluation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.evaluating import small_clip, small_dinov2


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small CLIP."""
    return small_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small DINOv2."""
    return small_dinov2(tmp_path_factory.mktemp("dinov2"))


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide weights and process counts of this machine."""
    for name in ("MURALIST_INCEPTION", "NPROC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no cache"))
