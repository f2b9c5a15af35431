"""The interface of a contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any, ClassVar

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.destination import Place
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.raw import sync
from ckptstore.tools.bench.shapes import difference

Wait = Callable[[], object]
"""Returns when all work begun is done."""
Settings = dict[str, Any]

ZIPPED = "CRC-32 of zip entries is written; a load does not read it"
"""The checks of torch.save against damage."""
BY_FSSPEC = "on S3 a CRC32 of each request"
BY_ARROW = "on S3 a CRC64 of each request"
FSSPEC = ("fsspec", "s3fs", "gcsfs", "adlfs")
"""The packages by which fsspec reaches a bucket."""
MOST_FILES = 1000
"""Settings that make a file for each tensor are not tried for more of them: they only get slower."""

_PLACES: Mapping[str, Callable[[Place], bool]] = {
    "any": lambda place: True,
    "disk": lambda place: place.is_local,
    "bucket": lambda place: not place.is_local,
    "S3": lambda place: place.is_s3,
    "disk or S3": lambda place: place.is_local or place.is_s3,
}


class Contender:
    """One way to save and to load, created in every rank. Only `objection`, `sweep`, `discard` are not collective.

    Only `save` and `load` are timed. A place is a URI with nothing below it, the same on all ranks.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    """Its name for `--peers`."""
    role: ClassVar[Role] = "peer"
    needs: ClassVar[tuple[str, str]] = ("any", "")
    """The kind of place that suits it, and the reason against all others."""
    tried: ClassVar[Sequence[Settings]] = ({},)
    """The settings to try."""
    tried_in_load: ClassVar[Sequence[Settings] | None] = None
    """Those to try in a load, if they are others."""
    modules: ClassVar[Sequence[str]] = ()
    """The modules that must be installed."""
    packages: ClassVar[Sequence[str]] = ()
    """The packages whose versions are recorded."""
    in_background: ClassVar[bool] = False
    """True if `save` returns when the state may change, and the rest goes on."""
    checks: ClassVar[str] = "nothing"
    """Its checks against damage, while it is timed."""
    warmed: ClassVar[Sequence[str]] = ()
    """The actions whose first turn makes things that later ones reuse: memory, a process, a plan. With each setting
    that turn is taken before the clock runs.
    """

    def __init__(self, case: Case, **settings: Any) -> None:
        self.case = case
        self.settings = settings
        self.noted: dict[str, list[float]] = {}
        """Other measurements, turn by turn."""

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        """Return why the case does not suit it, whatever is installed; None if it does. It may have no tensors."""
        kind, reason = cls.needs
        return None if _PLACES[kind](case.place) else reason

    @classmethod
    def objection(cls, case: Case) -> str | None:
        """Return why it cannot take part; None if it can."""
        missing = [name for name in cls.modules if not _is_installed(name)]
        return cls.unfit(case) or (f"{', '.join(missing)} is not installed" if missing else None)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        """Return the settings to try for "save" or "load"."""
        return [*(cls.tried if action == "save" or cls.tried_in_load is None else cls.tried_in_load)]

    def at(self, place: str) -> str:
        """Return the place of its own that stands for one of the run: the `place` of its other methods."""
        return place

    def prepare(self, place: str) -> None:
        """Do the work that a job does once, and that is the same for all."""

    def save(self, place: str) -> Wait | None:
        """Save the case's state; return a function that waits for the rest, None when all is done."""
        wait = self.start(place)
        if wait is None or self.in_background:
            return wait
        wait()
        return None

    def start(self, place: str) -> Wait | None:
        """Start to save; return as `save` does, in the background or not."""
        raise NotImplementedError(f"{self.name} does not save")

    def staged(self) -> None:
        """Wait, after a save has returned, until the state may change."""

    def after(self, place: str) -> None:
        """Release the resources of `prepare` after a save."""

    def discard(self, place: str) -> None:
        """Remove a saved state; called on the first rank alone."""
        self.case.place.remove(place)

    def load(self, place: str) -> None:
        """Load a saved state into the case's target."""
        raise NotImplementedError(f"{self.name} does not load")

    def wrong(self) -> str | None:
        """Return the difference after a load; None when there is none."""
        return difference(self.case.local_target, self.case.local)

    def requests(self) -> int | None:
        """Return the requests of the last turn; None if it does not count them itself."""
        return None

    def close(self) -> None:
        """Release all resources."""

    def note(self, name: str, value: float) -> None:
        """Record another measurement of this turn: the report has the median of all turns."""
        self.noted.setdefault(name, []).append(value)

    def persist(self, path: str) -> None:
        """Make a file or a directory durable, if the run is durable and the place a disk."""
        if self.case.durable and self.case.place.is_local:
            make_durable(Path(path))


def variant(*bases: type[Contender], **fields: Any) -> Any:
    """Return a contender that differs from others in fields of its class alone."""
    return type(bases[-1].__name__, bases, fields)


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def make_durable(path: Path) -> None:
    """Call fsync for a file, or for everything below a directory, and for the directories that name them."""
    for item in (*path.rglob("*"), path, path.parent):
        sync(item)


def shares_of(state: Mapping[str, Any], count: int) -> list[list[str]]:
    """Deal the names of tensors to at most so many shares of about the same bytes."""
    shares: list[list[str]] = [[] for _ in range(max(1, min(count, len(state))))]
    sizes = [0] * len(shares)
    for name in sorted(state, key=lambda name: -state[name].nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += state[name].nbytes
    return shares
