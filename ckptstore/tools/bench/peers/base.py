"""What a contender is asked to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role

Wait = Callable[[], object]
"""Returns when all that was begun is done."""


ZIPPED = "CRC-32 of zip entries is written; a load does not read it"
"""What torch.save does against damage."""
BY_FSSPEC = "on S3 a CRC32 of each request"
BY_ARROW = "on S3 a CRC64 of each request"
MOST_FILES = 1000
"""Of a setting that makes a file for each tensor: with more of them it is not tried, for it only gets slower."""


class Contender:
    """One way to save and to load. It is made in every rank; its methods are collective, but `objection`, `sweep` and
    `discard`.

    Only `save` and `load` are timed. A place is a URI below which nothing is, the same on all ranks.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    """What `--peers` calls it."""
    role: ClassVar[Role] = "peer"
    modules: ClassVar[Sequence[str]] = ()
    """What must be installed."""
    packages: ClassVar[Sequence[str]] = ()
    """Whose versions are recorded."""
    checks: ClassVar[str] = "nothing"
    """What it does against damage, while it is timed."""
    warmed: ClassVar[Sequence[str]] = ()
    """The actions of which one turn makes what the later ones use again: memory, a process, a plan. With each setting
    that turn is taken before the clock runs."""

    def __init__(self, case: Case, **settings: Any) -> None:
        self.case = case
        self.settings = settings
        self.noted: dict[str, list[float]] = {}
        """What was measured besides, turn by turn."""

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        """Why this is nothing for it, whatever is installed; None if it is. Asked of a case without tensors too."""
        return None

    @classmethod
    def objection(cls, case: Case) -> str | None:
        """Why it cannot take part here; None if it can."""
        missing = [name for name in cls.modules if not _is_installed(name)]
        return cls.unfit(case) or (f"{', '.join(missing)} is not installed" if missing else None)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        """The settings to try for "save" or "load"."""
        return [{}]

    def prepare(self, place: str) -> None:
        """What a job does once, and what is the same for all."""

    def save(self, place: str) -> Wait | None:
        """Save the case's state; returns how to wait for the rest, None when all is done."""
        raise NotImplementedError(f"{self.name} does not save")

    def staged(self) -> None:
        """After a save has returned: wait until the state may change."""

    def after(self, place: str) -> None:
        """After a save: give back what `prepare` took."""

    def discard(self, place: str) -> None:
        """Remove what was saved there; the first rank alone is asked."""
        self.case.place.remove(place)

    def load(self, place: str) -> None:
        """Load what was saved there into the case's target."""
        raise NotImplementedError(f"{self.name} does not load")

    def wrong(self) -> str | None:
        """What differs after a load; None when nothing does."""
        from ckptstore.tools.bench.shapes import difference

        return difference(self.case.local_target, self.case.local)

    def close(self) -> None:
        """Give everything back."""

    def note(self, name: str, value: float) -> None:
        """Tell something else of this turn: the report has the median of all turns."""
        self.noted.setdefault(name, []).append(value)


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is in
        return False


def installed_versions(contenders: Sequence[type[Contender]]) -> dict[str, str]:
    """Of every package that is named and installed."""
    found = {}
    for name in sorted({name for contender in contenders for name in contender.packages}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_durable(path: Path) -> None:
    """fsync of a file, or of all files below a directory, and of the directories."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    directories = {file.parent for file in files} | {path.parent}
    for item in [*files, *directories]:
        descriptor = os.open(item, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def shares_of(state: Mapping[str, Any], count: int) -> list[list[str]]:
    """The names of tensors in at most so many shares of about the same bytes."""
    shares: list[list[str]] = [[] for _ in range(max(1, min(count, len(state))))]
    sizes = [0] * len(shares)
    for name in sorted(state, key=lambda name: -state[name].nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += state[name].nbytes
    return shares
