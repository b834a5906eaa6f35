"""A headless Chromium, for tests that look at a page: Debian's packages chromium and chromium-driver, and selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


def missing() -> str | None:
    """What there is not, or None."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"needs {program} (apt-get install {package})"
    return None if find_spec("selenium") else "needs selenium (pip install selenium)"


@contextmanager
def chromium(width: int = 1400, height: int = 1500) -> Iterator[Any]:
    """Selenium's driver of a new browser."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    # As root there is no sandbox; /dev/shm is small in containers.
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "disable-gpu",
        f"window-size={width},{height}",
    ):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
