"""The names of stock DCP for the contents of an optimizer: torch itself names parameters within their module. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_SECTIONS = (".state.", ".param_groups.")


def stock_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the names without the key of the module, for keys of optimizers over one module:
    `optim.state.0.weight.exp_avg` for `optim.state.model.0.weight.exp_avg`. A module inside a container of the state
    keeps its key.

    An optimizer is recognised by its names: each contains the key of a tensor. If such a name is taken, return none.
    """
    known = set(keys)
    tops: dict[str, set[str]] = {}
    found: dict[str, list[tuple[str, str, str]]] = {}
    for key in known:
        for section in _SECTIONS:
            optimizer, _, rest = key.partition(section)
            if rest:
                top = rest.partition(".")[0]
                tops.setdefault(optimizer, set()).add(top if _holds_key(rest, known) else "")
                found.setdefault(optimizer, []).append((key, f"{optimizer}{section}{top}.", f"{optimizer}{section}"))
                break
    names = {
        key: new + key.removeprefix(old)
        for optimizer, each in found.items()
        if len(tops[optimizer]) == 1 and "" not in tops[optimizer]
        for key, old, new in each
    }
    return {} if not known.isdisjoint(names.values()) else names


def _holds_key(rest: str, known: set[str]) -> bool:
    end = rest.find(".")
    while end >= 0:
        if rest[:end] in known:
            return True
        end = rest.find(".", end + 1)
    return False


def stock_path(path: tuple[str | int, ...], key: str, name: str) -> tuple[str | int, ...]:
    """Return the path of the key that stock readers call `name`, from the path of the key."""
    removed = len(key) - len(name)
    if not removed:
        return path
    for place, part in enumerate(path):
        for section in _SECTIONS:
            if isinstance(part, str) and part.startswith(section[1:]):
                begin = len(section) - 1
                return (*path[:place], part[:begin] + part[begin + removed :], *path[place + 1 :])
    return (name,)
