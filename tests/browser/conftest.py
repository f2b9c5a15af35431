"""A browser for the tests of pages: Debian's chromium, one session for all of them, nothing of the network.

Where it is not installed the tests are skipped, and say why; in continuous integration they fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import Reader
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))  # reports that are made for what only reads them

BROWSER = Path(__file__).resolve().parents[2] / ".servers" / "browser"
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>{root}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{cache}</cachedir></fontconfig>
"""


@pytest.fixture(scope="session")
def _session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    root = BROWSER / "root"
    if not (BROWSER / ".unpacked").exists():
        message = "chromium is not installed; run `make servers`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    home = tmp_path_factory.mktemp("browser")
    (home / "fonts.conf").write_text(FONTS.format(root=root.resolve(), cache=home / "fonts"))
    libraries = [str(path) for path in root.resolve().glob("usr/lib/*-linux-gnu*")]
    libraries += [f"{path}/pulseaudio" for path in libraries]
    environment = {**os.environ, "HOME": str(home), "FONTCONFIG_FILE": str(home / "fonts.conf")}
    environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    options = webdriver.ChromeOptions()
    options.binary_location = str(root / "usr/lib/chromium/chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    for argument in ("--disable-background-networking", "--disable-component-update", "--no-first-run"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={home / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(str(root / "usr/bin/chromedriver"), env=environment)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Reader(driver, home)
    finally:
        driver.quit()


@pytest.fixture
def reader(_session: Reader) -> Iterator[Reader]:
    """A browser in which nothing is chosen yet: pages in files share what they store."""
    _session.driver.get("about:blank")
    yield _session
    if _session.driver.current_url.startswith("file:"):
        _session.run("localStorage.clear()")
