"""The rule of tests/conftest.py: on a build machine a skipped test is a failure, unless no build machine could run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.runs import environment

_TESTS = """
import pytest

def test_disk():
    pytest.skip("no disk can be mounted here")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a CUDA GPU")
def test_gpu():
    pass
"""


@pytest.mark.parametrize(("ci", "processes"), [("true", 2), ("", 0)])
def test_a_skip_is_a_failure_on_a_build_machine(tmp_path: Path, ci: str, processes: int) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "test_file.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", str(processes),
             "-c", REPOSITORY / "pyproject.toml", "--continue-on-collection-errors", tmp_path]  # fmt: skip
    done = subprocess.run(words, cwd=REPOSITORY, env=environment(CI=ci), capture_output=True, text=True, check=False)
    said = done.stdout
    assert (done.returncode != 0) == bool(ci), said + done.stderr
    summary = said.partition("tests skipped ===")[2].partition("short test summary")[0]
    assert "   1  needs a CUDA GPU\n" in summary, said
    for reason in ("no disk can be mounted here", "could not import 'no_such_package'"):
        assert (f"must be able to run this test, but it was skipped: {reason}" in said) == bool(ci), said
        assert (reason in summary) != bool(ci), said
