"""Load the public names of a package on first use, because their imports are heavy or may not be installed."""

from __future__ import annotations

import sys
from importlib import import_module
from os.path import splitext

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would take most of the time of `import ckptstore`
    from collections.abc import Callable
    from typing import Any


def attach_stub(
    package: str, file: str, *, extra: str | None = None, own: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are listed in its stub.

    The stub, the `.pyi` file beside `file`, has a line `from MODULE import NAME as NAME` for each name; type checkers
    read the same list. A name whose MODULE is the package itself is a submodule, and not in `__all__`. `own` are names
    that the package defines. With `extra`, nothing is loaded where a package of that extra is missing. A module must
    not have the name of its contents, for Python puts a loaded module in the place of that name.
    """
    homes: dict[str, str] = {}
    spec: Any = sys.modules[package].__spec__
    stub: bytes = spec.loader.get_data(f"{splitext(file)[0]}.pyi")  # the package may lie in a zip file
    for line in stub.decode().splitlines():
        match line.split():
            case ["from", home, "import", _, "as", name]:
                homes[name] = home

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from ckptstore.runtime.extras import needs, not_installed

        if extra is not None:
            needs(extra)
        try:
            if homes[name] == package:
                return import_module(f"{package}.{name}")
            value = getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None
        setattr(sys.modules[package], name, value)
        return value

    exported = [name for name, home in homes.items() if home != package]
    return load, lambda: [*homes, *own], sorted([*exported, *own])
