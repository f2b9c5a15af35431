"""The eye on a store: one look after another, each in a few requests that read and never write.

A look costs, in a store that is at rest: a listing of the checkpoints (a request for each thousand files, and about
twenty at most where they are very many), one of uploads that are begun (buckets alone), one of the group's signs, a
read of `store.json`, and a probe for the next record of the log. Each new record costs one more, the first look some
ten. On a disk it is one look at the names of the checkpoints, and a listing of each attempt in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckptstore.errors import CkptstoreError, InvalidInput, InvalidName, StoreMissing
from ckptstore.extensions.tier.upkeep.node_view import view_node
from ckptstore.format.changes import Annotate, Claim, Commit, Pin, Remove, Restore, Resumed, Unpin
from ckptstore.format.encoding import shortened
from ckptstore.format.layout import check_name
from ckptstore.format.record import Record
from ckptstore.log.identity import KEPT_BY_CKPTSTORE, read_store_json
from ckptstore.log.reader import LogReader
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.tools.watching.attempt_finder import AttemptFinder, FoundAttempt
from ckptstore.tools.watching.in_flight import NO_SIGN, ExpectedSize, InFlight
from ckptstore.tools.watching.look import Happening, Look, SeenAttempt, SeenCommit, SeenOnNode, SeenSigns
from ckptstore.tools.watching.signs import SignsOfLife

NUM_COMMITS = 5
"""The number of last commits that a look shows."""
MOST_RECORDS = 256
"""The most records that one look reads; of more new ones the last are shown."""
_CLAIM_RECORDS = 16
"""The number of records in which the claim of the job is looked for."""


class StoreWatcher:
    """Looks at one store again and again. For one thread at a time."""

    def __init__(
        self,
        storage: Storage,
        *,
        fast_directory: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is read before the first look. The storage is closed with `close`. Fast checkpoints on this node are
        looked for below `fast_directory`, where one is given."""
        self.storage = storage
        self._fast_directory = fast_directory
        self._clock, self._wall_clock = clock, wall_clock
        self._changes: list[Happening] = []
        """Changes that no look has shown yet."""
        self._forget_store()

    def _forget_store(self) -> None:
        """Know nothing of the store."""
        self._store_id = ""
        self._log = LogReader(self.storage)
        self._finder = AttemptFinder(self.storage)
        self._flights: dict[str, InFlight] = {}
        self._newest: Record | None = None
        self._claim: Claim | None = None
        self._signs: SignsOfLife | None = None
        self._commits: dict[int, SeenCommit] = {}
        """Those that were seen, by number."""
        self._attempts: set[str] = set()
        """The directories of all commits that were seen."""
        self._has_looked = False

    @staticmethod
    def at(uri: str, storage_options: Mapping[str, Any] | None = None, *, fast_directory: str = "") -> StoreWatcher:
        """Return a watcher of the store at a URI. Raises InvalidInput as `open_store` does."""
        return StoreWatcher(open_storage(uri, storage_options=storage_options), fast_directory=fast_directory)

    def close(self) -> None:
        """Give connections back."""
        self.storage.close()

    def look(self) -> Look:
        """Look at the store now.

        Raises StoreMissing where there is none, InvalidInput for one that has no log because Ray keeps it, StorageError
        when the storage fails: the next look goes on from the last one that succeeded.
        """
        if not self._has_looked:
            self._check_store()
            self._read_log()
        epoch = self._newest.state.epoch if self._newest else 0
        found = self._finder.find(epoch=epoch, steps=self._last_steps(), tracked=self._flights)
        if self._has_looked and self._is_another():
            self._forget_store()
            self._tell(Happening(kind="log", text="another store is in the place of the one before"))
            return self.look()
        self._read_log()  # after the listing: what was in flight there and is committed now is found here
        signs, notes = self._look_at_signs()
        durable = self._durable()
        on_node, faults = self._look_at_node()
        self._follow(found)
        attempts = self._seen(signs)
        newest, self._has_looked = self._newest, True
        changes, self._changes = tuple(self._changes), []
        return Look(
            at=self._wall_clock(),
            uri=self.storage.uri,
            epoch=newest.state.epoch if newest else 0,
            num_live=len(newest.state.live) if newest else 0,
            durable=durable,
            on_node=on_node,
            commits=tuple(self._commits[number] for number in sorted(self._commits, reverse=True)[:NUM_COMMITS]),
            attempts=tuple(sorted(attempts, key=lambda item: (-item.step, item.attempt))),
            signs=signs,
            changes=changes,
            notes=(*self._finder.notes, *notes, *faults),
        )

    def _check_store(self) -> None:
        identity = read_store_json(self.storage)
        if identity is None:
            raise StoreMissing(f"There is no store at {self.storage.uri}")
        if identity.kept_by != KEPT_BY_CKPTSTORE:
            raise InvalidInput(
                f"The checkpoints at {self.storage.uri} are kept by {identity.kept_by}, and have no log to watch"
            )
        self._store_id = identity.store_id

    def _is_another(self) -> bool:
        """Return True if somebody removed the store and began another one in its place. Raises StoreMissing where there
        is none, as on a disk that is not mounted any more, which looks like an empty one."""
        identity = read_store_json(self.storage)
        if identity is None:
            raise StoreMissing(f"The store at {self.storage.uri} is not there any more")
        return identity.store_id != self._store_id

    # The log

    def _read_log(self) -> None:
        """Bring what is known of the log up to date; tell what is new, but not what the first look finds."""
        newest, known = self._log.newest(), self._newest
        if newest is None or (known is not None and newest.number <= known.number):
            return
        if known is None:
            self._read_first(newest)
        else:
            first = max(known.number + 1, newest.number - MOST_RECORDS + 1)
            if first > known.number + 1:
                self._tell(Happening(kind="log", text=f"{first - known.number - 1} records more than can be told"))
            for record in self._log.records(range(first, newest.number + 1)):
                self._take(record)
                self._tell(*_happenings(record, self._commits))
                self._newest = record  # what fails at a later one tells none of these again
        self._newest = newest

    def _read_first(self, newest: Record) -> None:
        state = newest.state
        places = sorted(set(map(state.place, [*state.live, *state.trash])), reverse=True)[:NUM_COMMITS]
        numbers = sorted({*places, *([state.latest] if state.latest else [])})
        thinned = [number for number in state.thinned if number in state.live and state.place(number) in places]
        for record in self._log.annotated(self._log.records([*numbers, *thinned]), newest):
            self._take(record)
        oldest = max(1, newest.number - _CLAIM_RECORDS + 1)
        for record in reversed(self._log.records(range(oldest, newest.number + 1))):
            if isinstance(record.change, Claim):
                self._take(record)
                break

    def _take(self, record: Record) -> None:
        if isinstance(record.change, Commit):
            self._attempts.add(record.entry.attempt)
            if record.change.thins is None:
                self._commits[record.number] = SeenCommit.of(record)
            else:
                self._take_form(record)
        elif isinstance(record.change, Restore):
            for restored in self._log.records(record.change.numbers):
                self._take_form(restored)
        elif isinstance(record.change, Annotate) and (commit := self._commits.get(record.change.number)) is not None:
            self._commits[commit.number] = replace(commit, metrics={**commit.metrics, **record.change.metrics})
        elif isinstance(record.change, Claim):
            self._claim = record.change
            token = record.change.start_token
            self._signs = SignsOfLife(self.storage, token) if _is_name(token) else None

    def _take_form(self, record: Record) -> None:
        """Take note that what a record committed is live now, in the place of a whole or of a thinned one."""
        commit, form = self._commits.get(record.place), SeenCommit.of(record)
        if commit is not None:
            self._commits[commit.number] = replace(commit, size_bytes=form.size_bytes, dropped=form.dropped)

    def _durable(self) -> SeenCommit | None:
        number = self._newest.state.latest if self._newest else None
        if number is None:
            return None
        if number not in self._commits:  # a roll back went far
            self._take(self._log.annotated(self._log.records([number]), self._newest)[0])
        return self._commits[number]

    def _last_steps(self) -> tuple[int, int] | None:
        """Return the step of the latest checkpoint, from which a job goes on also after a roll back, and the one of the
        checkpoint before it, or one that lies as far below."""
        latest, known = self._durable(), sorted(self._commits)
        if latest is None or self._newest is None or len(known) < 2:
            return None
        live = [number for number in known if number in self._newest.state.live]
        before, last = (self._commits[number].step for number in (live if len(live) > 1 else known)[-2:])
        return latest.step, latest.step - abs(last - before)

    # What is in flight

    def _follow(self, found: list[FoundAttempt]) -> None:
        """Take note of the attempts that were found, and of those that are gone."""
        now, epoch = self._clock(), self._newest.state.epoch if self._newest else 0
        found_by_name = {str(item.attempt): item for item in found}
        for name, flight in list(self._flights.items()):
            step = flight.attempt.step
            if name in self._attempts:
                self._drop(name)
            elif name not in found_by_name:
                self._drop(name)
                self._tell(Happening(kind="end", step=step, text=f"step {step} ended without a commit"))
            elif flight.attempt.epoch < epoch:
                self._drop(name)
                text = f"step {step} cannot be committed any more: a newer job has claimed the store"
                self._tell(Happening(kind="end", step=step, text=text))
        for name, item in found_by_name.items():
            if name in self._flights:
                self._flights[name].look(item, now=now)
            elif name not in self._attempts and item.attempt.epoch >= epoch:
                self._begin(item, now)

    def _begin(self, found: FoundAttempt, now: float) -> None:
        modified, step = found.modified_seconds, found.attempt.step
        age_seconds = 0.0 if modified is None else max(0.0, self._wall_clock() - modified)
        self._flights[str(found.attempt)] = InFlight(found, now=now, age_seconds=age_seconds)
        if self._has_looked:
            self._tell(Happening(kind="begin", step=step, text=f"step {step} is being saved"))

    def _drop(self, name: str) -> None:
        del self._flights[name]
        self._finder.forget(name)

    def _tell(self, *changes: Happening) -> None:
        self._changes.extend(changes)

    def _seen(self, signs: SeenSigns | None) -> list[SeenAttempt]:
        now, sign_seconds = self._clock(), signs.last_seconds if signs else NO_SIGN
        return [
            flight.seen(now=now, sign_seconds=sign_seconds, expected=self._expected(flight.found))
            for flight in self._flights.values()
        ]

    def _expected(self, found: FoundAttempt) -> ExpectedSize | None:
        """Guess the size of an attempt: that of the last checkpoint of the same kind and number of ranks, if known."""
        kind = None if found.is_state is None else "state" if found.is_state else "directory"
        world_size = self._claim.world_size if self._claim else None
        for number in sorted(self._commits, reverse=True):
            commit = self._commits[number]
            if kind in (None, commit.kind) and world_size in (None, commit.world_size):
                return ExpectedSize(commit.size_bytes, commit.step)
        return None

    def _look_at_node(self) -> tuple[SeenOnNode | None, list[str]]:
        """Return what is on this node, and what is wrong there."""
        if not self._fast_directory:
            return None, []
        try:
            view = view_node(self._fast_directory, self._store_id, self._log, self.storage, newest=self._newest)
        except CkptstoreError as error:
            if error.retryable:
                raise
            return None, [f"the fast checkpoints on this node cannot be seen: {error.message}"]
        manifest, since = view.newest.manifest if view.newest else None, view.not_durable_since
        seen = SeenOnNode(
            step=manifest.step if manifest else None,
            created_at=manifest.created_at if manifest else None,
            is_durable=since is None,
            not_durable_since=since,
        )
        faults = [f"step {one.found.attempt.step} on this node: {one.fault}" for one in view.fast if one.fault]
        return seen, [*([view.fault] if view.fault else []), *faults]

    def _look_at_signs(self) -> tuple[SeenSigns | None, list[str]]:
        if self._signs is None:
            return None, []
        try:
            return self._signs.look(now=self._clock(), wall_seconds=self._wall_clock()), []
        except CkptstoreError as error:
            if error.retryable:
                raise
            return None, [f"signs of life cannot be seen: {error.message}"]


