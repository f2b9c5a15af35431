"""Replace the real primitives by the simulation's, in every module of ckptstore and of tenacity.

They are found by identity, not by name: globals of modules, defaults of arguments, closures of a dataclass's
`__init__`. Per-process state of modules (open leases, counters, locks) is found too, and each simulated process has its
own.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import itertools
import logging
import sys
import threading
import types
import typing
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from kit.simulation.virtual import clocks, primitives
from kit.simulation.virtual.scheduler import Process, running

_LEFT_OUT = ("ckptstore.testing", "ckptstore.tools.bench", "ckptstore.tools.demo", "ckptstore.tools.cli")
_PATCHED = ("ckptstore", "tenacity")
_CONTAINERS = (dict, list, set, Counter, defaultdict, deque)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition, threading.Semaphore)

Undo = Callable[[], None]
Replaced = dict[int, tuple[Any, Any]]


class _NoLock:
    """Replaces the lock in a `cached_property`, which all instances share, in all simulated processes."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __enter__(self) -> object:
        return self._real.__enter__() if running() is None else self

    def __exit__(self, *arguments: object) -> None:
        if running() is None:
            self._real.__exit__(*arguments)


def _modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in _PATCHED and not name.startswith(_LEFT_OUT)
    ]


def load(*names: str) -> None:
    """Import modules before they are patched: one that is loaded later waits with real locks."""
    for name in names:
        importlib.import_module(name)


@contextlib.contextmanager
def patched(extra: Replaced | None = None) -> Iterator[None]:
    """Patch every loaded module with simulated primitives, on simulated threads, during the context.

    `extra` is more to replace, by the identity of the real thing.
    """
    values = {**clocks.VALUES, **(extra or {})}
    undo: list[Undo] = []
    find = getattr(typing, "_get_protocol_attrs", None)
    if find is not None:  # a quarter of a run's time, with constant results
        undo.append(functools.partial(setattr, typing, "_get_protocol_attrs", find))
        typing._get_protocol_attrs = functools.cache(find)  # type: ignore[attr-defined]
    logger = logging.getLogger("ckptstore")
    level = logger.level
    try:
        for module in _modules():
            _patch_module(module, values, undo)
        logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        logger.setLevel(level)
        for action in reversed(undo):
            action()


def _patch_module(module: types.ModuleType, values: Replaced, undo: list[Undo]) -> None:
    names = vars(module)
    for name, value in [*names.items()]:
        if id(value) in values:
            names[name] = values[id(value)][1]
            undo.append(functools.partial(names.__setitem__, name, value))
        elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            _patch_function(value, values, undo)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for item in [*vars(value).values()]:
                function = getattr(item, "__func__", getattr(item, "fget", item))
                if isinstance(function, types.FunctionType):
                    _patch_function(function, values, undo)
                elif isinstance(item, functools.cached_property) and hasattr(item, "lock"):
                    undo.append(functools.partial(setattr, item, "lock", item.lock))
                    item.lock = _NoLock(item.lock)


def _patch_function(function: types.FunctionType, values: Replaced, undo: list[Undo]) -> None:
    if function.__defaults__ and any(id(value) in values for value in function.__defaults__):
        undo.append(functools.partial(setattr, function, "__defaults__", function.__defaults__))
        function.__defaults__ = tuple(_other(value, values) for value in function.__defaults__)
    keywords = function.__kwdefaults__
    if keywords and any(id(value) in values for value in keywords.values()):
        undo.append(functools.partial(setattr, function, "__kwdefaults__", dict(keywords)))
        function.__kwdefaults__ = {name: _other(value, values) for name, value in keywords.items()}
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            if id(value) in values:
                undo.append(functools.partial(setattr, cell, "cell_contents", value))
                cell.cell_contents = values[id(value)][1]


def _other(value: Any, values: Replaced) -> Any:
    return values[id(value)][1] if id(value) in values else value


class ModuleState:
    """The per-process state of modules: found once, swapped when the baton goes to another process."""

    def __init__(self) -> None:
        self._places = [
            (vars(module), name)
            for module in _modules()
            if module.__name__.startswith("ckptstore")
            for name in sorted(_held_names(module))
        ]
        self._real = [names[name] for names, name in self._places]

    def names(self) -> list[str]:
        """Return the names of the state, for inspection."""
        return [f"{names['__name__']}.{name}" for names, name in self._places]

    def swap(self, before: Process | None, after: Process | None) -> None:
        """Store the state of `before`, and restore that of `after`; None is the real process."""
        if before is not None:
            before.globals = {index: names[name] for index, (names, name) in enumerate(self._places)}
        if after is None:
            values: Any = self._real
        else:
            values = after.globals
            if values is None:
                values = [_fresh(value) for value in self._real]
        for index, (names, name) in enumerate(self._places):
            names[name] = values[index]


def _held_names(module: types.ModuleType) -> set[str]:
    """Return globals that functions assign, and private containers and locks in small letters."""
    found = set()
    for name, value in vars(module).items():
        is_private = name.startswith("_") and not name.startswith("__") and name == name.lower()
        if is_private and isinstance(value, (*_CONTAINERS, *_LOCKS)):
            found.add(name)
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    functions += [
        item
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
        for item in vars(value).values()
        if isinstance(item, types.FunctionType)
    ]
    for function in functions:
        if function.__module__ == module.__name__:
            found |= {step.argval for step in dis.get_instructions(function) if step.opname == "STORE_GLOBAL"}
    return found & vars(module).keys()


def _fresh(value: Any) -> Any:
    """Return a value as in a new process, whatever the real one has done before: what it holds would change runs."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory)
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    if isinstance(value, _CONTAINERS):
        return type(value)()
    if isinstance(value, threading.Thread):
        return None
    if isinstance(value, threading.Event):
        return primitives.SimEvent()
    if isinstance(value, threading.Condition):
        return primitives.SimCondition()
    if isinstance(value, threading.Semaphore):
        return primitives.SimSemaphore(value._value)
    if isinstance(value, _LOCKS):
        return primitives.SimLock(reentrant=not isinstance(value, type(threading.Lock())))
    if isinstance(value, itertools.count):
        return itertools.count()
    return value
