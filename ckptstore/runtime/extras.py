"""The packages of each extra, and the error where one is missing.

Code that needs an optional package just imports it. `boundary`, `lazy.attach_stub` and the command line turn the
ModuleNotFoundError into this error. `needs` raises it before anything heavy is imported.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ckptstore.errors import InvalidInput

TORCH = ("torch", "numpy", "xxhash")

EXTRAS = {
    "torch": TORCH,
    "s3": ("botocore",),
    "gcs": ("google.auth", "requests"),
    "azure": ("azure.storage.blob", "azure.identity"),
    "fsspec-clouds": ("s3fs", "gcsfs", "adlfs"),
    "ray": ("ray", "pyarrow"),
    "lightning": (*TORCH, "lightning"),
    "transformers": (*TORCH, "transformers"),
    "torchtitan": (*TORCH, "torchtitan"),
    "torch-checkpointing": (*TORCH, "torch_checkpointing"),
    "otel": ("opentelemetry",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "demo": (*TORCH, "sklearn", "matplotlib"),
    "bench": (*TORCH, "psutil"),
    "publish": (*TORCH, "zstandard"),
    "pull": ("zstandard", "numpy", "xxhash"),
    "serve": ("waitress",),
}
"""The packages that each extra cannot work without. A package of several extras is reported with the first of them."""

SOURCE = "."
"""The argument of pip for ckptstore: a clone, since it is on no package index. A release makes it "ckptstore", and
`make docs` writes the pages anew."""
_EQUALLY_GOOD = {"lightning": "pytorch_lightning"}
"""The same code under another name, by package."""
_OF_ITS_OWN = ("pandas", "pytest")
"""Packages that no extra brings."""


def needs(*extras: str, what: str = "This") -> None:
    """Raise InvalidInput unless all packages of these extras are installed. Imports none of them."""
    missing = {extra: _missing(EXTRAS[extra]) for extra in extras}
    if any(missing.values()):
        names = list(dict.fromkeys(name for packages in missing.values() for name in packages))
        raise _error(what, names, ",".join(extra for extra, packages in missing.items() if packages))


def not_installed(error: ModuleNotFoundError) -> InvalidInput | None:
    """Return the error for a module of an optional package, or of ours, that could not be imported; None for others."""
    package = _top(error.name or "")
    if package == "ckptstore":
        return InvalidInput(f"This needs {error.name}, which this installation of ckptstore does not have")
    if package in _OF_ITS_OWN:
        return InvalidInput(f"This needs {package}, which is not installed", hint=f"Install it: pip install {package}")
    extra = next((extra for extra, packages in EXTRAS.items() if package in map(_top, packages)), None)
    if extra is None:
        return None
    if missing := _missing(EXTRAS[extra]):
        return _error("This", missing, extra)
    hint = f"Update it{install_line(extra, '--upgrade ')}"
    return InvalidInput(f"This needs {error.name}, which the installed {package} does not have", hint=hint)


def installed(extra: str) -> bool:
    """Return True if all packages of an extra are installed. Imports none of them."""
    return not _missing(EXTRAS[extra])


def install_command(extras: str, options: str = "") -> str:
    """Return what installs one extra, or several with commas between, in a shell."""
    return f"pip install {options}'{SOURCE}[{extras}]'"


def install_line(extras: str, options: str = "") -> str:
    """Return the end of a sentence on how to install extras: where, a colon, and the command."""
    place = " in your clone of ckptstore" if SOURCE == "." else ""
    return f"{place}: {install_command(extras, options)}"


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if not (_is_there(name) or _is_there(_EQUALLY_GOOD.get(name, name)))]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_there(package: str) -> bool:
    try:
        return package in sys.modules or find_spec(package) is not None
    except ModuleNotFoundError:  # of what it is inside of
        return False


def _error(what: str, missing: list[str], extras: str) -> InvalidInput:
    names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
    verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
    hint = f"Install {them}{install_line(extras)}"
    return InvalidInput(f"{what} needs {names}, which {verb} not installed", hint=hint)
