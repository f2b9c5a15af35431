"""What was called, as a report of it may say."""

from __future__ import annotations

import shlex
import sys

from ckptstore.storage.uri import redact

_SECRET = ("--storage-option", "--target-option")


def called() -> str:
    """The line, without the values of storage options and what a URI may hold of secrets."""
    words: list[str] = []
    for word in sys.argv[1:]:
        is_value = words[-1:] != [] and words[-1] in _SECRET
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if is_value or (equals and option in _SECRET):
            words.append(f"{word.partition('=')[0]}=...")
        else:
            words.append(f"{option}{equals}{redact(value)}")
    return shlex.join(["ckptstore", *words])
