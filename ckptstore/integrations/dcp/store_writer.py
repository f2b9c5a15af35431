"""`StoreWriter`: for users who call `dcp.save` or `dcp.async_save` themselves. Works with torch's stock planners.

Tensors that several ranks have alike are shared out over them, inside large tensors too, though the stock planner
assigns each tensor to one rank: every rank lists its boxes in its plan, the coordinator deals boxes, and the metadata
is rewritten in the end. Nothing of torch's own writing code is used, so no error of a thread is lost.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.errors import CheckpointDamaged, FileMissing, InvalidInput, InvalidState, StorageError
from ckptstore.format.digest import Digest
from ckptstore.format.layout import DCP_METADATA_NAME, Attempt
from ckptstore.format.manifest import Receipt
from ckptstore.group.base import this_node
from ckptstore.integrations.dcp.stock_deal import Assignment, Told, deal_plans, held_boxes, present_save
from ckptstore.integrations.dcp.stock_shard import DcpShard, InnerPlace
from ckptstore.integrations.dcp.target import DcpTarget, DirectoryTarget
from ckptstore.integrations.dcp.view import add_stock_bytes, add_stock_tensors
from ckptstore.saving.phases import SaveClock, longest_seconds
from ckptstore.state.index.items import Mode
from ckptstore.state.index.outline import INDEX_NAME, Outline, PartFile, Span, encode_table
from ckptstore.state.index.part import Part, PartBuilder
from ckptstore.state.index.tensor_index import TensorIndex
from ckptstore.state.write.replicas import check_alike
from ckptstore.state.write.shard_files import Striping
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.storage.base import Disk
from ckptstore.storage.traffic import counting
from ckptstore.storage.uri import parse_uri, redact
from ckptstore.transfer import Stored
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import MemorySource

DCP_VERSION = "1.0.0"
"""The version that stock DCP writes into its metadata."""


class StoreWriter(StorageWriter):
    """Writes a checkpoint through `dcp.save(state_dict, storage_writer=StoreWriter(...))`, readable by ckptstore and by
    stock torch.

    Args:
        target: a directory or URI that becomes one checkpoint, or a place in a store: `Store.dcp_target`.
        step: the step, for a place in a store.
        split_plain_bytes: the size from which plain tensors must be the same on all ranks that have them, as under DDP,
            and may each write a part. These, and replicas of DTensors from 1 MiB on, are read once more and compared;
            if they differ, the save fails. One rank writes each smaller one whole; with None, every plain one.
        num_files: the number of files that a rank writes at once when there is much to write.
        allow_pickle: True to store plain values whose reading can run code. The reader must allow it too.
        storage_options: for the storage of a URI.
        _extensions: torch's stream transforms, refused: files are read in ranges, against the digests of their bytes.

    Anything that could not be read back is refused with its key. `dcp.save` raises torch's CheckpointException when a
    rank fails; `translated` turns it into a CkptstoreError. A directory that holds a checkpoint is refused, and no file
    is ever overwritten. `use_collectives=False` is refused.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | DcpTarget,
        *,
        step: int | None = None,
        split_plain_bytes: int | None = 8 << 20,
        num_files: int = 4,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        _extensions: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        refuse_transforms("_extensions", _extensions)
        if num_files < 1:
            raise InvalidInput(f"num_files is {num_files!r}, it must be above 0")
        if split_plain_bytes is not None and split_plain_bytes < 0:
            raise InvalidInput(f"split_plain_bytes is {split_plain_bytes!r}, it must be at least 0, or None")
        self._given: str | os.PathLike[str] | None = None
        if isinstance(target, str | os.PathLike):
            self._given = target
            target = DirectoryTarget(target, storage_options=storage_options)
        elif storage_options is not None:
            raise InvalidInput(
                "storage_options are for a URI", hint="Give them where the target or its store is opened"
            )
        if step is not None and isinstance(target, DirectoryTarget):
            raise InvalidInput(f"step={step!r} is for a place in a store", hint="Give StoreWriter store.dcp_target()")
        self._target = target
        self._told: Told | None = None
        self._clock = SaveClock()
        self._report: dict[str, Any] = {}
        """This rank's report on the present save."""
        self._step = step
        self._split_plain_bytes = split_plain_bytes
        self._num_files = num_files
        self._allow_pickle = allow_pickle
        self._rank = 0
        self._is_coordinator = True
        self.save_id = str(uuid.uuid4())
        """The id of the save, which `reset` renews; stored in `.metadata`."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The location of the checkpoint, as the caller wrote it, or the URI of the store; without secrets."""
        return self._target.uri if self._given is None else printable(self._given)

    @property
    def _message(self) -> Told:
        """The coordinator's message for the present save. Raises InvalidState if it did not reach this rank."""
        if self._told is None:
            raise InvalidState("the coordinator's answer did not reach this rank: no file can be named")
        return self._told

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again. A `checkpoint_id` of `dcp.save` would be a second place; it is refused unless it is the same
        one."""
        if checkpoint_id is not None and not is_same_place(checkpoint_id, self._target.uri):
            raise InvalidInput(f"the writer goes to {self.checkpoint_id}, checkpoint_id is {checkpoint_id}")
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the metadata of the save for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare a save; DCP calls it first of all on every rank. The coordinator names the checkpoint: if that fails,
        the planner has not cached anything yet."""
        self._clock = SaveClock()
        self._told = present_save.told = None
        if not kwargs.get("use_collectives", True):
            raise InvalidInput("use_collectives=False writes one checkpoint for each rank, which StoreWriter does not")
        self._rank = rank_of_dcp(kwargs)
        self._is_coordinator = is_coordinator
        if is_coordinator:
            self._told = Told(self._target.begin(self._step))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """List this rank's boxes, before the stock planner assigns each key to one rank."""
        return dataclasses.replace(plan, storage_data=held_boxes(plan)) if plan.usable else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: deal the boxes that several ranks hold, and send the place of the files."""
        return deal_plans(plans, self._message, split_plain_bytes=self._split_plain_bytes)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; return when they are stored."""
        self._told = self._told or present_save.told
        deal_id = self._check_assignment(plan)
        storage, transfer = self._target.open()
        name = (self._message.prefix or storage.uri).rstrip("/").rpartition("/")[2]
        attempt = Attempt.parse(name)
        self._clock.agreed(name, step=attempt.step if attempt else 0, rank=self._rank)
        striping = Striping(
            self._num_files,
            self._target.num_prefixes,
            on_disk=isinstance(storage, Disk),
            apart=self._target.apart,
            mark="" if self._message.prefix else f"-{secrets.token_hex(4)}",
        )
        shard = DcpShard(
            plan,
            planner,
            rank=self._rank,
            striping=striping,
            algorithm=transfer.algorithm,
            allow_pickle=self._allow_pickle,
        )
        sources = shard.files.sources()
        with self._clock.part(storage.uri, is_last=False), counting(twice=True) as traffic:
            stored = self._upload([PlannedFile(self._message.prefix + name, source) for name, source in sources])
        part = shard.files.index_part([one.block_digests for one in stored])
        self._clock.ended("upload")
        self._report = self._clock.report(traffic, node=this_node())
        offer = self._target.offer()
        told = {
            "timings": self._report,
            "offer": offer,
            "deal": deal_id,
            "receipts": [
                Receipt(name, one.size_bytes, one.digest, self._rank).to_json()
                for (name, _), one in zip(sources, stored, strict=True)
            ],
            "stock": shard.stock,
            "part": part,
            "wrapped": shard.wrapped,
            "shared": shard.fingerprints(),
            "inner": shard.inner,
        }
        if not plan.items and not self._is_coordinator and any(offer.values()):
            raise InvalidInput(
                f"rank {self._rank} writes nothing, so its metrics and metadata would be lost",
                rank=self._rank,
                hint="Give them on the coordinator too",
            )
        results = [
            WriteResult(index=item.index, size_in_bytes=0, storage_data=told if number == 0 else None)
            for number, item in enumerate(plan.items)
        ]
        if not self._is_coordinator:
            self._target.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _check_assignment(self, plan: SavePlan) -> str:
        """Return the id of the deal of the plan. A planner may have kept the plan from an earlier save."""
        assignment = plan.storage_data
        if not isinstance(assignment, Assignment):
            raise InvalidState(
                "the planner kept the plan of another writer",
                hint="Give each kind of writer a planner class of its own, or do not cache plans",
            )
        if assignment.split_plain_bytes != self._split_plain_bytes:
            raise InvalidInput(
                f"the plan was made with split_plain_bytes={assignment.split_plain_bytes}, and is cached",
                hint="Do not change it between saves, or do not cache plans",
            )
        return assignment.deal_id

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: join the index, put the written chunks into the metadata, and publish."""
        with self._clock.part(self._target.open()[0].uri, is_last=True):
            self._publish(metadata, results)
        self._target.close()

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        told = [result[0].storage_data if result else None for result in results]
        if len({one["deal"] for one in told if one}) > 1:
            raise InvalidState("the ranks went by plans of different saves", hint="Do not cache plans")
        _check_alike(told)
        parts = [one["part"] if one else PartBuilder(rank).encode() for rank, one in enumerate(told)]
        index = TensorIndex([Part.decode(part, rank=rank, file=INDEX_NAME) for rank, part in enumerate(parts)])
        receipts = [Receipt.from_json(entry) for one in told if one for entry in one["receipts"]]
        stored = self._stored_metadata(metadata, index, [one for one in told if one])
        files = {INDEX_NAME: b"".join([_outline_of(index, parts), *parts]), DCP_METADATA_NAME: stored}
        planned = [
            PlannedFile(self._message.prefix + name, MemorySource([memoryview(data)])) for name, data in files.items()
        ]
        receipts += [
            Receipt(name, one.size_bytes, one.digest, self._rank)
            for name, one in zip(files, self._upload(planned), strict=True)
        ]
        reports = {one["timings"]["rank"]: one["timings"] for one in told if one} | {self._rank: self._report}
        took = [reports[rank] for rank in sorted(reports)]  # a rank that has nothing to write has no report
        self._target.finish(
            self._message.prefix,
            receipts,
            offers=[one["offer"] if one else {} for one in told],
            timings=lambda: self._clock.timings(took),
        )
        self._clock.met(longest_seconds(took))

    def _stored_metadata(self, metadata: Metadata, index: TensorIndex, told: Sequence[Mapping[str, Any]]) -> bytes:
        """Return `.metadata` with the chunks that were really written. Raises InvalidState when something was not."""
        # The planner may keep its `Metadata` for later saves, by any writer. So only those fields are set that every
        # writer sets.
        try:
            index.check_complete()
        except CheckpointDamaged as error:
            raise InvalidState(
                f"{error.message}: the ranks differ in what they have of it",
                hint="All ranks must give the same structure for what they share, and save together: with no_dist=True "
                "a rank has only its part of a distributed tensor",
            ) from None
        parts = [tuple(box) for one in told for box in one["wrapped"]]
        inner = {key: place for one in told for key, place in one["inner"].items()}
        places = {key: place for one in told for key, place in one["stock"].items()}
        _check_all_written(metadata, index, parts, places)
        planned = metadata.state_dict_metadata
        items: dict[str, Any] = {key: BytesStorageMetadata() for key in places}
        storage: dict[Any, Any] = {}
        add_stock_tensors(index, items, storage)
        for key, item in items.items():
            properties = getattr(planned.get(key), "properties", None)
            if isinstance(properties, TensorProperties) and hasattr(item, "properties"):
                item.properties = dataclasses.replace(properties, dtype=item.properties.dtype)
        add_stock_bytes(places, items, storage)
        # In the planner's order. Inner tensors of those that wrap others come after, as separate tensors.
        items = {key: items[key] for key in [*(key for key in planned if key in items), *items]}
        metadata.version, metadata.storage_data, metadata.storage_meta = DCP_VERSION, storage, self.storage_meta()
        paths = metadata.planner_data
        if isinstance(paths, dict):
            paths = {**paths, **_inner_paths(paths, inner)}
        stock = Metadata(items, paths, storage, metadata.storage_meta)
        stock.version = DCP_VERSION
        data = pickle.dumps(stock)
        if not self._allow_pickle:
            try:
                load_metadata(data)
            except CheckpointDamaged as error:
                raise InvalidState(
                    f"the planner's data could not be read back: {error.message}",
                    hint="Pass allow_pickle=True to StoreWriter and StoreReader, or keep it in the state",
                ) from None
        return data

    def _upload(self, files: Sequence[PlannedFile]) -> list[Stored]:
        """Write files where nothing is yet. Raises StorageError for a file that exists."""
        storage, transfer = self._target.open()
        for file in files:
            try:
                storage.stat(file.key)
            except FileMissing:
                continue
            raise StorageError(
                f"{file.key} is there already, and is not overwritten",
                file=file.key,
                rank=self._rank,
                hint="Something else writes to this place, or a save that failed left it",
            )
        return transfer.upload(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for any path or URI that is not empty."""
        return bool(os.fspath(checkpoint_id))


