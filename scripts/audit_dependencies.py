"""Check the versions in constraints.txt for known vulnerabilities; `make audit` and .ci/run call this.

Fails if one is known. If no vulnerability database can be reached, it says so and does not fail.
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
    """Return the report of a service on each package; None if the service cannot be reached."""
    options = ["--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service", service, "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "5"], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found = [package for package in json.loads(done.stdout)["dependencies"] if "vulns" in package]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return None
    return found or None  # a service that knows no package at all is not a real one


def main() -> int:
    """Print known vulnerabilities; return 1 if there are any."""
    found = next((known for service in SERVICES if (known := look_up(service)) is not None), None)
    if found is None:
        print("audit: no vulnerability database could be reached; nothing was checked.")
        return 0
    bad = [(package, fault) for package in found for fault in package["vulns"]]
    for package, fault in bad:
        fix = f"; fixed in {', '.join(fault['fix_versions'])}" if fault["fix_versions"] else ""
        print(f"audit: {package['name']} {package['version']}: {fault['id']}{fix}")
    print(f"audit: {len(found)} packages checked, {len(bad)} known vulnerabilities.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
