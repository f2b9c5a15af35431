"""Build the extension of the stand-in accelerator once for each torch and each source, and cache it for this user."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

from ckptstore.runtime.file_locks import Exclusive

_SOURCE = Path(__file__).with_name("stand_in.cpp")
_BUILD_SECONDS = 600


class CannotBuild(Exception):
    """Raised with the reason why the extension cannot be built: no compiler, no headers, another system."""


def built_extension() -> Path:
    """Return the shared library, built first if necessary: that takes about a minute of one processor.

    Concurrent callers wait for the one that builds. Raises CannotBuild, with the first lines of the compiler's output.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptstore" / "stand-in-accelerator"
    library = folder / f"{_digest()}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Exclusive(folder / "lock").held(wait_seconds=math.inf):
            if not library.exists():
                _build(library)
    except OSError as error:
        raise CannotBuild(f"the stand-in accelerator cannot be built in {folder}: {error}") from error
    return library


def _digest() -> str:
    contents = f"{torch.__version__} {sysconfig.get_platform()} {_compiler()} ".encode() + _SOURCE.read_bytes()
    return hashlib.sha256(contents).hexdigest()[:32]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _build(library: Path) -> None:
    torch_library = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(_compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", str(_SOURCE), "-o", str(made)),
            *(f"-I{path}" for path in cpp_extension.include_paths()),
            *(f"-L{torch_library}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_library}"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{_compiler()} did not end within {_BUILD_SECONDS} seconds") from error
        if done.returncode:
            errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line) or done.stderr
            raise CannotBuild(f"{_compiler()} cannot build the stand-in accelerator: {errors[:3000]}")
        made.replace(library)
