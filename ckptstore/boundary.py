"""Check plain arguments of public calls, and shorten the tracebacks of errors to two lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, wraps
from numbers import Real
from typing import Any, TypeVar

from ckptstore.config import shows_full_tracebacks
from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.retention import Policy
from ckptstore.runtime.extras import not_installed

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_LEFT_OUT = object()
_SPECIAL = ("__getitem__", "__contains__", "__enter__")


def boundary(function: F) -> F:
    """Wrap a public function so that the tracebacks of its errors leave out the frames inside ckptstore.

    The cause of an error keeps its traceback, since a user's object or a storage may have raised it. With
    `CKPTSTORE_TRACEBACKS=full` all frames stay. The function raises InvalidInput for a switch that is no bool, and for
    what is no number, text or path where its annotation asks for one.
    """
    checked = _checked(function)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            for name, (place, is_sound, what) in checked.items():
                value = args[place] if place < len(args) else keywords.get(name, _LEFT_OUT)
                if value is not _LEFT_OUT and not is_sound(value):
                    raise InvalidInput(f"{name} is {value!r}, it is {what}")
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


def _checked(function: Callable[..., Any]) -> dict[str, tuple[int, Callable[[Any], bool], str]]:
    """Return the place, the check and the description of each parameter whose annotation has one.

    A text such as "false", from a file of settings, is true, and would pass for the opposite of what it says.
    """
    found = {name: _KINDS[kind] for name, kind in function.__annotations__.items() if kind in _KINDS}
    names = function.__code__.co_varnames if found else ()
    return {name: (place, *found[name]) for place, name in enumerate(names) if name in found}


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and float(value) == value  # no NaN, and none that no float holds
    except OverflowError:
        return False


def is_path(value: Any) -> bool:
    """Return True for text, or an object that stands for one, that a file system can take."""
    try:
        path = os.fspath(value)
        return isinstance(path, str) and b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        return False


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "float": (_is_number, "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "str | os.PathLike[str]": (is_path, "a path"),
    "Policy": (lambda value: isinstance(value, Policy), "a policy such as KeepLatest(3)"),
    "Executor": (lambda value: callable(getattr(value, "run", None)), "an object with a method `run`"),
}
_KINDS = _PLAIN | {
    f"{kind} | None": (lambda value, is_sound=is_sound: value is None or is_sound(value), f"{what}, or None")
    for kind, (is_sound, what) in _PLAIN.items()
}
"""The annotations that are checked."""


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
