"""How the demo speaks, and how it fails."""

from __future__ import annotations

import sys

from ckptstore import InvalidInput
from ckptstore.storage.open import open_storage


class DemoFailed(Exception):
    """Something in the demo was not as it has to be."""


def require_empty(root: str) -> None:
    """Raise InvalidInput where something is already."""
    storage = open_storage(root)
    first = next(iter(storage.list("")), None)
    storage.close()
    if first is not None:
        raise InvalidInput(f"{root} is not empty: it holds {first.key}", hint="Give the demo a place of its own")


def head(text: str) -> None:
    """Begin a part of a scene."""
    shout(f"\n {text}")


def say(text: str) -> None:
    """One line of a part."""
    print(f"   {text}", flush=True)


def shout(text: str) -> None:
    """A line that stands out."""
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)
