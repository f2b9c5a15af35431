"""Puts Ceph's radosgw into `.servers/ceph`: run by `make test-ceph`. Nothing is installed on the machine.

The packages come from Debian's unstable suite, at the mirror that apt uses here: the radosgw of Debian 12 knows neither
checksums nor conditional completion of uploads. Without apt, root or a mirror the tests are skipped, and say why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CEPH = Path(__file__).resolve().parents[2] / ".servers" / "ceph"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = (
    *("radosgw", "ceph-mon", "ceph-osd", "ceph-common", "python3-rados"),
    *("base-files", "bash", "coreutils", "dash", "grep", "sed", "util-linux"),
)


def main() -> int:
    if (CEPH / ".unpacked").exists():
        return 0
    lacking = [name for name in ("apt-get", "dpkg-deb", "unshare", "chroot") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        print(f"Ceph needs root, and {', '.join(lacking) or 'apt'}: its tests cannot run", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    shutil.rmtree(CEPH, ignore_errors=True)
    try:
        unpack(download(CEPH / "apt"))
    except (subprocess.CalledProcessError, LookupError) as error:
        print(f"Ceph cannot be downloaded, so its tests cannot run: {error}", file=sys.stderr)
        return int(bool(os.environ.get("CI")))
    return 0


def download(home: Path) -> list[Path]:
    """All packages and what they depend on, by an apt configuration that knows of nothing that is installed."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (home / name).mkdir(parents=True)
    (home / "status").touch()
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Created-By: Packages"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    mirrors = [line for line in told if "security" not in line]
    if not mirrors:
        raise LookupError("apt knows no mirror of Debian")
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (home / "sources.list").write_text(f"deb {signed}{mirrors[0]} sid main\n")
    settings = {
        "Dir::State": home / "state",
        "Dir::State::status": home / "status",
        "Dir::Cache": home / "cache",
        "Dir::Etc::sourcelist": home / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "APT::Install-Recommends": "false",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", *options, "update", "-qq"], check=True)
    subprocess.run(["apt-get", *options, "install", "-qq", "-y", "--download-only", *PACKAGES], check=True)
    return sorted((home / "cache/archives").glob("*.deb"))


def unpack(archives: list[Path]) -> None:
    """Unpack without running any package's scripts."""
    root = CEPH / "root"
    root.mkdir()
    for archive in archives:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as package:
            subprocess.run(["tar", "-x", "-C", root, "--keep-directory-symlink"], stdin=package.stdout, check=True)
    shutil.rmtree(CEPH / "apt")
    (CEPH / ".unpacked").touch()


if __name__ == "__main__":
    sys.exit(main())
