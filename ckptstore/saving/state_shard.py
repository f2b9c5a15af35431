"""A rank's shard of a state checkpoint, for the save story: what it has and writes, and how the leader joins it all."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ckptstore.errors import StorageError
from ckptstore.format.digest import crc32c
from ckptstore.format.layout import CHECKPOINT_PREFIX, DCP_METADATA_NAME, Attempt, known_step
from ckptstore.format.manifest import Receipt
from ckptstore.group import Beat, Group
from ckptstore.runtime.collector import collector_paused
from ckptstore.saving.request import Request
from ckptstore.saving.shard import Agreed, Contents
from ckptstore.state.index.index_file import INDEX_NAME, join_parts
from ckptstore.state.index.items import Item, Structure
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.live.flatten import FlatState
from ckptstore.state.tensors.device import LaunchedWork
from ckptstore.state.write.agree import Agreement, Negotiator, agreement_of_one
from ckptstore.state.write.assignment import plan_rank
from ckptstore.state.write.copies import boxes_of, check_equal
from ckptstore.state.write.coverage import Expected
from ckptstore.state.write.describe import Described, describe
from ckptstore.state.write.incremental import Kept, KeptFile, kept_file_name
from ckptstore.state.write.shard_files import ShardFiles
from ckptstore.state.write.stock_write import MAX_CHUNKS, stock_frames, stock_metadata
from ckptstore.storage.base import CopiesInside, Disk, Storage
from ckptstore.transfer import Stored
from ckptstore.transfer.planned import PlannedFile
from ckptstore.transfer.sources import MemorySource, Source

_LENGTH = struct.Struct("<I")

Incremental = bool | Literal["reference"]
StockReadable = bool | Literal["auto"]


class Upload(Protocol):
    """`Transfer.upload`, or what does the same in another process."""

    def __call__(self, files: Sequence[PlannedFile], *, beat: Beat) -> list[Stored]:
        """Write the files; the result has their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """How a state is saved."""

    allow_pickle: bool = False
    stock_readable: StockReadable = "auto"
    """Whether stock DCP shall be able to read it: plain values twice, and `.metadata`; "auto": up to 200,000 chunks."""
    incremental: Incremental = False
    """Whether files of the checkpoint before are taken over where most of them has not changed: linked or copied into
    the new one, or only referred to."""
    num_files: int = 4
    """How many files a rank writes at once when there is much to write."""
    num_prefixes: int = 1
    """Over how many directories the files of all ranks are spread."""


