"""One rank's part in a version: the tensors that it owns, in full, or as changes of what it published last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.events import SaveStarted, emit
from ckptstore.extensions.exchange.safetensors import ATTEMPT, INDEX_NAME, Located, headed
from ckptstore.extensions.exchange.safetensors_file import NAMES
from ckptstore.extensions.publication.codec import encode, num_threads
from ckptstore.extensions.publication.source import PublishedVersions, stored_digests
from ckptstore.extensions.publication.weights import HostCopy, Weights, deal, stage
from ckptstore.extensions.publication.wire import STRONG, Index, delta_metadata, full_metadata
from ckptstore.format.layout import Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.format.record import Record
from ckptstore.job import Job
from ckptstore.runtime.beat import beat
from ckptstore.runtime.parallel import mapped
from ckptstore.saving.shard import Contents, Decision
from ckptstore.state.index.part import DTYPES
from ckptstore.state.read.read_plan import grouped
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.opened import OpenedPlace
from ckptstore.transfer.sources import FileSource, MemorySource

logger = logging.getLogger("ckptstore")

ITEM_BYTES = {name: DTYPES[dtype][1] for dtype, name in NAMES.items()}
"""The bytes of an element, by the names of dtypes in the format."""
SHARD_BYTES = 1 << 30
"""The most bytes of a file of tensors, unless one tensor is larger."""


class Base(NamedTuple):
    """Tensors of this rank that are known to be stored bit for bit, as a version."""

    attempt: str
    copy: HostCopy
    structure: str
    """The digest of what this rank had then."""


class Dealing(NamedTuple):
    """Hold what all ranks have, and who publishes what."""

    structures: Sequence[str]
    """The digests of what each rank has."""
    described: Mapping[str, Sequence[Any]]
    owners: Mapping[str, int]


class Rules(NamedTuple):
    """The options of a publication that decide on the form of a version."""

    anchor_every: int
    checksum: str
    config_files: Sequence[Path] = ()
    """Files that each full version has too."""


@dataclass(slots=True)
class Memo:
    """The memory of one process from version to version."""

    base: Base | None = None
    spare: HostCopy | None = None
    """Memory of an earlier version, to be used again."""
    dealt: Dealing | None = None
    """On the leader: what all ranks have heard."""
    owners: Mapping[str, int] = field(default_factory=dict)
    has_warned: bool = False
    """True once somebody was told of plain values that are left out."""


class WeightsShard:
    """See `ckptstore.saving.shard.Shard`.

    The ranks describe their weights by a digest, and by names only when that is new. Where a rank does not know what is
    stored, after a restart, all compare their weights with the digests of the newest version before they decide.
    """

    def __init__(self, job: Job, version: int, collected: Callable[[], Weights], memo: Memo, rules: Rules) -> None:
        self._job, self._version, self._memo, self._rules = job, version, memo, rules
        self._collected = collected
        self._weights: Weights | None = None
        self._answer: dict[str, Any] = {}
        self._error: Exception | None = None
        self._chain: list[Record] = []
        self._dealt: Dealing | None = memo.dealt
        self.structure = ""
        """The digest of what this rank publishes or holds, once that is described."""
        self.copy: HostCopy | None = None
        """The tensors that this rank publishes; None until they are copied."""
        self._layouts: Mapping[str, Located] = {}
        self._agreed: Mapping[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """See `Shard.describe`."""
        if self._error is not None:
            raise self._error
        if self._weights is None:
            self._weights = self._collected()
            if self._weights.left_out and self._job.is_leader and not self._memo.has_warned:
                self._memo.has_warned = True
                shown = ", ".join(self._weights.left_out[:5]) + (", ..." if self._weights.left_out[5:] else "")
                logger.warning("plain values are not published, the format holds tensors only: %s", shown)
            base, self.structure = self._memo.base, self._weights.structure()
            is_alike = base is not None and base.structure == self.structure
            self._answer = {"structure": self.structure, "base": base.attempt if base and is_alike else None}
        return self._answer

    def decide(self, descriptions: Sequence[Any]) -> Decision:
        """See `Shard.decide`."""
        structures = [item["structure"] for item in descriptions]
        if "is_stored" in descriptions[0]:
            is_stored = all(item["is_stored"] for item in descriptions)
            return self._decision(is_new=False, base=self._chain[-1] if is_stored else None, is_same=is_stored)
        is_new = "tensors" in descriptions[0]
        if is_new:
            # The memory learns of it in `hear`, with those of the other ranks: an error may come before.
            tensors = [item["tensors"] for item in descriptions]
            described = {name: item[:3] for offered in tensors for name, item in offered.items()}
            self._dealt = Dealing(structures, described, deal(tensors))
        elif self._dealt is None or structures != list(self._dealt.structures):
            return Decision({"ask": "tensors"}, None)
        self._chain = self._stored_chain()
        bases = {item["base"] for item in descriptions}
        if not self._chain or self._is_anchor_due():
            return self._decision(is_new=is_new, base=None)
        if bases == {self._chain[-1].entry.attempt} and not is_new:
            return self._decision(is_new=False, base=self._chain[-1])
        if None in bases and (digests := self._digests_to_prove(self._dealt)) is not None:
            message = {"ask": "is_stored", "owners": dict(self._dealt.owners), "digests": digests}
            return Decision(message, None)
        return self._decision(is_new=is_new, base=None)

    def _decision(self, *, is_new: bool, base: Record | None, is_same: bool = False) -> Decision:
        dealt = self._dealt or Dealing((), {}, {})
        message: dict[str, Any] = {
            "owners": dict(dealt.owners) if is_new else None,
            "is_same": is_same,
            "base": None,
        }
        if base is not None:
            message |= {"base": base.entry.attempt, "base_version": base.entry.step}
        size_bytes = sum(_size_bytes(item) for item in dealt.described.values())
        return Decision(message, size_bytes, may_be_less=base is not None)

    def _stored_chain(self) -> list[Record]:
        """Leader: return the records from the full version to the newest one; empty where there is none.

        Raises InvalidInput unless this version is above all that are live.
        """
        log = self._job.log
        newest = log.newest()
        live = list(log.readable(newest.state.live if newest else ()))
        if not live:
            return []
        highest = max(record.entry.step for record in live)
        if self._version <= highest:
            raise InvalidInput(
                f"Version {self._version} is not above version {highest}, which is published",
                step=self._version,
                hint="Count versions on, or roll the publication back first; metadata can hold the step",
            )
        found = [live[-1]]
        while found[-1].entry.bases:
            found += log.records(found[-1].entry.bases[-1:])
        return found[::-1]

    def _is_anchor_due(self) -> bool:
        anchor, *deltas = (record.entry for record in self._chain)
        return len(deltas) >= self._rules.anchor_every or (
            sum(entry.size_bytes for entry in deltas) >= anchor.size_bytes
        )

    def _digests_to_prove(self, dealt: Dealing) -> Mapping[str, str] | None:
        """Leader: return the digests of the newest version, if it has the tensors that are now published."""
        if self._rules.checksum != STRONG:
            return None
        job = self._job
        source = PublishedVersions(OpenedPlace(storage=job.storage, transfer=job.transfer, config=job.config), job.log)
        try:
            newest = source.newest()
            found = None if newest is None else stored_digests(source, newest)
        except CkptstoreError:  # a full version needs nothing of what is stored
            return None
        if found is None or found[0] != STRONG:
            return None
        layouts = {name: (item[0], tuple(item[1])) for name, item in dealt.described.items()}
        if {name: (place.dtype, place.shape) for name, (place, _) in found[1].items()} != layouts:
            return None
        return {name: digest for name, (_, digest) in found[1].items()}

    def hear(self, message: Any) -> None:
        """See `Shard.hear`. The last time it copies the weights, in the thread of the caller."""
        memo, request = self._memo, message.get("ask")
        weights = self._weights
        assert weights is not None  # they were described
        if request == "tensors":
            self._answer = {**self._answer, "tensors": weights.offered(compares=self._job.group.world_size > 1)}
            return
        self._agreed = message
        if message.get("owners") is not None:
            memo.owners, memo.dealt = message["owners"], self._dealt
            if request is None:
                memo.base = memo.spare = None
        try:
            if self.copy is None:
                self.copy = stage(weights, memo.owners, self._job.group.rank, lambda: self._new_copy(weights))
                self._layouts = {
                    name: Located(dtype, tuple(shape), 0, self.copy.places[name][1])
                    for name, (dtype, shape, _) in weights.described().items()
                    if name in self.copy.places
                }
            if request == "is_stored":
                digests = message["digests"]
                self._answer["is_stored"] = all(
                    digest == digests[name] for name, digest in self.copy.digested(self._rules.checksum).items()
                )
        except Exception as error:
            self._error = error
        if request is None:
            self._weights = None

    def _new_copy(self, weights: Weights) -> HostCopy:
        memo, rank = self._memo, self._job.group.rank
        sizes = {name: item.size_bytes for name, item in weights.tensors.items() if memo.owners[name] == rank}
        spare, memo.spare = memo.spare, None
        if spare is not None and spare.sizes_bytes == sizes:
            spare.digests.clear()
            return spare
        return HostCopy.of(sizes)

    def plan(self) -> WeightsPlan:
        """See `Shard.plan`."""
        if self._error is not None:
            raise self._error
        assert self.copy is not None  # copied without an error
        base = self._memo.base
        return WeightsPlan(self._job, self._version, self.copy, self._layouts, base, self._agreed, self._rules)


def _size_bytes(described: Sequence[Any]) -> int:
    return int(prod(described[1])) * ITEM_BYTES[described[0]]


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """See `ckptstore.saving.shard.Plan`."""

    job: Job
    version: int
    copy: HostCopy
    tensors: Mapping[str, Located]
    """The layouts of the tensors that this rank owns."""
    base: Base | None
    agreed: Mapping[str, Any]
    rules: Rules

    @property
    def is_delta(self) -> bool:
        return self.agreed["base"] is not None

    def store(self, attempt: Attempt) -> Any:
        """See `Plan.store`."""
        changed = self._changes() if self.is_delta else None
        files = list(self._files(attempt, changed))
        planned = [PlannedFile(attempt.key(name), source) for name, source, _ in files]
        rank = self.job.group.rank
        if rank == 0 and not self.is_delta:
            planned += [PlannedFile(attempt.key(path.name), FileSource.of(path)) for path in self.rules.config_files]
        size_bytes = sum(file.source.size_bytes for file in planned)
        emit(
            SaveStarted(
                step=attempt.step, attempt=str(attempt), rank=rank, num_files=len(planned), size_bytes=size_bytes
            )
        )
        stored = self.job.transfer.upload(planned)
        receipts = [
            Receipt(item.key.removeprefix(attempt.prefix), item.size_bytes, item.digest, rank).to_json()
            for item in stored
        ]
        return receipts, {name: names for name, _, names in files}, self.copy.size_bytes

    def _changes(self) -> dict[str, bytes]:
        """Return the deltas of the tensors that changed, and note the digests of all."""
        if self.agreed["is_same"]:
            return {}
        base, copy = self.base, self.copy
        if base is None or base.attempt != self.agreed["base"]:
            raise InvalidInput(f"The ranks build on {self.agreed['base']}, which this rank does not have")

        def change(name: str) -> tuple[str, bytes | None]:
            beat()
            delta, copy.digests[name] = encode(
                base.copy.bytes_of(name), copy.bytes_of(name), checksum=self.rules.checksum
            )
            return name, delta

        names = sorted(self.tensors, key=lambda name: -self.tensors[name].size_bytes)
        found = mapped(change, names, num_threads=num_threads(), name="ckptstore-encode")
        return {name: delta for name, delta in sorted(found) if delta is not None}

    def _files(
        self, attempt: Attempt, changed: Mapping[str, bytes] | None
    ) -> Iterator[tuple[str, MemorySource, list[str]]]:
        """Yield the name, the bytes and the tensors of each file of this rank."""
        digests = self.copy.digests if changed is not None else self.copy.digested(self.rules.checksum)
        tensors: Mapping[str, Located] = self.tensors
        if changed is not None:
            tensors = {name: Located("U8", (len(delta),), 0, len(delta)) for name, delta in changed.items()}
        # Large elements first, so that each tensor begins at a multiple of its element's size.
        ordered = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
        for number, names in enumerate(grouped(ordered, lambda name: tensors[name].size_bytes, SHARD_BYTES), 1):
            metadata = {"format": "pt"} if changed is None else {}
            head, _ = headed(
                {name: tensors[name] for name in names}, metadata | {name: digests[name] for name in names}
            )
            parts = [self.copy.bytes_of(name).data if changed is None else memoryview(changed[name]) for name in names]
            source = MemorySource([memoryview(head), *parts])
            yield f"model-{attempt.suffix}-{self.job.group.rank:05d}-{number:05d}.safetensors", source, names

    def join(self, attempt: Attempt, stored: Sequence[Any]) -> Contents:
        """See `Plan.join`."""
        receipts = [Receipt.from_json(item) for items, _, _ in stored for item in items]
        files = {name: file for _, named, _ in stored for file, names in named.items() for name in names}
        if self.is_delta:
            metadata = delta_metadata(self.version, self.agreed["base_version"], self.agreed["base"])
        else:
            metadata = full_metadata(self.version, size_bytes=sum(size for _, _, size in stored))
        metadata |= {"checksum_format": self.rules.checksum, ATTEMPT: str(attempt)}
        data = Index(files, metadata).encode()
        (index,) = self.job.transfer.upload([PlannedFile(attempt.key(INDEX_NAME), MemorySource([memoryview(data)]))])
        receipts.append(Receipt(INDEX_NAME, index.size_bytes, index.digest, 0))
        return Contents(receipts, bases=[self.agreed["base"]] if self.is_delta else [])
