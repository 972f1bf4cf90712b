"""Run every GPU test of the repository and write a record: hardware, versions, outcome, seconds and figures of each test.

python bench/gpu_tests.py RECORD.json [arguments of pytest, such as -n 4 or a path]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.standard import TREE, conditions


def read_results(junit: Path) -> dict[str, dict[str, Any]]:
    """Return outcome, seconds and recorded properties by test, from pytest's JUnit file."""
    tests = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        states = [name for name in ("failure", "error", "skipped") if case.find(name) is not None]
        found: dict[str, Any] = {"outcome": states[0] if states else "passed", "seconds": float(case.get("time", "0"))}
        if states == ["skipped"]:
            found["reason"] = case.find("skipped").get("message")  # type: ignore[union-attr]
        for entry in case.iter("property"):
            found[str(entry.get("name"))] = float(str(entry.get("value")))
        tests[f"{case.get('classname')}::{case.get('name')}"] = found
    return tests


def main() -> int:
    """Run the tests."""
    record, arguments = Path(sys.argv[1]), sys.argv[2:]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--junitxml", str(junit), *arguments]
        status = subprocess.run(command, cwd=TREE, check=False).returncode
        tests = read_results(junit)
    content = conditions(None) | {
        "command": " ".join(["python", "bench/gpu_tests.py", *sys.argv[1:]]),
        "seconds": round(time.perf_counter() - started),
        "outcomes": dict(Counter(test["outcome"] for test in tests.values())),
        "tests": tests,
    }
    record.write_text(json.dumps(content, indent=1) + "\n")
    print(content["outcomes"], f"{content['seconds']} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
