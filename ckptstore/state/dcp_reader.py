"""`StoreReader`: for those who call `dcp.load` themselves, on a checkpoint of ckptstore or of stock DCP.

The metadata comes from the tensor index, or through the restricted unpickler; no pickle of the checkpoint is run. The
ranges that a rank needs are read sorted, in parallel and, in checkpoints of ckptstore, against their digests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.errors import CkptstoreError, FileMissing, InvalidInput, InvalidState, RankFailed
from ckptstore.layout import DCP_METADATA_NAME
from ckptstore.retried import with_retries
from ckptstore.state.boxes import Box
from ckptstore.state.flatten import TensorRef, join_path, stock_leaves
from ckptstore.state.index import TensorIndex
from ckptstore.state.index_file import INDEX_NAME
from ckptstore.state.stock_read import StockState, load_metadata
from ckptstore.state.stock_write import add_stock_tensors
from ckptstore.state.stored import PerRank, StoredState
from ckptstore.storage.base import Storage
from ckptstore.storage.open import open_storage
from ckptstore.storage.uri import parse_uri
from ckptstore.transfer import Transfer


@contextmanager
def translated() -> Iterator[None]:
    """Raise the CkptstoreError of the lowest rank that failed in place of torch's CheckpointException, which is a
    BaseException that no `except Exception` sees."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(first, CkptstoreError):
            raise first.at(rank=rank) from error
        raise RankFailed(f"{type(first).__name__}: {first}", rank=rank) from error


class StoreReader(StorageReader):
    """Reads a checkpoint through `dcp.load(state_dict, storage_reader=StoreReader(...))`.

    Args:
        uri: the directory or URI of one checkpoint; `Checkpoint.uri` is one.
        per_rank: what becomes of values that differed between ranks when the number of ranks is another one now:
            "error", "first" (the lowest rank's), "skip".
        allow_pickle: whether plain values that need code to be read may be read. Only for checkpoints that you trust.
        storage_options: for the storage of the URI.

    Damage raises CheckpointDamaged, in torch's CheckpointException; `translated` takes it out.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        per_rank: PerRank = "error",
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._given = os.fspath(uri)
        self._per_rank = per_rank
        self._allow_pickle = allow_pickle
        self._storage_options = storage_options
        self._opened: tuple[Storage, Transfer] | None = None
        self._state: StoredState | StockState | None = None
        self._values: dict[str, Any] = {}
        self._rank = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_state": None, "_values": {}}

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is."""
        return self._open()[0].uri

    def _open(self) -> tuple[Storage, Transfer]:
        if self._opened is None:
            retry = RetryConfig.from_env()
            storage = with_retries(open_storage(self._given, storage_options=self._storage_options), retry)
            transfer = Transfer(storage, config=TransferConfig.from_env(), retry=retry)
            self._opened = storage, transfer
        return self._opened

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew; a `checkpoint_id` given to `dcp.load` must be where the reader reads."""
        if checkpoint_id is not None and parse_uri(checkpoint_id).uri != self.checkpoint_id:
            raise InvalidInput(f"the reader reads {self.checkpoint_id}, checkpoint_id is {checkpoint_id}")
        self._state, self._values = None, {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint has, as stock planners want it. Raises CheckpointDamaged, FileMissing."""
        storage, transfer = self._open()
        self._rank = _rank_of(kwargs)
        try:
            data = storage.read(INDEX_NAME)
        except FileMissing:
            return self._stock_metadata(storage, transfer)
        index = TensorIndex.decode(data)
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        state = StoredState(
            index, transfer.read, "", self._rank, world_size, per_rank=self._per_rank, allow_pickle=self._allow_pickle
        )
        saved = state.saved()
        self._state = state
        items: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}
        add_stock_tensors(index, items, places)
        for key, value in saved.values.items():
            for path, leaf in stock_leaves(value, (key,)):
                if isinstance(leaf, TensorRef):  # an item of its own, of the tensor kind
                    continue
                self._values[join_path(path)] = leaf
                items[join_path(path)] = BytesStorageMetadata()
        return Metadata(items, {key: (key,) for key in items}, places, StorageMeta(checkpoint_id=storage.uri), "1.0.0")

    def _stock_metadata(self, storage: Storage, transfer: Transfer) -> Metadata:
        metadata: Metadata = load_metadata(storage.read(DCP_METADATA_NAME))
        sizes = {file.key: file.size_bytes for file in storage.list("")}
        self._state = StockState(metadata, transfer.read, "", sizes, allow_pickle=self._allow_pickle)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank."""
        if self._state is None:
            self.read_metadata(**kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and hand the planner its plain values."""
        state = self._state
        assert state is not None  # DCP reads the metadata first
        wanted: list[tuple[str, Box, torch.Tensor]] = []
        converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        committed: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._framed(item.dest_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            committed.append((item, target))
            box, memory = self._box_of(item), target
            dtype = getattr(torch, state.index.tensors[item.storage_index.fqn].dtype)
            if dtype != target.dtype:
                memory = torch.empty_like(target, dtype=dtype)
                converted.append((target, memory))
            wanted.append((item.storage_index.fqn, box, memory))
        state.fill_boxes(wanted)
        for target, memory in converted:
            target.copy_(memory)
        for item, target in committed:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _box_of(self, item: ReadItem) -> Box:
        """The wanted box, counted from the whole tensor."""
        start = tuple(item.storage_index.offset or (0,) * len(item.lengths))
        offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
        return Box(offsets, tuple(item.lengths))

    def _framed(self, key: str) -> io.BytesIO:
        """A plain value as the planner wants it: framed here, from a value that was read safely."""
        if isinstance(self._state, StockState):
            self._values.update(self._state.values(lambda name: name == key))
        if key not in self._values:
            raise InvalidState(f"the checkpoint has no plain value {key}")
        buffer = io.BytesIO()
        torch.save(self._values[key], buffer)
        buffer.seek(0)
        return buffer

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path or URI may be one."""
        return bool(os.fspath(checkpoint_id))


def _rank_of(kwargs: Mapping[str, Any]) -> int:
    if kwargs.get("rank") is not None:
        return int(kwargs["rank"])
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
