"""Follow the versions of some weights: a local directory that is at one version, and is brought to the next.

The processes of a node share one directory: one of them works on it, by a lock, and the others find it done.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ckptstore.boundary import bounded
from ckptstore.errors import CheckpointDamaged, CheckpointGone, CkptstoreError, FileMissing
from ckptstore.runtime.extras import needs
from ckptstore.runtime.file_locks import Exclusive
from ckptstore.runtime.shown import show_duration, show_size
from ckptstore.storage.retry import once
from ckptstore.storage.uri import local_path
from ckptstore.transfer.opened import OpenedPlace, open_place

if TYPE_CHECKING:
    from ckptstore.extensions.publication.local import LocalModel
    from ckptstore.extensions.publication.source import Link, VersionSource
    from ckptstore.extensions.publication.work import State

logger = logging.getLogger("ckptstore")

_POLL_SECONDS = 1.0
_WAIT_SECONDS = 600.0
_SILENT_SECONDS = 5.0
"""The time after which the first wait says that there is none yet: the URI may be misspelt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The version that a directory holds after `Subscription.apply`."""

    version: int
    identity: str
    """Tells it from any other version, also from one that had its number before a roll-back."""
    metadata: Mapping[str, Any]
    """The metadata of the publisher."""
    path: Path
    """The directory."""
    previous: int | None = None
    """The version before; None if there was none."""
    num_deltas: int = 0
    """The number of deltas that were applied."""
    is_full: bool = False
    """True if a full version was fetched."""
    fetched_bytes: int = 0
    seconds: float = 0.0
    notices: Sequence[str] = field(default=())
    """For people: the ways that were tried and left, and why."""

    @property
    def is_changed(self) -> bool:
        """False if the directory held this version before."""
        return self.is_full or self.num_deltas > 0


@bounded
class Subscription:
    """A local directory that follows the versions at a URI. No method is collective.

    The directory is a model of Hugging Face. It is exchanged whole for the next version, so a program that opens it
    finds one version. Only where the disk has no room for two, one file after another is replaced; then its index is
    away meanwhile, and programs must wait for `apply`.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        directory: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        peers: str | None = None,
    ) -> None:
        """Open it. Nothing is fetched yet.

        Args:
            uri: a publication, or a place where slime, miles, SGLang's or CoreWeave's tools leave `weight_v...`.
            directory: a local path: new, empty, or of an earlier subscription. The folder `.<name>.ckptstore` beside it
                holds what is on its way. It must not be a mount itself.
            base: the model on which the first delta of another publisher builds, as a path or a URI.
            storage_options: credentials and the like for both places.
            peers: the nodes that follow the same publication, as for `open_store`.
        """
        needs("pull", what="Following weights")
        from ckptstore.extensions.publication.local import LocalModel

        self._stack = ExitStack()
        self._place = self._opened(uri, storage_options, peers)
        self._base = None if base is None else self._opened(base, storage_options)
        self._local: LocalModel = LocalModel(Path(local_path(directory, "The directory")).absolute())
        self._source: VersionSource | None = None

    def _opened(
        self, uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, peers: str | None = None
    ) -> OpenedPlace:
        place = open_place(uri, storage_options=storage_options, peers=peers)
        self._stack.callback(place.close)
        return place

    @property
    def path(self) -> Path:
        """The directory."""
        return self._local.path

    @property
    def version(self) -> int | None:
        """The version that the directory holds; None if it holds none. Makes no request."""
        state = self._state()
        return None if state is None else state.version

    def _state(self) -> State | None:
        from ckptstore.extensions.publication.work import State

        return State.read(self._local.path)

    def wait(
        self, after: int | None = None, *, timeout_seconds: float = _WAIT_SECONDS, poll_seconds: float = _POLL_SECONDS
    ) -> int:
        """Wait until there is a version above `after`, and return the newest one.

        Without `after`, wait for another version than the one that the directory holds, also for one with a lower
        number, after a roll-back. Raises TimeoutError, which says what there is, if none comes in time. A storage that
        cannot be reached is asked again until then.
        """
        uri, deadline = self._place.storage.uri, time.monotonic() + timeout_seconds
        is_empty = self.version is None
        tell_at = time.monotonic() + _SILENT_SECONDS if is_empty else math.inf
        while True:
            newest, failure = None, None
            try:
                with once():
                    newest = self._opened_source().newest()
            except CkptstoreError as error:
                if not error.retryable:
                    raise
                failure = error
            if newest is not None and self._is_news(newest, after):
                return newest.version
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                found = "none is published" if newest is None else f"the newest one is {newest.version}"
                wanted = f"version above {after}" if after is not None else "version" if is_empty else "other version"
                raise TimeoutError(f"No {wanted} came to {uri} in {timeout_seconds:g} s: {failure or found}")
            if time.monotonic() >= tell_at:
                tell_at = math.inf
                logger.warning("%s has no version of weights yet; waiting %s more", uri, show_duration(left_seconds))
            time.sleep(min(poll_seconds, left_seconds))

    def _is_news(self, newest: Link, after: int | None) -> bool:
        if after is not None:
            return newest.version > after
        state = self._state()
        return state is None or state.identity != newest.identity

    def _opened_source(self) -> VersionSource:
        from ckptstore.extensions.publication.source import source_at

        if self._source is None or self._source.is_foreign:
            self._source = source_at(self._place, self._base)
        return self._source

    def apply(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float = _WAIT_SECONDS,
        then: Callable[[Applied], object] | None = None,
    ) -> Applied:
        """Bring the directory to the newest version, or to one by its number, and return what it then holds.

        Of the deltas from the present version on, and a full version with its deltas, the smaller way is taken. Where
        it is damaged or lacks a link, the other one is, and `notices` says so. Every file and every tensor is compared
        with its digest before anything is replaced. It takes a few MiB of memory for each processor.

        `then` is called once for each version that the directory comes to hold, by one process of the node: to have a
        server load it, say. If it raises, the error passes through, and the next `apply` with a `then` calls it again.

        After an error the directory holds the version that it held before, or, where files were being replaced one by
        one, no version until a call succeeds. Raises CheckpointGone if there is no such version, CheckpointDamaged,
        StorageFull, and TimeoutError if another process works on the directory for `timeout_seconds`.
        """
        from ckptstore.extensions.publication.local import CONFIRMED_NAME

        began = time.monotonic()
        with self._locked(timeout_seconds):
            source = self._opened_source()
            newest = source.newest()  # reads what `find` looks through, too
            target = newest if version is None else source.find(version)
            if target is None:
                raise CheckpointGone(
                    f"No version is published at {self._place.storage.uri}", hint="Wait for one, or look at the URI"
                )
            before, had_files = self._state(), self.path.exists() and any(self.path.iterdir())
            self._local.recover()
            state = self._local.state()
            notices = [f"{self.path} is fetched anew: {self._local.fault}"] if had_files and self._local.fault else []
            if state is not None and state.identity == target.identity:
                applied = Applied(
                    version=state.version, identity=state.identity, metadata=state.metadata, path=self.path
                )
            else:
                (self._local.aside / CONFIRMED_NAME).unlink(missing_ok=True)  # for it may come back to this version
                applied = self._bring(source, target, state, notices)
            applied = replace(
                applied, previous=None if before is None else before.version, seconds=time.monotonic() - began
            )
            self._local.remove_old()
            self._tell(applied, then)
            return applied

    def _tell(self, applied: Applied, then: Callable[[Applied], object] | None) -> None:
        """Call `then`, unless it has succeeded for this version."""
        from ckptstore.extensions.publication.local import CONFIRMED_NAME

        mark = self._local.aside / CONFIRMED_NAME
        if then is None or (mark.exists() and mark.read_text() == applied.identity):
            return
        then(applied)
        mark.write_text(applied.identity)

    @contextmanager
    def _locked(self, timeout_seconds: float) -> Iterator[None]:
        from ckptstore.extensions.publication.local import LOCK_NAME

        self._local.prepare()
        with Exclusive(self._local.aside / LOCK_NAME).held(wait_seconds=timeout_seconds) as is_held:
            if not is_held:
                raise TimeoutError(
                    f"Another process has worked on {self.path} for {timeout_seconds:g} s and has not ended"
                )
            yield

    def _bring(self, source: VersionSource, target: Link, state: State | None, notices: list[str]) -> Applied:
        """Take the smaller way to a version, and the other one if it fails."""
        for notice in notices:
            logger.warning("%s", notice)
        ways, closed = self._ways(source, target, state)
        notices += closed
        for number, (links, local) in enumerate(ways):
            try:
                new = self._go(links, local)
            except (CheckpointDamaged, CheckpointGone, FileMissing) as error:
                kind = "deltas" if local is not None else "full version"
                notices.append(f"The way by {kind} to version {target.version} was left: {error}")
                logger.warning("%s", notices[-1])
                if number == len(ways) - 1:
                    raise
                continue
            num_deltas = len([link for link in links if link.base is not None])
            is_full, fetched_bytes = local is None, sum(link.size_bytes for link in links)
            logger.info(
                "%s is at version %d: %d deltas, %s fetched",
                self.path,
                new.version,
                num_deltas,
                show_size(fetched_bytes),
            )
            return Applied(
                version=new.version,
                identity=new.identity,
                metadata=new.metadata,
                path=self.path,
                num_deltas=num_deltas,
                is_full=is_full,
                fetched_bytes=fetched_bytes,
                notices=tuple(notices),
            )
        raise AssertionError("there is at least one way")

    def _ways(
        self, source: VersionSource, target: Link, state: State | None
    ) -> tuple[list[tuple[list[Link], State | None]], list[str]]:
        """Return the ways to a version, the smaller one first, each with the state on which it builds."""
        from ckptstore.extensions.publication.source import chain

        ways: list[tuple[list[Link], State | None]] = []
        notices: list[str] = []
        failure: CkptstoreError | None = None
        for local in (state, None) if state is not None else (None,):
            try:
                links = chain(source, target, known=None if local is None else local.identity)
            except (CheckpointDamaged, CheckpointGone, FileMissing) as error:
                notices.append(f"A way to version {target.version} is closed: {error}")
                logger.warning("%s", notices[-1])
                failure = error
                continue
            if local is None or links[0].base is not None:
                ways.append((links, local))
        if not ways:
            raise failure or CheckpointGone(f"There is no way to version {target.version}")
        return sorted(ways, key=lambda way: sum(link.size_bytes for link in way[0])), notices

    def _go(self, links: Sequence[Link], local: State | None) -> State:
        from ckptstore.extensions.publication.work import Spooled

        spooled = []
        with ExitStack() as held:
            for link in links:
                held.enter_context(link.held())
            for link in links:
                one = Spooled(self._local.spool / link.identity, link.version, link.identity, link.index, link.metadata)
                one.path.mkdir(exist_ok=True)
                link.download(one.path)
                one.write_facts()
                spooled.append(one)
        return self._local.switch(local, spooled)

    def close(self) -> None:
        """Close the connections, and wait until the version before is removed from the disk."""
        self._local.settle()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
