"""Somebody who reads a page in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

WAIT_SECONDS = 60.0
DRAWN = "ckptstore-drawn"
"""The page sets this mark when all is drawn."""


class Reader:
    """One browser; what it is shown stays until it is shown something else."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def look_at(self, where: Path | str, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Open a page and wait until it has drawn all."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(where.as_uri() if isinstance(where, Path) else where)
        self.until(lambda: self.run("return performance.getEntriesByName(arguments[0]).length", DRAWN))

    def show(self, text: str, **how: Any) -> None:
        """Open the text of a page."""
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.look_at(path, **how)

    def resize(self, width: int, height: int) -> None:
        """A viewport of exactly so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
        return list(self.run(script, selector))

    def column(self, name: str, *, table: str = "#checkpoints-body table") -> list[str]:
        """The cells of a column of a table, as they are shown."""
        script = """const table = document.querySelector(arguments[0]);
        const heads = [...table.querySelectorAll("thead th")].map((one) => one.innerText.replace(/ [▲▼]$/, ""));
        const place = heads.indexOf(arguments[1]);
        return [...table.querySelectorAll("tbody > tr:not(.below)")].map((row) => row.children[place].innerText)"""
        return list(self.run(script, table, name))

    def press(self, *keys: str) -> None:
        """Keys, to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def until(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (value := what()):
            assert time.monotonic() < deadline, "the page did not come to that"
            time.sleep(0.02)
        return value

    def errors(self) -> list[str]:
        """What the browser complained about since the page was opened: scripts that failed, rules that were broken."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Where the page and what is in it asked for something, the page itself apart."""
        told = [json.loads(one["message"])["message"] for one in self.driver.get_log("performance")]
        asked = [one["params"] for one in told if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked if one.get("type") != "Document"]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window, when the window has been drawn again."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        return int(self.run("const one = document.documentElement; return one.scrollWidth - one.clientWidth"))
