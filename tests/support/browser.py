"""A real browser without a window."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """The Chromium of this machine; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium: not run")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses root otherwise
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        try:
            yield browser
        finally:
            browser.close()
