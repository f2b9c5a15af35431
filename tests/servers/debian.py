"""Packages of Debian, unpacked and not installed: what a test needs, on a machine that stays as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

NEEDED = ("apt-get", "dpkg-deb")


def lacking() -> list[str]:
    """The programs that this needs and this machine does not have."""
    return [name for name in NEEDED if shutil.which(name) is None]


def unpacked(packages: tuple[str, ...], home: Path) -> Path:
    """The packages below `home`, with what they depend on and this machine lacks; no scripts of theirs are run.

    They come from the mirror that apt uses here, by lists of our own. Raises CalledProcessError where that fails.
    """
    shutil.rmtree(home, ignore_errors=True)
    root = home / "root"
    root.mkdir(parents=True)
    for archive in _downloaded(packages, home / "apt"):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as package:
            subprocess.run(["tar", "-x", "-C", root, "--keep-directory-symlink"], stdin=package.stdout, check=True)
    shutil.rmtree(home / "apt")
    return root


def _downloaded(packages: tuple[str, ...], home: Path) -> list[Path]:
    for name in ("lists/partial", "archives/partial"):
        (home / name).mkdir(parents=True)
    settings = {"Dir::State::lists": home / "lists", "Dir::Cache": home, "Dir::Cache::archives": home / "archives"}
    settings |= {"APT::Install-Recommends": "false", "APT::Sandbox::User": "", "Debug::NoLocking": "true"}
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update", "-qq"], check=True)
    command = ["apt-get", *options, "install", "-qq", "-y", "--download-only", "--reinstall", *packages]
    subprocess.run(command, check=True)
    return sorted((home / "archives").glob("*.deb"))
