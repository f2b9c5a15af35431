"""Puts Debian's chromium and its driver into `.servers/browser`: run by `make servers`.

Nothing is installed on the machine. The packages that it lacks come from the mirror that apt uses here. Without apt or
a mirror the tests of pages are skipped, and say why; with CI set that is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))

import debian

BROWSER = Path(__file__).resolve().parents[2] / ".servers" / "browser"
PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core", "fontconfig-config")
# Debian's wrapper of chromium expects to lie under /usr; the programs themselves do not.
PROGRAMS = ("usr/lib/chromium/chromium", "usr/bin/chromedriver")


def main() -> int:
    if (BROWSER / ".unpacked").exists():
        return 0
    if missing := debian.lacking():
        print(f"{', '.join(missing)} is missing: the tests of pages in a browser cannot run", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    try:
        root = debian.unpacked(PACKAGES, BROWSER)
    except subprocess.CalledProcessError as error:
        print(f"chromium cannot be downloaded, so its tests cannot run: {error}", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    if absent := [program for program in PROGRAMS if not (root / program).exists()]:
        print(f"the packages have no {', '.join(absent)}", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    (BROWSER / ".unpacked").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
