"""What several tests of evaluation need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.evaluating import small_dinov2


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small DINOv2."""
    return small_dinov2(tmp_path_factory.mktemp("dinov2"))
