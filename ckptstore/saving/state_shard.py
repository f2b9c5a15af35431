"""A rank's shard of a state checkpoint: it describes and writes the rank's data, and the leader joins all of them."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckptstore.errors import CheckpointDamaged, StorageError
from ckptstore.events import SaveStarted, emit
from ckptstore.format.digest import DEFAULT, Digest
from ckptstore.format.layout import CHECKPOINT_PREFIX, DCP_METADATA_NAME, Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.runtime.beat import beat
from ckptstore.runtime.collector import collector_paused
from ckptstore.saving.shard import Contents, Decision
from ckptstore.state.index.items import Structure
from ckptstore.state.index.key_paths import KeyPaths
from ckptstore.state.index.outline import INDEX_NAME, part_name
from ckptstore.state.index.part import Part
from ckptstore.state.index.tensor_index import TensorIndex, check_files, layout_digest, values_layout
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.tensors.device import LaunchedWork
from ckptstore.state.tensors.placement import name_of
from ckptstore.state.tensors.segments import SegmentSource
from ckptstore.state.write.agree import Agreement, is_settled
from ckptstore.state.write.assignment import RankPlan, SaveMemo
from ckptstore.state.write.casts import Rules, check_rules, rules_of
from ckptstore.state.write.describe import Described, describe
from ckptstore.state.write.incremental import Kept, KeptFile, kept_file_name
from ckptstore.state.write.outlining import RankTold
from ckptstore.state.write.replicas import check_copies, digests_of_copies
from ckptstore.state.write.shard_files import ShardFiles, Striping
from ckptstore.storage.base import CopiesInside, Disk, Storage, adopt
from ckptstore.transfer.moves import PlannedFile, Upload, write_small
from ckptstore.transfer.sources import MemorySource, Source

if TYPE_CHECKING:
    from ckptstore.stock.stock_write import StockShare

_ADOPTS_AT_ONCE = 8
"""The files of one rank that a storage copies inside itself at once."""
_LENGTH = struct.Struct("<I")

Copy = Callable[[Sequence[SegmentSource], LaunchedWork], Sequence[MemorySource]]
"""`Staging.stage`."""
Incremental = bool | Literal["reference"]
StockReadable = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """The options of a save of a state."""

    allow_pickle: bool = False
    casts: Rules = ()
    """The dtypes in which tensors are stored, by patterns."""
    stock_readable: StockReadable = "auto"
    """True to make it readable for stock DCP, with plain values stored twice and `.metadata`; "auto" to do so up to
    200,000 chunks and values, and up to 10,000 values in dicts and lists."""
    incremental: Incremental = False
    """True to link or copy files of the checkpoint before that have hardly changed into the new one, "reference" to
    only refer to them."""
    num_files: int = 4
    """The number of files that a rank writes at once if it has much to write."""
    algorithm: str = DEFAULT
    """The algorithm of the digests of all files and of their blocks."""
    num_prefixes: int = 1
    """The number of directories over which the files of all ranks are spread."""
    apart: tuple[str, ...] = ()
    """The patterns of keys that get files of their own, because retention will drop them."""
    compare_every: int = 16
    """The interval, in saves, at which the data that ranks must have in common is compared; a new structure always is.
    0 means never, as in a warm-up, which saves nothing."""

    @staticmethod
    def of(
        dtype: object, incremental: Incremental, *, allow_pickle: bool, stock_readable: StockReadable
    ) -> StateOptions:
        """Return the options of a call of `save`. Raises InvalidInput for a `dtype` that is no mapping of dtypes."""
        return StateOptions(
            casts=rules_of(dtype), incremental=incremental, allow_pickle=allow_pickle, stock_readable=stock_readable
        )

    @property
    def agreed(self) -> dict[str, Any]:
        """The options that must be the same on all ranks, where they are not the default."""
        found: dict[str, Any] = {}
        if self.casts:
            found["dtype"] = {pattern: name_of(dtype) for pattern, dtype in self.casts}
        if self.incremental:
            found["incremental"] = self.incremental if self.incremental == "reference" else True
        if self.stock_readable != "auto":
            found["stock_readable"] = bool(self.stock_readable)
        return found


class Before(NamedTuple):
    """The checkpoint before, to an incremental save."""

    find: Callable[[], Kept | None] = lambda: None
    """Returns the files of this rank in it."""
    keep: Callable[[Kept], object] = lambda files: None
    """Gets the files that the next save may take over, once this one is committed."""


class Looked(NamedTuple):
    """A state as it was found."""

    flat: FlatState
    found: Described
    before: Kept | None
    """The files of this rank in the checkpoint before, for an incremental save."""


class StateShard:
    """See `ckptstore.saving.shard.Shard`."""

    def __init__(
        self,
        collect: Callable[[], FlatState],
        *,
        rank: int,
        world_size: int,
        memo: SaveMemo,
        storage: Storage,
        upload: Upload,
        options: StateOptions | None = None,
        before: Before | None = None,
    ) -> None:
        """`collect` takes the state apart; `describe` calls it. The memo is shared by the saves of one store.

        `before` knows the files of this rank in the checkpoint before, for an incremental save.
        """
        self._collect = collect
        self._rank, self._world_size = rank, world_size
        self._memo, self._negotiator = memo, memo.negotiator
        self._storage = storage
        self._upload = upload
        self._options = options or StateOptions()
        self._before = before or Before()
        self._has_begun = False
        self._agreement: Agreement | None = None
        self._staged: StatePlan | Exception | None = None
        """The plan with the copies of all files, or the error of copying; None without copies."""

    def move(self, storage: Storage, upload: Upload) -> None:
        """Use another storage from now on, because the first one cannot take the files."""
        self._storage, self._upload = storage, upload
        if isinstance(self._staged, StatePlan):
            self._staged.storage, self._staged.upload = storage, upload

    @cached_property
    def _looked(self) -> Looked:
        options, flat = self._options, self._collect()
        can = options.incremental == "reference" or isinstance(self._storage, Disk | CopiesInside)
        before = self._before.find() if options.incremental and can else None
        compare = self._world_size > 1
        found = describe(flat, compare=compare, allow_pickle=options.allow_pickle, rules=options.casts)
        found.paths = self._memo.cached("paths", (flat.paths, flat.typed), lambda: KeyPaths.of(flat.typed_paths()))
        return Looked(flat, found, before)

    def describe(self) -> bytes:
        """Return the digests of this rank's data, in later rounds the details that the leader needs.

        Raises InvalidState, with the key, for a value that cannot be stored.
        """
        found = self._looked.found
        if self._agreement is not None:  # and the leader has to compare copies
            return digests_of_copies(found, self._agreement.copies)
        if self._world_size == 1:
            return b""
        if not self._has_begun:
            self._has_begun = True
            self._negotiator.begin(found, self._rank)
        return self._negotiator.describe()

    def decide(self, descriptions: Sequence[bytes]) -> Decision:
        """Leader: see `Shard.decide`. Raises InvalidState if a key is something else on another rank."""
        may_be_less = bool(self._options.incremental)
        if self._world_size == 1:
            check_rules(self._options.casts, Structure.of(self._looked.found.items))
            return Decision(b"", self._looked.found.size_bytes, may_be_less)
        if self._agreement is not None:
            check_copies(descriptions)
            return Decision(b"", self._negotiator.size_bytes, may_be_less)
        told = self._negotiator.join(
            descriptions,
            may_spread=self._options.stock_readable is not True,
            compare_every=self._options.compare_every,
        )
        if is_settled(told):
            check_rules(self._options.casts, *self._negotiator.structures.structures)
        return Decision(told, self._negotiator.size_bytes if is_settled(told) else None, may_be_less)

    def hear(self, told: bytes) -> None:
        """Accept the agreement, or the leader's need for another round."""
        if self._world_size == 1:
            self._agreement = Agreement(1, differs=self._looked.found.own)
        elif self._agreement is None:
            self._agreement = self._negotiator.hear(told)

    def plan(self) -> StatePlan:
        """See `Shard.plan`. Raises the error of copying: in the meeting of all ranks."""
        if isinstance(self._staged, Exception):
            raise self._staged
        if self._staged is not None:
            return self._staged
        assert self._agreement is not None  # the ranks have met
        return StatePlan(
            looked=self._looked,
            agreement=self._agreement,
            rank=self._rank,
            memo=self._memo,
            storage=self._storage,
            upload=self._upload,
            options=self._options,
            keep=self._before.keep,
        )

    def stage(self, copy: Copy, *, check_all: bool) -> int:
        """Copy all files of this rank, and return the bytes of the copies: 0 after an error, which `plan` raises."""
        try:
            plan = self.plan()
            plan.stage(copy, check_all=check_all)
        except Exception as error:  # no memory, for instance
            self._staged = error
            return 0
        self._staged = plan
        return sum(source.size_bytes for _, source in plan.sources)


