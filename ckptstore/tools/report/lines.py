"""Lines to copy into a shell, quoted for it. What no line can carry safely has none. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ckptstore.format.changes import StoreState
from ckptstore.storage.uri import redact
from ckptstore.tools.report.history import Life


class Lines:
    """The lines for one store. Storage options are not in them: who needs some adds them."""

    def __init__(self, uri: str, state: StoreState, lives: Mapping[int, Life]) -> None:
        self._uri = uri
        self._is_usable = can_be_named(uri)
        self._state = state
        self._newest_live: dict[int, int] = {}
        self._trashed: dict[int, int] = {}
        for number, life in lives.items():
            if life.status == "live":
                self._newest_live[life.entry.step] = max(number, self._newest_live.get(life.entry.step, 0))
            elif life.status == "trash":
                self._trashed[life.entry.step] = self._trashed.get(life.entry.step, 0) + 1
        self._highest_pin = max(state.pinned, default=0)

    def of_store(self) -> dict[str, str]:
        """Return the lines for the store as a whole."""
        if not self._is_usable:
            return {}
        return {
            "ls": _line("ls", self._uri),
            "prune": _line("prune", self._uri),
            "gc": _line("gc", "--dry-run", self._uri),
            "verify": _line("verify", "--all", self._uri),
            "cp": _line("cp", self._uri, "copy-of-store"),
        }

    def of_checkpoint(self, life: Life) -> dict[str, str]:
        """Return the lines for a checkpoint that its status allows, and that name it and no other one of the same
        step."""
        if not self._is_usable:
            return {}
        step, target = life.entry.step, f"{self._uri}@{life.entry.step}"
        if life.status == "trash":
            found = {"prune": _line("prune", self._uri)}
            other = self._newest_live.get(step)
            state = self._state
            if other is None or (other in state.thinned and state.place(other) == state.place(life.number)):
                number = ["--number", str(life.number)] if self._trashed[step] > 1 else []
                found["restore"] = _line("restore", *number, target)
            return found
        if life.status != "live" or self._newest_live[step] != life.number:
            return {}
        pin = "unpin" if life.number in self._state.pinned else "pin"
        found = {pin: _line(pin, target), "cp": _line("cp", target, f"step-{step}"), "verify": _line("verify", target)}
        can_resume = life.number not in self._state.thinned
        if life.number != self._state.latest and self._highest_pin <= life.number and can_resume:
            found["rollback"] = _line("rollback", target)
        return found


def can_be_named(uri: str) -> bool:
    """Return True if a line with the URI means the same in another shell: not for what lies in the memory of this
    process, for text that a terminal takes for a command to itself, and for a secret, which no line may have."""
    return not uri.startswith("memory://") and uri.isprintable() and redact(uri) == uri


def _line(*words: str) -> str:
    return shlex.join(["ckptstore", *words])
