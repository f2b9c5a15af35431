"""Name the files of all ranks in one checkpoint (format-v1, "File names"). Pure.

Each rank makes an `Offer`; the leader turns all offers into one `Naming`, before any byte moves; with it every rank
names its own files. Names decide, never content, except for the files that are declared shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

from ckptstore.errors import InvalidInput, InvalidName, InvalidSource
from ckptstore.format.layout import check_collisions, check_name, directories_of, ranked_name

Suffix = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Offer:
    """The files and directories of one rank."""

    suffix: Suffix
    names: Sequence[str] = ()
    directories: Sequence[str] = ()
    """Directories without a file in them."""
    shared: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The size and the SHA-256 of each shared file that this rank has, by name."""
    size_bytes: int = 0
    """The bytes to be newly stored."""

    def to_json(self) -> list[Any]:
        """Return the offer as JSON, for the leader."""
        fields = [self.suffix, list(self.names), list(self.directories), dict(self.shared)]
        return [*fields, self.size_bytes]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Offer:
        """Invert `to_json`."""
        return Offer(*fields)


@dataclass(frozen=True, slots=True)
class Naming:
    """The agreement by which all ranks name their own files."""

    suffix: Suffix
    colliding: frozenset[str]
    """Names that several ranks contribute, each its own file."""
    shared: Mapping[str, int]
    """The rank that writes each shared file."""
    directories: tuple[str, ...]
    size_bytes: int
    """The bytes to be newly stored, of all ranks together."""

    def to_json(self) -> list[Any]:
        """Return the agreement as JSON, for all ranks."""
        return [self.suffix, sorted(self.colliding), dict(self.shared), list(self.directories), self.size_bytes]

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Naming:
        """Invert `to_json`."""
        suffix, colliding, shared, directories, size_bytes = fields
        return Naming(suffix, frozenset(colliding), shared, tuple(directories), size_bytes)

    def stored(self, names: Iterable[str], rank: int) -> dict[str, str]:
        """Map the names of this rank's files to their names in the checkpoint, without those that another rank
        writes."""
        if not self.shared and not self.colliding and self.suffix != "always":
            return {name: name for name in names}
        found: dict[str, str] = {}
        for name in names:
            if name in self.shared:
                if self.shared[name] == rank:
                    found[name] = name
            else:
                is_ranked = self.suffix == "always" or name in self.colliding
                found[name] = ranked_name(name, rank) if is_ranked else name
        return found


def agree(offers: Sequence[Offer]) -> Naming:
    """Join the offers of all ranks, in rank order.

    The options are those of rank 0; the caller has checked that they are equal on all ranks. Raises InvalidName for a
    collision or a name that is too long with its suffix, InvalidSource when a shared file differs between ranks.
    """
    suffix = offers[0].suffix
    if suffix not in get_args(Suffix):
        raise InvalidInput(f"suffix is {suffix!r}, it is one of {', '.join(get_args(Suffix))}")
    shared = _agree_on_shared(offers)
    counts = Counter(chain.from_iterable(offer.names for offer in offers))
    colliding = frozenset(name for name, count in counts.items() if count > 1 and name not in shared)
    if colliding and suffix == "never":
        name = min(colliding)
        ranks = tuple(rank for rank, offer in enumerate(offers) if name in offer.names)
        raise InvalidName(
            f'Several ranks have files of the same name ({len(colliding)} names, such as {name!r}), and suffix="never"',
            ranks=ranks,
            hint='Name the files apart, list them in shared=[...], or use suffix="auto"',
        )
    directories = tuple(sorted(set(chain.from_iterable(offer.directories for offer in offers))))
    agreement = Naming(suffix, colliding, shared, directories, sum(offer.size_bytes for offer in offers))
    stored = list(
        chain.from_iterable(agreement.stored(offer.names, rank).values() for rank, offer in enumerate(offers))
    )
    for name in stored if suffix == "always" or colliding else ():  # the others were checked when they were found
        check_name(name)
    with_files = directories_of(stored) if directories else ()
    check_collisions([*stored, *(name for name in directories if name not in with_files)])
    return agreement


def _agree_on_shared(offers: Sequence[Offer]) -> dict[str, int]:
    writers: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        for name, seen in offer.shared.items():
            writer = writers.setdefault(name, rank)
            first = offers[writer].shared[name]
            if list(seen) != list(first):
                raise InvalidSource(
                    f"the shared file {name!r} differs: rank {writer} has {first[0]} bytes with SHA-256 "
                    f"{first[1][:12]}, rank {rank} has {seen[0]} bytes with {seen[1][:12]}",
                    file=name,
                    ranks=(writer, rank),
                    hint="Take it out of shared=[...] to keep every rank's copy",
                )
    return writers


def spread_directory(rank: int, num_prefixes: int) -> str:
    """Return the directory of a rank's files with its slash, "" if they are not spread. The digit that differs from
    rank to rank comes first, for storages that partition by the beginnings of keys."""
    if num_prefixes == 1:
        return ""
    num_digits = len(f"{num_prefixes - 1:x}")
    return f"{rank % num_prefixes:0{num_digits}x}"[::-1] + "/"
