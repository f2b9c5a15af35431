"""The provenance of a checkpoint, as its manifest has it (format-v1, "Provenance"). Pure values.

It is for people. No decision depends on it, so a reader that cannot read it goes on without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The program that saved a checkpoint, as far as rank 0 found it out. Holds no secrets and no environment."""

    commit: str = ""
    """The commit of the program's git repository, hexadecimal; "" if it is unknown."""
    is_dirty: bool | None = None
    """True if a file that git tracks differed from the commit when the job began; None if it is unknown."""
    argv: tuple[str, ...] = ()
    """The command line of the program, with `***` in the place of secrets."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python, ckptstore and the packages that the program had imported, by name."""
    num_hosts: int | None = None
    """The number of hosts that the ranks ran on; None if it is unknown."""

    def to_json(self) -> dict[str, Any]:
        """Return the provenance as a field of the manifest, without what is unknown."""
        found = {
            "commit": self.commit,
            "is_dirty": self.is_dirty,
            "argv": list(self.argv),
            "versions": dict(self.versions),
            "num_hosts": self.num_hosts,
        }
        return {name: value for name, value in found.items() if value not in ("", None, [], {})}

    @staticmethod
    def from_json(value: object) -> Provenance | None:
        """Return the provenance of a field of a manifest; None if it is none that this version can read."""
        if not isinstance(value, Mapping):
            return None
        commit, is_dirty, num_hosts = value.get("commit", ""), value.get("is_dirty"), value.get("num_hosts")
        argv, versions = value.get("argv", []), value.get("versions", {})
        is_known = (
            isinstance(commit, str)
            and (is_dirty is None or isinstance(is_dirty, bool))
            and (num_hosts is None or (type(num_hosts) is int and num_hosts > 0))
            and isinstance(argv, list)
            and all(isinstance(argument, str) for argument in argv)
            and isinstance(versions, Mapping)
            and all(isinstance(text, str) for text in versions.values())
        )
        if not is_known:
            return None
        return Provenance(
            commit=commit, is_dirty=is_dirty, argv=tuple(argv), versions=dict(versions), num_hosts=num_hosts
        )
