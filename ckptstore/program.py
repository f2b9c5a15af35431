"""The running program: the commit of its code, its command line without secrets, and the packages that it uses."""

from __future__ import annotations

import os
import re
import sys
from functools import cache, lru_cache
from typing import Any

from ckptstore.format.provenance import Provenance
from ckptstore.runtime.parallel import started
from ckptstore.storage.uri import redact

PACKAGES = (
    *("torch", "numpy", "accelerate", "axolotl", "bitsandbytes", "datasets", "deepspeed", "diffusers", "flash_attn"),
    *("jax", "lightning", "megatron.core", "peft", "pytorch_lightning", "ray", "torchao", "torchtitan", "torchvision"),
    *("transformer_engine", "transformers", "triton", "trl", "verl", "vllm"),
)
"""The packages whose versions matter to somebody who wants the same numbers again."""
_GIT_SECONDS = 20.0
_MAX_CHARS = 8192
"""The most characters of a command line that are kept."""
_MASK = "***"
_SECRET = r"(?:token|key|secret|passw|passphrase|pwd|credential|auth(?!or)|authorization|bearer)"
# Repetitions have bounds, so that a long argument takes no longer than its length.
_NAMED = re.compile(rf"""({_SECRET}[\w.\-]{{0,64}}["']?\s{{0,8}}[=:]\s{{0,8}})(.+)""", re.IGNORECASE | re.DOTALL)
_OPTION = re.compile(rf"-{{1,2}}[^=\s]*{_SECRET}[^=\s]*", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer)\s{1,8}[\w.~+/=\-]{8,}", re.IGNORECASE)
_KNOWN = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|AIza|eyJ)[\w.\-]{12,}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s\"'<>]+")


def provenance(*, num_hosts: int | None = None) -> Provenance:
    """Return what is known of this program by now. Takes some microseconds: never waits, and never fails.

    The first call in a process begins the search for the commit, in the background. Until it has ended, and where there
    is no git or no repository, the commit is left out.
    """
    found, argv = _commit(os.getpid()), tuple(map(str, getattr(sys, "argv", ())))
    if argv and os.path.basename(argv[0]) == "default_worker.py":
        argv = ()  # the command line of a worker of Ray is about the cluster
    return Provenance(**found, argv=masked(argv), versions=_versions(), num_hosts=num_hosts)


@lru_cache(maxsize=8)
def masked(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command line with `***` for secrets: everything up to the next option behind one with token, key,
    secret, password or the like in its name, what stands behind such a name in one argument, and well-known forms of
    tokens.
    URLs are without users and queries.

    A secret under a name that tells nothing stays. Above 8,192 characters the rest is left out.
    """
    found: list[str] = []
    num_chars, is_secret = 0, False
    for argument in argv:
        text = argument[:_MAX_CHARS].encode("utf-8", "backslashreplace").decode()
        is_option = _OPTION.fullmatch(text) is not None
        is_secret = is_option or (is_secret and not text.startswith("--"))
        if is_secret:
            text = text if is_option else _MASK
        else:
            text = _KNOWN.sub(_MASK, _BEARER.sub(rf"\1 {_MASK}", text))
            text = _NAMED.sub(rf"\1{_MASK}", _URL.sub(lambda match: redact(match[0]), text))
        num_chars += len(argument)
        if num_chars > _MAX_CHARS:
            return (*found, f"... and {len(argv) - len(found)} more")
        found.append(text)
    return tuple(found)


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("ckptstore", *PACKAGES):
        # `vars` and not `getattr`, which would import in packages that are lazy.
        version = vars(sys.modules[name]).get("__version__") if sys.modules.get(name) is not None else None
        if isinstance(version, str):
            found[name] = str(version)
    return found


@cache
def _commit(pid: int) -> dict[str, Any]:
    """Begin to look for the commit of the program, and return the dict that will have it. Once for each process."""
    found: dict[str, Any] = {}
    folder = _folder()
    started(lambda: found.update(_asked_of_git(folder)), name=f"ckptstore-git-{pid}")
    return found


def _folder() -> str:
    """Return the folder of the program's script; the current one for a script that is part of the installation, as
    commands are, and without a script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return "."
    folder = os.path.dirname(os.path.abspath(script))
    return "." if f"{folder}/".startswith(f"{os.path.abspath(sys.prefix)}/") else folder


def _asked_of_git(folder: str) -> dict[str, Any]:
    """Return the commit of the repository in which a folder lies, and whether tracked files differ from it; nothing
    where git does not say so in time. Git writes nothing."""
    import subprocess

    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder)
    command = ("git", *options, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = next((line.rpartition(" ")[2] for line in lines if line.startswith("# branch.oid ")), "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return {}
    return {"commit": commit, "is_dirty": any(not line.startswith("#") for line in lines)}
