"""Check the switches of public calls, and shorten the tracebacks of errors to two lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from types import UnionType
from typing import Any, TypeVar

from ckptstore.config import shows_full_tracebacks
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.runtime.extras import not_installed

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SPECIAL = ("__getitem__", "__contains__", "__enter__")


def boundary(function: F) -> F:
    """Wrap a public function so that the tracebacks of its errors leave out the frames inside ckptstore.

    The cause of an error keeps its traceback, since a user's object or a storage may have raised it. With
    `CKPTSTORE_TRACEBACKS=full` all frames stay. The function raises InvalidInput for a switch that is no bool.
    """
    switches = _switches(function)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            for name, (place, may_be) in switches.items():
                if not isinstance(value := args[place] if place < len(args) else keywords.get(name, True), may_be):
                    raise InvalidInput(f"{name} is {value!r}, it is True or False")
            return function(*args, **keywords)
        except CkptstoreError as error:
            if shows_full_tracebacks():
                raise
            raise error.with_traceback(None)  # CKPTSTORE_TRACEBACKS=full shows the frames inside
        except ModuleNotFoundError as error:
            missing = not_installed(error)
            if missing is None:
                raise
            raise missing from error

    return call  # type: ignore[return-value]


def _switches(function: Callable[..., Any]) -> dict[str, tuple[int, UnionType | type]]:
    """Return the place, and the classes, of each parameter that is True or False.

    A text such as "false", from a file of settings, is true, and would pass for the opposite of what it says.
    """
    kinds = {"bool": bool, "bool | None": bool | None}
    found = {name: kinds[kind] for name, kind in function.__annotations__.items() if kind in kinds}
    names = function.__code__.co_varnames if found else ()
    return {name: (place, found[name]) for place, name in enumerate(names) if name in found}


def bounded(cls: type[T]) -> type[T]:
    """Make every public method and property of a class a `boundary`."""
    for name, item in list(vars(cls).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if isinstance(item, property):
            setattr(cls, name, property(boundary(item.fget), doc=item.__doc__) if item.fget else item)
        elif isinstance(item, cached_property):
            item.func = boundary(item.func)
        elif isinstance(item, classmethod | staticmethod):
            setattr(cls, name, type(item)(boundary(item.__func__)))
        elif callable(item) and not isinstance(item, type):
            setattr(cls, name, boundary(item))
    return cls
