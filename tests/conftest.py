"""Shared by all tests: one thread per process (tiny models are much faster so), no network, no colors."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TERM"] = "dumb"

from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from PIL import Image

# A busy machine is not a failure: how long an example takes is not what these tests are about. And on a build machine the
# examples are the same every time: chance finds new bugs where somebody can mend them.
hypothesis.settings.register_profile("muralist", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=3000)  # tests/fuzz, by `make fuzz`
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "muralist"))

REPOSITORY = Path(__file__).parent.parent
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def cifar10() -> Path:
    """The real CIFAR-10 subset where the workplace has it."""
    path = SHARED_DATA / "cifar10_subset_u8.npz"
    if not path.is_file():
        pytest.skip("the CIFAR-10 subset is not on this machine")
    return path


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real image folder: two classes, JPEG and PNG, sizes of all kinds."""
    root = tmp_path_factory.mktemp("photos") / "train"
    rows, columns = np.mgrid[0:1:48j, 0:1:64j]
    for label, name in enumerate(("sunrise", "meadow")):
        (root / name).mkdir(parents=True)
        for number in range(24):
            light = 60 + 6 * number
            pixels = np.stack((rows * light, columns * 200, (1 - rows) * 255), axis=-1)
            pixels = pixels[..., ::-1] if label else pixels
            image = Image.fromarray(pixels.astype(np.uint8)).resize((40 + number, 36 + 2 * number))
            image.save(root / name / f"{number:03d}.{'jpg' if number % 2 else 'png'}")
    return root


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny pipelines in diffusers layout by name, built once for all processes of a test run."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "pipelines"
    shared.mkdir(exist_ok=True)

    def build(name: str) -> Path:
        from tests.support.pipelines import build_pipeline

        return build_pipeline(name, shared)

    return build