def _outline_of(index: TensorIndex, parts: Sequence[bytes]) -> bytes:
    """Return an outline by which each part may have something of every tensor, and values for all ranks."""
    tensors = [one for one in index.tensors.values() if not one.beside_value]
    ranks = range(len(parts))
    return Outline(
        tuple(PartFile(len(part), Digest.of(part)) for part in parts),
        encode_table(sorted(tensors)),
        common=tuple(ranks),
        spans=tuple(Span(rank, 0, len(tensors) - 1) for rank in ranks if tensors),
        is_packed=True,
    ).encode()


def refuse_transforms(name: str, transforms: Any) -> None:
    """Raise InvalidInput if torch's argument of that name asks for transforms of streams. An empty one asks for none,
    as with torch's classes."""
    if transforms:
        raise InvalidInput(
            f"{name} would transform what is stored, and files of ckptstore are read in ranges, against digests",
            hint=f"Leave {name} out, or use torch's FileSystemWriter and FileSystemReader",
        )


def printable(given: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a location as the caller wrote it, without secrets."""
    text = os.fspath(given)
    return given if redact(text) == text else redact(text)


def rank_of_dcp(options: Mapping[str, Any]) -> int:
    """Return this process's rank: what DCP says when it sets up a writer or reader, else (torch 2.8 says nothing) that
    in the default process group, 0 without one."""
    rank = options.get("rank")
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    return int(rank)


def is_same_place(one: str | os.PathLike[str], uri: str) -> bool:
    """Return True if a location is that of a URI, also through links of a disk."""
    location = parse_uri(one)
    if location.uri == uri or location.scheme:
        return location.uri == uri
    return os.path.realpath(location.prefix) == os.path.realpath(uri)


def _check_alike(told: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise InvalidState if ranks differ in a tensor of which each might have written a part."""
    held: dict[tuple[str, tuple[int, ...]], dict[bytes, list[int]]] = {}
    for rank, one in enumerate(told):
        for key, offsets, fingerprint in one["shared"] if one else ():
            held.setdefault((key, offsets), {}).setdefault(fingerprint, []).append(rank)
    check_alike(
        [(key, Mode.SHARD, ranks) for (key, _), ranks in held.items()],
        hint="Make them alike before the save. Of plain tensors, split_plain_bytes=None stores that of one rank, as "
        "torch's writer does",
    )


def _check_all_written(
    metadata: Metadata, index: TensorIndex, wrapped: Sequence[tuple[Any, ...]], values: Mapping[str, Any]
) -> None:
    """Raise InvalidState, naming some keys, when a key of the plan is in no file."""
    boxes: dict[str, set[tuple[Any, ...]]] = {}
    for key, *box in wrapped:
        boxes.setdefault(key, set()).add(tuple(box))
    lost = []
    for key, entry in metadata.state_dict_metadata.items():
        if key in boxes:
            wanted = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}  # type: ignore[union-attr]
            if {box for box in wanted if 0 not in box[1]} - boxes[key]:
                lost.append(key)
        elif key not in index.tensors and key not in values:
            lost.append(key)
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise InvalidState(f"no rank wrote {shown}", hint="All ranks must give what the plan says they have")


def _inner_paths(paths: Mapping[str, Any], inner: Mapping[str, InnerPlace]) -> dict[str, tuple[Any, ...]]:
    """Return the paths of the inner tensors of those that wrap others."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, (key, (first, *attributes)) in inner.items():
        *above, last = paths.get(key, (key,))
        found[name] = (*above, f"{last}{first.removeprefix(key)}", *attributes)
    return found
