"""Looks up known vulnerabilities of the versions in constraints.txt; `make audit` and .ci/run call this.

Fails if one is known. Where the list of vulnerabilities cannot be reached, it says so and does not fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
SERVICES = ("osv", "pypi")
SECONDS = 25  # for each service


def look_up(service: str) -> list[dict] | None:
    """What a service says of each package that it knows; None where it cannot be reached."""
    words = ["--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *words, "--vulnerability-service", service, "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "5"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found = [package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return None
    return found or None  # one that knows no package at all is not the real one


def main() -> int:
    """Say what is known; the exit status tells whether anything is."""
    found = next((known for service in SERVICES if (known := look_up(service)) is not None), None)
    if found is None:
        print("audit: no list of vulnerabilities could be reached from here, so nothing was looked up.")
        return 0
    bad = [(package, fault) for package in found for fault in package["vulns"]]
    for package, fault in bad:
        fix = f"; mended in {', '.join(fault['fix_versions'])}" if fault["fix_versions"] else ""
        print(f"audit: {package['name']} {package['version']}: {fault['id']}{fix}")
    print(f"audit: {len(found)} packages looked up, {len(bad)} vulnerabilities known.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
