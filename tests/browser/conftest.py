"""A real browser."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window, where it is installed; .ci/run installs it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    reason = "" if program else "Chromium is not installed"
    if importlib.util.find_spec("playwright") is None:
        reason = "Playwright is not installed: pip install 'muralist[test]'"
    if reason:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without a sandbox it also runs as root, in a container; the pages are our own.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()
