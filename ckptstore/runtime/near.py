"""Guess the name meant by one that does not exist. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

_WILD = frozenset("*?[")
_MOST_SHOWN = 20


def nearest(name: str, there: Iterable[str]) -> str | None:
    """Return the existing name that is most like this one, None if none is."""
    found = get_close_matches(name, sorted(set(there)), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_key(pattern: str, keys: Collection[str]) -> str | None:
    """Return a similar pattern that fits some of the keys: part by part the nearest, up to the first wildcard; None if
    no other one does."""
    mended: list[str] = []
    parts = pattern.split(".")
    for index, part in enumerate(parts):
        if _WILD & set(part):
            mended += parts[index:]
            break
        above = ".".join([*mended, ""])
        below = {key[len(above) :].split(".")[0] for key in keys if key.startswith(above)}
        found = part if part in below else nearest(part, below)
        if found is None:
            return None
        mended.append(found)
    return ".".join(mended) if mended != parts else None


def shown(names: Iterable[str]) -> str:
    """Return sorted names as text, only the first ones of very many; "nothing" if there are none."""
    ordered = sorted(set(names))
    more = f" and {len(ordered) - _MOST_SHOWN} more" if len(ordered) > _MOST_SHOWN else ""
    return ", ".join(ordered[:_MOST_SHOWN]) + more if ordered else "nothing"


def meant(found: str | None) -> str:
    """Return the end of a message about a name that does not exist: a question for another one, or a full stop."""
    return f"; did you mean {found!r}?" if found else "."