def _is_name(token: str) -> bool:
    """Return True if a start token can be part of a key; what a log says is not trusted."""
    try:
        check_name(token)
    except InvalidName:
        return False
    return "/" not in token


def _happenings(record: Record, commits: Mapping[int, SeenCommit]) -> list[Happening]:
    """Describe a record for people."""
    change, number = record.change, record.number

    def named(numbers: tuple[int, ...]) -> str:
        shown = [f"step {commits[item].step}" if item in commits else f"number {item}" for item in numbers[:5]]
        return ", ".join(shown) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")

    match change:
        case Claim():
            ranks = f"{change.world_size} ranks" if change.world_size != 1 else "1 rank"
            text = f"a job of {ranks} has claimed the store, writer epoch {record.state.epoch}"
            return [Happening(kind="claim", number=number, text=text)]
        case Commit(entry=entry, thins=int(whole)):
            text = f"step {entry.step} {entry.thinned}; number {whole} moved to the trash"
            return [Happening(kind="log", number=number, text=text)]
        case Commit():
            step = change.entry.step
            return [Happening(kind="commit", number=number, step=step, text=f"step {step} is committed")]
        case Remove() if change.trash or change.drop:
            unpinned = ", and unpinned" if change.unpins else ""
            words = [f"{named(change.trash)} moved to the trash{unpinned}"] if change.trash else []
            words += [f"{named(change.drop)} deleted from the trash"] if change.drop else []
            return [Happening(kind="log", number=number, text="; ".join(words))]
        case Annotate():
            text = f"{named((change.number,))} annotated with {', '.join(map(shortened, sorted(change.metrics)[:5]))}"
            return [Happening(kind="log", number=number, text=text)]
        case Pin():
            return [Happening(kind="log", number=number, text=f"{named(change.numbers)} pinned")]
        case Unpin():
            return [Happening(kind="log", number=number, text=f"{named(change.numbers)} unpinned")]
        case Restore():
            return [Happening(kind="log", number=number, text=f"{named(change.numbers)} restored from the trash")]
        case Resumed():
            source = f"went on from {change.attempt or change.source}" if change.source else "began anew"
            text = f"the job of writer epoch {change.epoch} {source}"
            return [Happening(kind="log", number=number, text=text)]
        case _:
            return []