class StateShard:
    """See `ckptstore.saving.shard.Shard`. `prepare` comes before the story."""

    def __init__(
        self,
        collect: Callable[[], FlatState],
        *,
        step: Any,
        request: Callable[[], Request],
        group: Group,
        storage: Storage,
        upload: Upload,
        options: StateOptions | None = None,
        before: Callable[[], Kept | None] = lambda: None,
    ) -> None:
        """`collect` takes the state apart, `request` checks what the caller asked for. Nothing is looked at yet.

        `before` finds out what this rank has in the checkpoint before, for an incremental save.
        """
        self.step = step
        self._collect = collect
        self._flat = FlatState()
        self._request = request
        self._group = group
        self._storage = storage
        self._upload = upload
        self._options = options or StateOptions()
        self._find_before = before
        self._before: Kept | None = None
        self.kept: Kept | None = None
        """What a next incremental save may take over, once this one is committed."""
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._files: ShardFiles | None = None
        self._expected = Expected()
        self.launched = LaunchedWork(())
        """What the devices have to finish before the bytes of the state are final."""
        self.sources: list[tuple[str, Source]] = []
        """Name and source of each file that this rank will write. A staged copy may take a source's place until the
        story stores them."""

    def prepare(self, negotiator: Negotiator) -> None:
        """Look at the state and agree with the other ranks on who writes what. Collective; nothing is written.

        Raises InvalidState, the same on all ranks.
        """
        group, options, step = self._group, self._options, known_step(self.step)
        found = Described()

        def look() -> Sequence[Item]:
            nonlocal found
            self._flat = self._collect()
            can = options.incremental == "reference" or isinstance(self._storage, Disk | CopiesInside)
            self._before = self._find_before() if options.incremental and can else None
            found = describe(self._flat, compare=group.world_size > 1, allow_pickle=options.allow_pickle)
            return found.items

        def exchange(tag: str, work: Callable[[], bytes], join: Callable[[list[bytes]], bytes]) -> bytes:
            return group.exchange(tag, lambda _beat: work(), lambda posts, _beat: join(posts), step=step)

        if group.world_size == 1:
            agreement = agreement_of_one()
            self._expected = Expected.of([Structure.of(look())], [0])
        else:
            agreement = negotiator.agree(look, exchange)
            self._expected = negotiator.expected
        if agreement.copies:
            exchange("state-copies", lambda: boxes_of(found, agreement), check_equal)
        self.launched = LaunchedWork({tensor.device for boxes in found.memory.values() for tensor in boxes})
        plan = plan_rank(found.items, agreement, group.rank)
        self._files = ShardFiles(
            found,
            plan,
            rank=group.rank,
            num_files=options.num_files,
            incremental=bool(options.incremental),
            before=self._before,
            num_prefixes=options.num_prefixes,
            on_disk=isinstance(self._storage, Disk),
        )
        if options.stock_readable:
            self._add_stock_values(agreement, [*plan.common, *plan.own])
        self.sources = [*self._files.sources()]

    def _add_stock_values(self, agreement: Agreement, keys: Sequence[str]) -> None:
        """Stock readers know one value for each key: the lowest rank's."""
        assert self._files is not None
        rank = self._group.rank
        mine = [key for key in keys if agreement.holders(key)[0] == rank]
        frames, paths = stock_frames(self._flat, mine)
        self._files.add_stock_values(frames)
        self._paths.update(paths)
        if rank == 0 or (agreement.classes and agreement.classes.index(agreement.classes[rank]) == rank):
            self._paths.update(self._flat.paths)

    def describe(self) -> tuple[Request, bytes]:
        """What the caller asked for, and the size of what this rank will write."""
        return self._request(), str(sum(source.size_bytes for _, source in self.sources)).encode()

    def agree(self, descriptions: Sequence[bytes]) -> Agreed:
        """Leader: who writes what is settled; only the sizes count."""
        return Agreed(b"", sum(map(int, descriptions)))

    def store(self, attempt: Attempt, told: bytes, beat: Beat) -> bytes:
        """Write this rank's files, and give the leader the receipts and this rank's part of the index."""
        assert self._files is not None
        self.launched.wait()  # threads of the upload copy beside the stream of the caller
        receipts = self._take_over(attempt, self._files.kept)
        files = [PlannedFile(attempt.key(name), source) for name, source in self.sources]
        stored = self._upload(files, beat=beat)
        receipts += [
            Receipt(name, one.size_bytes, one.crc32c, self._group.rank)
            for (name, _), one in zip(self.sources, stored, strict=True)
        ]
        if self._options.incremental:
            linked = self._options.incremental != "reference"
            self.kept = self._files.kept_after(str(attempt), stored, linked=linked)
            receipts += self._add({kept_file_name(self._group.rank): self.kept.encode()}, attempt, beat)
        with collector_paused():
            part = self._files.index_part([one.block_crcs for one in stored])
            head = {
                "receipts": [receipt.to_json() for receipt in receipts],
                "stock": self._files.stock,
                "paths": self._paths,
            }
            packed = zlib.compress(json.dumps(head).encode(), 1)
        return b"".join([_LENGTH.pack(len(packed)), packed, part])

    def join(self, attempt: Attempt, stored: Sequence[bytes], beat: Beat) -> Contents:
        """Leader: check that everything that any rank has is there, and write the index and, if asked for, `.metadata`.

        Raises InvalidState, with keys and ranks, when ranks that disagree on the state left a hole.
        """
        heads, parts = zip(*(_unpacked(data) for data in stored), strict=True)
        receipts = [Receipt.from_json(entry) for head in heads for entry in head["receipts"]]
        joined = join_parts(parts)
        index = TensorIndex.decode(joined)
        index.check_files({receipt.name: receipt.size_bytes for receipt in receipts})
        self._expected.check(index)
        beat()
        written = {INDEX_NAME: joined}
        if self._options.stock_readable is True or (self._options.stock_readable and index.num_chunks <= MAX_CHUNKS):
            written[DCP_METADATA_NAME] = stock_metadata(index, *_stock_parts(heads))
        if not isinstance(self._storage, Disk):
            return Contents([*receipts, *self._add(written, attempt, beat)])
        for name, data in written.items():
            self._storage.write(attempt.key(name), [memoryview(data)])
            receipts.append(Receipt(name, len(data), crc32c(data), self._group.rank))
        return Contents(receipts, pending=list(written))

    def _take_over(self, attempt: Attempt, kept: Sequence[KeptFile]) -> list[Receipt]:
        """Files of the checkpoint before, under a second name or copied inside the storage. Nothing is read here."""
        storage, rank = self._storage, self._group.rank
        if self._options.incremental == "reference":
            return [Receipt(file.name, file.size_bytes, file.crc32c, rank, attempt=file.attempt) for file in kept]
        for file in kept:
            source, target = f"{CHECKPOINT_PREFIX}{file.attempt}/{file.name}", attempt.key(file.name)
            is_linked = isinstance(storage, Disk) and storage.link(storage.local_path(source), target)
            if not is_linked and isinstance(storage, CopiesInside):
                storage.copy(source, target)
            elif not is_linked:
                raise StorageError(f"{source} cannot be linked to the next checkpoint", file=file.name)
        if isinstance(storage, Disk):
            storage.persist([attempt.key(file.name) for file in kept])
        return [Receipt(file.name, file.size_bytes, file.crc32c, rank) for file in kept]

    def _add(self, written: Mapping[str, bytes], attempt: Attempt, beat: Beat) -> list[Receipt]:
        """Write some small files."""
        files = [PlannedFile(attempt.key(name), MemorySource([memoryview(data)])) for name, data in written.items()]
        return [
            Receipt(name, one.size_bytes, one.crc32c, self._group.rank)
            for name, one in zip(written, self._upload(files, beat=beat), strict=True)
        ]


@collector_paused()
def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = _LENGTH.unpack_from(data)
    head: dict[str, Any] = json.loads(zlib.decompress(data[_LENGTH.size : _LENGTH.size + length]))
    return head, data[_LENGTH.size + length :]


@collector_paused()
def _stock_parts(heads: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Where all ranks' values lie for stock readers, and the paths of all keys; the lowest rank's word counts."""
    places: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for head in reversed(heads):
        places.update(head["stock"])
        paths.update((key, tuple(path)) for key, path in head["paths"].items())
    return places, paths
