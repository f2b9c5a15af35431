"""Packages whose names are loaded on first use, because what they need is heavy or may not be installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ckptstore.runtime.extras import needs, not_installed


def exports(package: str, homes: Mapping[str, str], *, extra: str | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562): for each public name the module below it that defines the name.

    With `extra`, nothing is loaded where a package of that extra is missing. A module must have another name than what
    it defines, for Python puts a loaded module in the place of that name.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if extra is not None:
            needs(extra)
        try:
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None
        setattr(sys.modules[package], name, value)
        return value

    return load
