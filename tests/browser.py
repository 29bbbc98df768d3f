"""Headless Chromium for the tests of pages; they are skipped where there is none."""
import contextlib
import os
import shutil

import pytest


@contextlib.contextmanager
def browser():
    """Yield playwright's Chromium, its own one or the first of that name on PATH."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with playwright.sync_playwright() as context:
        paths = [context.chromium.executable_path, shutil.which("chromium"), shutil.which("google-chrome")]
        path = next((path for path in paths if path and os.path.exists(path)), None)
        if path is None:
            pytest.skip("there is no Chromium: playwright install chromium, or apt install chromium")
        chromium = context.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
