"""Puts Debian's chromium and its driver into `.servers/browser`: run by `make servers`.

Nothing is installed on the machine. The packages that it lacks come from the mirror that apt uses here. Without apt or
a mirror the tests of pages are skipped, and say why; with CI set that is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

BROWSER = Path(__file__).resolve().parents[2] / ".servers" / "browser"
PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core", "fontconfig-config")
# Debian's wrapper of chromium and the packages' scripts expect to lie under /usr; the programs themselves do not.
PROGRAMS = ("root/usr/lib/chromium/chromium", "root/usr/bin/chromedriver")


def main() -> int:
    if (BROWSER / ".unpacked").exists():
        return 0
    lacking = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if lacking:
        print(f"{', '.join(lacking)} is missing: the tests of pages in a browser cannot run", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    shutil.rmtree(BROWSER, ignore_errors=True)
    try:
        unpack(download(BROWSER / "apt"))
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"chromium cannot be downloaded, so its tests cannot run: {error}", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    return 0


def download(home: Path) -> list[Path]:
    """The packages and those of what they depend on that the machine lacks, with lists and archives of our own."""
    for name in ("lists/partial", "archives/partial"):
        (home / name).mkdir(parents=True)
    settings = {"Dir::State::lists": home / "lists", "Dir::Cache": home, "Dir::Cache::archives": home / "archives"}
    settings |= {"APT::Install-Recommends": "false", "APT::Sandbox::User": "", "Debug::NoLocking": "true"}
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update", "-qq"], check=True)
    command = ["apt-get", *options, "install", "-qq", "-y", "--download-only", "--reinstall", *PACKAGES]
    subprocess.run(command, check=True)
    return sorted((home / "archives").glob("*.deb"))


def unpack(archives: list[Path]) -> None:
    """Unpack without running any package's scripts."""
    root = BROWSER / "root"
    root.mkdir()
    for archive in archives:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as package:
            subprocess.run(["tar", "-x", "-C", root, "--keep-directory-symlink"], stdin=package.stdout, check=True)
    for program in PROGRAMS:
        if not (BROWSER / program).exists():
            raise FileNotFoundError(f"the packages have no {program}")
    shutil.rmtree(BROWSER / "apt")
    (BROWSER / ".unpacked").touch()


if __name__ == "__main__":
    sys.exit(main())
