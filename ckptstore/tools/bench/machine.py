"""Describe the machine, and the versions of all packages that take part."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.destination import Place

_PACKAGES = ("ckptstore", "torch", "numpy", "awscrt", "fsspec")


def describe(place: Place) -> dict[str, Any]:
    """Return the machine, without its name."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "storage": _file_system(place.path) if place.is_local else parse_uri(place.uri).scheme,
        "load_average": round(os.getloadavg()[0], 2),
    }


def gpus() -> dict[str, Any]:
    """Return the GPUs of this machine and their driver, from `nvidia-smi`; without it, from torch."""
    fields = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return {"gpus": found, "driver": f"unknown: {error}", "cuda": torch.version.cuda}
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return {
        "gpus": [f"{name}, {memory}, PCIe {generation} x{width}" for name, _, memory, generation, width in rows],
        "driver": ", ".join(dict.fromkeys(row[1] for row in rows)),
        "cuda": torch.version.cuda,
    }


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of these packages and of ckptstore's own, if they are installed."""
    found = {}
    for name in (*_PACKAGES, *sorted({*packages} - {*_PACKAGES})):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _file_system(path: Path) -> str:
    """Return the type of the file system of a path."""
    found = [item for item in psutil.disk_partitions(all=True) if path.is_relative_to(item.mountpoint)]
    return max(found, key=lambda item: len(item.mountpoint)).fstype if found else "a disk"
