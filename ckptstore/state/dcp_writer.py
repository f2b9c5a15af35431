"""`StoreWriter`: for those who call `dcp.save` or `dcp.async_save` themselves. Works with torch's stock planners.

What several ranks have alike is shared out over them, inside large tensors too, though the stock planner gives each
tensor to one rank: every rank lists what it holds in its plan, the coordinator deals boxes, and the metadata is
rewritten in the end. Nothing of torch's own writing code is used, so no error of a thread is lost.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.errors import InvalidInput, InvalidState
from ckptstore.layout import DCP_METADATA_NAME
from ckptstore.manifest import Receipt
from ckptstore.plan import PlannedFile
from ckptstore.sources import MemorySource
from ckptstore.state.boxes import Box
from ckptstore.state.dcp_deal import Assignment, deal_plans, held_boxes
from ckptstore.state.dcp_target import DirectoryTarget, Target
from ckptstore.state.describe import Described, dtype_name
from ckptstore.state.index import TensorIndex
from ckptstore.state.index_file import INDEX_NAME, join_parts
from ckptstore.state.items import Item, Mode
from ckptstore.state.part import PartBuilder
from ckptstore.state.plan import RankPlan, Write
from ckptstore.state.shard_files import ShardFiles
from ckptstore.state.stock_write import add_stock_bytes, add_stock_tensors
from ckptstore.state.values import Encoder
from ckptstore.storage.base import HasLocalFiles
from ckptstore.storage.uri import parse_uri


class StoreWriter(StorageWriter):
    """Writes a checkpoint through `dcp.save(state_dict, storage_writer=StoreWriter(...))`, readable by ckptstore and by
    stock torch.

    Args:
        target: a directory or URI that becomes one checkpoint, or a place in a store, as a store gives it.
        step: the step, for a place in a store.
        split_plain_bytes: plain tensors from this size on are taken to be the same on all ranks that have them, as
            under DDP, and each rank writes a part; smaller ones are written whole by one rank. None: all are.
        num_files: how many files a rank writes at once when there is much to write.
        storage_options: for the storage of a URI.

    `dcp.save` raises torch's CheckpointException when a rank fails; `translated` turns it into a CkptstoreError. A
    directory that holds a checkpoint is refused. `use_collectives=False` and plan caching across ranks are not
    supported.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | Target,
        *,
        step: int | None = None,
        split_plain_bytes: int | None = 8 << 20,
        num_files: int = 4,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(target, str | os.PathLike):
            target = DirectoryTarget(target, storage_options=storage_options)
        self._target = target
        self._prefix = ""
        self._step = step
        self._split_plain_bytes = split_plain_bytes
        self._num_files = num_files
        self._rank = 0
        self._is_coordinator = True

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes."""
        return self._target.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A `checkpoint_id` given to `dcp.save` would be a second place; it is refused unless it is the same one."""
        if checkpoint_id is not None and parse_uri(checkpoint_id).uri != self.checkpoint_id:
            raise InvalidInput(f"the writer goes to {self.checkpoint_id}, checkpoint_id is {checkpoint_id}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank."""
        if not kwargs.get("use_collectives", True):
            raise InvalidInput("use_collectives=False writes one checkpoint for each rank, which StoreWriter does not")
        self._rank = int(kwargs.get("rank") or 0)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """List what this rank holds, before the stock planner gives each key to one rank."""
        return dataclasses.replace(plan, storage_data=held_boxes(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: name the checkpoint, and deal what several ranks hold."""
        self._prefix = self._target.begin(self._step)
        return deal_plans(plans, self._prefix, split_plain_bytes=self._split_plain_bytes)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; returns when they are stored."""
        storage, transfer = self._target.open()
        on_disk = isinstance(storage, HasLocalFiles)
        shard = _Shard(plan, planner, rank=self._rank, num_files=self._num_files, on_disk=on_disk)
        sources = [PlannedFile(shard.assignment.prefix + name, source) for name, source in shard.files.sources()]
        stored = transfer.upload(sources)
        names = [file.key.removeprefix(shard.assignment.prefix) for file in sources]
        told = {
            "receipts": [
                Receipt(name, one.size_bytes, one.crc32c, self._rank).to_json()
                for name, one in zip(names, stored, strict=True)
            ],
            "stock": shard.files.stock,
            "part": shard.files.index_part([one.block_crcs for one in stored]),
        }
        results = [
            WriteResult(index=item.index, size_in_bytes=0, storage_data=told if number == 0 else None)
            for number, item in enumerate(plan.items)
        ]
        if not self._is_coordinator:
            self._target.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: join the index, put what was really written into the metadata, and publish."""
        told = [result[0].storage_data if result else None for result in results]
        parts = [one["part"] if one else PartBuilder(rank).encode() for rank, one in enumerate(told)]
        receipts = [Receipt.from_json(entry) for one in told if one for entry in one["receipts"]]
        joined = join_parts(parts)
        index = TensorIndex.decode(joined)
        index.check_complete()
        storage_data: dict[MetadataIndex, Any] = {}
        add_stock_tensors(index, metadata.state_dict_metadata, storage_data)
        for one in told:
            add_stock_bytes(one["stock"] if one else {}, metadata.state_dict_metadata, storage_data)
        metadata.storage_data = storage_data
        receipts += self._write({INDEX_NAME: joined, DCP_METADATA_NAME: pickle.dumps(metadata)})
        self._target.finish(self._prefix, receipts, world_size=len(results))
        self._target.close()

    def _write(self, files: Mapping[str, bytes]) -> list[Receipt]:
        _, transfer = self._target.open()
        planned = [PlannedFile(self._prefix + name, MemorySource([memoryview(data)])) for name, data in files.items()]
        stored = transfer.upload(planned)
        return [Receipt(name, one.size_bytes, one.crc32c, self._rank) for name, one in zip(files, stored, strict=True)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return bool(os.fspath(checkpoint_id))


class _Shard:
    """What one rank writes of a plan."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, *, rank: int, num_files: int, on_disk: bool) -> None:
        self.assignment: Assignment = plan.storage_data
        self._described = Described()
        self._stock: dict[str, bytes] = {}
        writes: list[Write] = []
        numbers: dict[str, int] = {}
        items: list[Item] = []
        for number, item in enumerate(plan.items):
            if item.type is WriteItemType.BYTE_IO:
                self._take_bytes(item, planner.resolve_data(item))
            else:
                self._take_tensor(item, planner, self.assignment.boxes[number], items, numbers, writes)
        self._described.items = items
        empty = tuple(number for number, item in enumerate(items) if 0 in item.shape)
        planned = RankPlan(tuple(writes), empty, common=tuple(self._described.values), is_shared=True)
        self.files = ShardFiles(self._described, planned, rank=rank, num_files=num_files, on_disk=on_disk)
        self.files.add_stock_values(self._stock)

    def _take_bytes(self, item: WriteItem, data: Any) -> None:
        """A plain value: as stock wants it, and as JSON where it has one."""
        key, frame = item.index.fqn, data.getvalue()
        self._stock[key] = frame
        try:
            value = torch.load(io.BytesIO(frame), weights_only=True)
            self._described.values[key] = json.dumps(Encoder(_refuse).encode(value, path=key), allow_nan=False)
        except Exception:  # only stock readers get it then
            return

    def _take_tensor(
        self,
        item: WriteItem,
        planner: SavePlanner,
        boxes: Sequence[Box],
        items: list[Item],
        numbers: dict[str, int],
        writes: list[Write],
    ) -> None:
        key, told = item.index.fqn, item.tensor_data
        assert told is not None  # every item but bytes has it
        tensor: Any = planner.resolve_data(item)
        tensor = tensor.detach()
        held = Box(tuple(told.chunk.offsets), tuple(told.chunk.sizes))
        if tuple(tensor.shape) != held.sizes:
            raise InvalidState(f"the planner gave {tuple(tensor.shape)} for {key}, its plan says {held.sizes}")
        number = numbers.setdefault(key, len(items))
        if number == len(items):
            items.append(Item(key, Mode.SHARD, dtype_name(tensor, key), tuple(told.size)))
        one = items[number]
        items[number] = dataclasses.replace(one, boxes=(*one.boxes, held))
        self._described.memory[key] = (*self._described.memory.get(key, ()), tensor)
        writes += [Write(number, len(one.boxes), box) for box in boxes]


def _refuse(kept: Any) -> str:
    raise InvalidState("it holds tensors")