@dataclass(kw_only=True)
class StatePlan:
    """See `ckptstore.saving.shard.Plan`."""

    looked: Looked
    agreement: Agreement
    rank: int
    memo: SaveMemo
    storage: Storage
    upload: Upload
    options: StateOptions
    keep: Callable[[Kept], object]

    @cached_property
    def launched(self) -> LaunchedWork:
        """The work that the devices have to finish before the bytes of the state are final."""
        memory, dense = self.looked.found.memory, self.looked.found.dense  # which is in the host
        return LaunchedWork({tensor.device for key in memory.keys() - dense.keys() for tensor in memory[key]})

    @cached_property
    def _rank_plan(self) -> RankPlan:
        return self.memo.plan(self.looked.found, self.agreement, self.rank)

    @cached_property
    def files(self) -> ShardFiles:
        """The files of this rank, laid out."""
        options = self.options
        return ShardFiles(
            self.looked.found,
            self._rank_plan,
            rank=self.rank,
            striping=Striping(
                options.num_files,
                options.num_prefixes,
                on_disk=isinstance(self.storage, Disk),
                apart=options.apart,
            ),
            incremental=bool(options.incremental),
            before=self.looked.before,
            algorithm=options.algorithm,
        )

    @cached_property
    def _stock(self) -> StockShare | None:
        """This rank's share of the metadata for stock DCP; None if it is not to be readable for it."""
        if not self.options.stock_readable or not self.agreement.is_packed:
            return None
        from ckptstore.stock.stock_write import StockShare

        return StockShare(
            self.looked.flat,
            [*self._rank_plan.common, *self._rank_plan.own],
            self.files,
            self.agreement,
            rank=self.rank,
            at_any_size=self.options.stock_readable is True,
        )

    @cached_property
    def sources(self) -> list[tuple[str, Source]]:
        """The name and source of each file that this rank writes. `stage` replaces the sources by copies."""
        _ = self._stock  # adds frames to the files
        return [*self.files.sources()]

    def stage(self, copy: Copy, *, check_all: bool) -> None:
        """Copy the bytes of all files, and compare the copies.

        `sources` are the copies afterwards. Raises CkptstoreError, with the key, for a copy that differs from its
        tensor.
        """
        _ = self._stock  # adds frames to the files
        names, originals = zip(*self.files.sources(), strict=True) if self.files.files else ((), ())
        check = self.files.copy_check(turn=self.memo.next_turn(), every=check_all)
        copies = copy(originals, self.launched)
        check.compare([one.views[0] for one in copies])
        self.sources = list(zip(names, copies, strict=True))

    def store(self, attempt: Attempt) -> bytes:
        """Write this rank's files, and return the receipts and this rank's part of the index for the leader."""
        sources = self.sources
        self.launched.wait()  # threads of the upload copy beside the stream of the caller
        receipts = self._take_over(attempt, self.files.kept)
        files = [PlannedFile(attempt.key(name), source, self.options.algorithm) for name, source in sources]
        emit(
            SaveStarted(
                step=attempt.step,
                attempt=str(attempt),
                rank=self.rank,
                num_files=len(files),
                size_bytes=sum(file.source.size_bytes for file in files),
            )
        )
        stored = self.upload(files)
        receipts += [
            Receipt(name, one.size_bytes, one.digest, self.rank) for (name, _), one in zip(sources, stored, strict=True)
        ]
        if self.options.incremental:
            linked = self.options.incremental != "reference"
            kept = self.files.kept_after(str(attempt), stored, linked=linked)
            self.keep(kept)
            receipts += self._add({kept_file_name(self.rank): kept.encode()}, attempt)
        with collector_paused():
            part = self.files.index_part([one.block_digests for one in stored])
        return self._told(receipts, part, attempt)

    def _told(self, receipts: list[Receipt], part: bytes, attempt: Attempt) -> bytes:
        """Encode the description for the leader. Store this rank's part of the index unless the leader packs it."""
        head: dict[str, Any] = {"told": self.files.told(part)}
        if self._stock is not None:
            head["stock"] = self._stock.report()
        if not self.agreement.is_packed:
            receipts = [*receipts, *self._add({part_name(self.rank, self.options.num_prefixes): part}, attempt)]
            part = b""
        with collector_paused():
            head["receipts"] = [receipt.to_json() for receipt in receipts]
            packed = zlib.compress(json.dumps(head).encode(), 1)
        return b"".join([_LENGTH.pack(len(packed)), packed, part])

    def join(self, attempt: Attempt, stored: Sequence[bytes]) -> Contents:
        """Leader: check that the data of all ranks is complete, and write the index and, if requested, `.metadata`.

        Raises InvalidState, with keys and ranks, if ranks that disagree on the state left a hole.
        """
        heads, parts = zip(*(_unpacked(data) for data in stored), strict=True)
        receipts = [Receipt.from_json(entry) for head in heads for entry in head["receipts"]]
        outliner = self.memo.outliner(self.agreement)
        outline = outliner.outline(
            [RankTold(*head["told"]) for head in heads],
            num_prefixes=self.options.num_prefixes,
            is_packed=self.agreement.is_packed,
        )
        written = {INDEX_NAME: b"".join([outline.encode(), *parts])}
        if outline.is_packed:
            for rank, (part, (_, digest)) in enumerate(zip(parts, outline.parts, strict=True)):
                if digest.like(part) != digest:
                    raise CheckpointDamaged(
                        "the part of the tensor index that came to the leader is not the one that its rank has sent",
                        step=attempt.step,
                        rank=rank,
                        hint="Nothing was committed; save again",
                    )
            decoded = [Part.decode(part, rank=rank, file=INDEX_NAME) for rank, part in enumerate(parts)]
            check_files(decoded, {receipt.name: receipt.size_bytes for receipt in receipts})
            layout = layout_digest(decoded)
            compared = layout, values_layout(decoded), outliner, outline.table, outline.tied, outline.own

            def compare() -> None:
                self.memo.negotiator.structures.check(TensorIndex(decoded))
                TensorIndex(decoded, outline)

            self.memo.cached("compared index", compared, compare)  # once is enough, and an index is large
            if self._stock is not None:
                num_chunks = sum(len(part.chunk_offset) for part in decoded)
                metadata = self._stock.metadata(
                    [head["stock"] for head in heads], layout, num_chunks, lambda: TensorIndex(decoded), self.memo
                )
                written |= {} if metadata is None else {DCP_METADATA_NAME: metadata}
        beat()
        casts = self.options.agreed.get("dtype", {})
        if not isinstance(self.storage, Disk):
            return Contents([*receipts, *self._add(written, attempt)], casts=casts)
        for name, data in written.items():
            self.storage.write(attempt.key(name), [memoryview(data)])
            digest = Digest.of(data, algorithm=self.options.algorithm)
            receipts.append(Receipt(name, len(data), digest, self.rank))
        return Contents(receipts, pending=list(written), casts=casts)

    def _take_over(self, attempt: Attempt, kept: Sequence[KeptFile]) -> list[Receipt]:
        """Link files of the checkpoint before, or copy them inside the storage, and return their receipts.

        No file is read. With "reference" nothing is linked. Raises StorageError if a file cannot be linked.
        """
        storage, receipts = self.storage, [file.receipt for file in kept]
        if not kept or self.options.incremental == "reference":
            return receipts
        moves = [(f"{CHECKPOINT_PREFIX}{one.attempt}/{one.name}", attempt.key(one.name)) for one in receipts]
        for source, _ in adopt(storage, moves, num_threads=_ADOPTS_AT_ONCE):
            raise StorageError(f"{source} cannot be linked to the next checkpoint", file=source.rpartition("/")[2])
        storage.persist([target for _, target in moves])
        return [receipt._replace(attempt=None) for receipt in receipts]

    def _add(self, written: Mapping[str, bytes], attempt: Attempt) -> list[Receipt]:
        of_rank = {name: (data, self.rank) for name, data in written.items()}
        return write_small(self.upload, attempt, of_rank, algorithm=self.options.algorithm)


@collector_paused()
def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = _LENGTH.unpack_from(data)
    head: dict[str, Any] = json.loads(zlib.decompress(data[_LENGTH.size : _LENGTH.size + length]))
    return head, data[_LENGTH.size + length :]
