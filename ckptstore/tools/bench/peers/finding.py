"""Ways to find the newest checkpoint of a store, and to list all of them.

Peers find the newest step in the names of directories, which they take for checkpoints without looking inside.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import ClassVar

from ckptstore.catalogue import job_of
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore
from ckptstore.testing import CountCalls, with_faults
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import OURS, Role
from ckptstore.tools.bench.peers.base import Contender


class Latest(Contender):
    """`latest()` of a store that is opened anew. Its requests are those of the store."""

    name, family = OURS, OURS
    role: ClassVar[Role] = "ckptstore"
    warmed = ("save",)

    def prepare(self, place: str) -> None:
        self._counted = CountCalls()

    def save(self, place: str) -> None:
        options = self.case.place.storage_options
        with with_faults(open_store(self.case.place.uri, storage_options=options), self._counted) as store:
            self.look(store)

    def look(self, store: CheckpointStore) -> None:
        """Find what is to be found."""
        found = store.latest()
        assert found is not None
        assert found.step == self.case.num_checkpoints - 1

    def requests(self) -> int:
        return self._counted.total - self._counted.counts["close"]


class Listing(Latest):
    """A listing of all checkpoints."""

    name = "ckptstore, listing"

    def look(self, store: CheckpointStore) -> None:
        assert len(store.entries()) == self.case.num_checkpoints


class RawListing(Latest):
    """One listing of the log, which reads no record."""

    name, family = "one listing of the log", "limit"
    role: ClassVar[Role] = "limit"

    def look(self, store: CheckpointStore) -> None:
        assert len([*job_of(store).storage.list("log/")]) > self.case.num_checkpoints


class Finder(Contender):
    """Finds the newest of some steps, each a directory."""

    needs = ("disk", "it reads directories")
    module: ClassVar[str]
    directory: ClassVar[str]
    """Its name for the directory of a step."""
    warmed = ("save",)

    @classmethod
    def objection(cls, case: Case) -> str | None:
        """Return why it cannot take part. Its module is imported now, before the clock runs."""
        if (reason := cls.unfit(case)) is None:
            try:
                import_module(cls.module)
            except ImportError as error:
                return f"{cls.module} is not installed, or cannot be imported: {error}"
        return reason

    def newest(self, directory: Path) -> int:
        """Return the newest step."""
        raise NotImplementedError

    def prepare(self, place: str) -> None:
        self._above = Path(f"{self.case.place.uri}-{self.family}")
        for step in range(self.case.num_checkpoints):
            (self._above / self.directory.format(step)).mkdir(parents=True, exist_ok=True)

    def save(self, place: str) -> None:
        assert self.newest(self._above) == self.case.num_checkpoints - 1


class OrbaxFinder(Finder):
    """`CheckpointManager.latest_step`."""

    name, family, module, directory = "Orbax CheckpointManager", "orbax", "orbax.checkpoint", "{}"

    def newest(self, directory: Path) -> int:
        from orbax.checkpoint import CheckpointManager

        with CheckpointManager(directory) as manager:
            return int(manager.latest_step())


class TransformersFinder(Finder):
    """`get_last_checkpoint`, of its Trainer."""

    name, family = "transformers get_last_checkpoint", "transformers"
    module, directory = "transformers.trainer_utils", "checkpoint-{}"

    def newest(self, directory: Path) -> int:
        from transformers.trainer_utils import get_last_checkpoint

        return int(str(get_last_checkpoint(str(directory))).rpartition("-")[2])
