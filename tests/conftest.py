"""Shared by all tests: one thread per process (tiny models are much faster so), no network, no colors.

With CI set, as .ci/run sets it, a test may be skipped only for what no build machine has; any other skip is a failure.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start jobs in the background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TERM"] = "dumb"

from collections import Counter
from collections.abc import Callable, Generator, Iterator
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
ON_BUILD_MACHINE = bool(os.environ.get("CI"))  # there a skipped test is a failure, unless it needs a GPU


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why something was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def _fail_instead(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.outcome = "failed"
    report.longrepr = f"A build machine must be able to run this test, but it was skipped: {_reason(report)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_expected_to_fail = hasattr(report, "wasxfail")
    if ON_BUILD_MACHINE and report.skipped and not is_expected_to_fail and "gpu" not in item.keywords:
        _fail_instead(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of a whole file that skips itself, as for a missing package."""
    report = yield
    if ON_BUILD_MACHINE and report.skipped:
        _fail_instead(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List how many tests were skipped for which reason."""
    reasons = Counter(map(_reason, terminalreporter.stats.get("skipped", [])))
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:4d}  {reason}")


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


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Hide from the garbage collector what earlier tests and imports have left: diffusers alone costs it half a second.

    Every training ends with a collection.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Let commands that tests call in their own process fork workers from one that has imported everything heavy.

    Commands that tests start as processes spawn theirs, as everywhere; so do all on a machine with a GPU.
    """
    import torch

    from muralist.core import worker_pool
    from tests.support.fork_server import fork_workers, shared_server

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(worker_pool, "multiprocessing", fork_workers(lambda: shared_server().address))
        yield
    if shared_server.cache_info().currsize:
        shared_server().close()


@pytest.fixture
def spawned_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawn workers in spite of `forked_workers`, for tests of the processes themselves."""
    from muralist.core import worker_pool

    monkeypatch.setattr(worker_pool, "multiprocessing", multiprocessing)
