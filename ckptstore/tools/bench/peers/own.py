"""ckptstore itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ckptstore.catalogue import job_of
from ckptstore.format.layout import CHECKPOINT_PREFIX, MANIFEST_NAME
from ckptstore.opening import open_store
from ckptstore.store import CheckpointStore
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import OURS, Role
from ckptstore.tools.bench.peers.base import Contender, Wait, variant

STEP = 1


def drop_files(store: CheckpointStore) -> None:
    """Remove the files of all checkpoints. Log and manifests stay: without them a job considers its store lost."""
    storage = job_of(store).storage
    for checkpoint in store:
        files = storage.list(f"{CHECKPOINT_PREFIX}{checkpoint.uri.rpartition('/')[2]}/")
        storage.delete([file.key for file in files if not file.key.endswith(f"/{MANIFEST_NAME}")])


class Ckptstore(Contender):
    """`save` and `load` of a store. A job opens its store and claims it once, so that is not timed."""

    name, family, packages = OURS, OURS, ("ckptstore", "torch", "awscrt")
    role: ClassVar[Role] = "ckptstore"
    wrap: Callable[[CheckpointStore], CheckpointStore] = staticmethod(lambda store: store)
    """Wraps the store's storage."""
    _store: CheckpointStore | None = None

    @property
    def store(self) -> CheckpointStore:
        """The open store; there is none before `prepare`."""
        assert self._store is not None
        return self._store

    def opened(self, place: str) -> CheckpointStore:
        """Open a store."""
        options = self.case.place.storage_options
        return self.wrap(open_store(place, durable=self.case.durable, storage_options=options))

    def prepare(self, place: str) -> None:
        self._store = self.opened(place)
        self.store.save(0, {"epoch": 0})

    def save(self, place: str) -> Wait | None:
        self.store.save(STEP, self.case.state)
        return None

    def after(self, place: str) -> None:
        self.close()

    def load(self, place: str) -> None:
        if self._store is None:
            self._store = self.opened(place)
        self.store.load(self.case.target)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


FirstSaveCkptstore = variant(Ckptstore, name="ckptstore, first save")
"""The first save of a state, with nothing reused from an earlier one."""


class KeptCkptstore(Ckptstore):
    """`save` by a store that stays open from save to save, as in a job, and reuses its earlier findings."""

    warmed: ClassVar[Sequence[str]] = ("save",)
    step = 0

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self.token = case.gather(uuid.uuid4().hex[:8])[0]

    def prepare(self, place: str) -> None:
        if self._store is None:
            self.begin()

    def begin(self) -> None:
        """Open the store of all turns."""
        super().prepare(self.case.uri(f"kept-{self.token}"))

    def save(self, place: str) -> Wait | None:
        self.step += 1
        self.store.save(self.step, self.case.state)
        return None

    def after(self, place: str) -> None:
        """Remove the files, so that no turn finds a fuller disk than another."""
        if self.case.rank == 0:
            drop_files(self.store)


class AsyncCkptstore(KeptCkptstore):
    """`save_async`, warmed up: its memory is reused."""

    warmed = ()

    def begin(self) -> None:
        super().begin()
        self.store.warm_up(self.case.state)

    def save(self, place: str) -> Wait | None:
        self.step += 1
        return self.store.save_async(self.step, self.case.state).result


class DirectoryCkptstore(Ckptstore):
    """`save_directory` of the case's files."""

    link: ClassVar[bool] = False

    def prepare(self, place: str) -> None:
        self._store = self.opened(place)
        self.store.resume()

    def save(self, place: str) -> Wait | None:
        self.store.save_directory(STEP, self.case.files, link=self.link)
        return None


LinkedCkptstore = variant(
    DirectoryCkptstore, name="ckptstore, linked", link=True, needs=("disk", "there is nothing to link to")
)
"""`save_directory(link=True)`: files that no longer change become links where possible."""
