"""`StoreReader`: for users who call `dcp.load` themselves, on a checkpoint of ckptstore or of stock DCP.

The metadata comes from the tensor index, or through the restricted unpickler; no pickle of the checkpoint is run. The
ranges that a rank needs are read sorted, in parallel and, in checkpoints of ckptstore, against their digests.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.errors import (
    CheckpointDamaged,
    CkptstoreError,
    FileMissing,
    InvalidInput,
    InvalidState,
    RankFailed,
    StateMismatch,
)
from ckptstore.format.layout import DCP_METADATA_NAME, MANIFEST_NAME
from ckptstore.format.manifest import Manifest
from ckptstore.integrations.dcp.store_writer import (
    DCP_VERSION,
    is_same_place,
    printable,
    rank_of_dcp,
    refuse_transforms,
)
from ckptstore.integrations.dcp.view import View, view_of_state
from ckptstore.loading.index_read import IndexReader
from ckptstore.runtime.torch_private import is_wrapper
from ckptstore.state.live.flatten import TensorRef, map_tensors
from ckptstore.state.live.values import Frame
from ckptstore.state.read.stored import PerRank, StoredState, check_per_rank
from ckptstore.state.tensors.boxes import Box, whole
from ckptstore.state.tensors.cast_loss import check_load_cast
from ckptstore.state.tensors.placement import name_of
from ckptstore.state.tensors.tensor_memory import check_memory
from ckptstore.state.tensors.wrapped import Wrapped, check_same, unwrap
from ckptstore.stock.stock_pickles import load_metadata
from ckptstore.stock.stock_read import StockState
from ckptstore.storage.base import Storage
from ckptstore.transfer import Transfer
from ckptstore.transfer.opened import OpenedPlace, open_place

logger = logging.getLogger("ckptstore")

_Wanted = tuple[str, Box, torch.Tensor]
_MOST_SHOWN = 10
"""The most keys in a warning."""


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
        per_rank: the treatment of values that differed between ranks, when the number of ranks has changed: "error",
            "first" (take the lowest rank's) or "skip" (the planner does not see them: let it allow partial loads).
        allow_pickle: True to read plain values whose reading can run code. Only for checkpoints that you trust.
        storage_options: for the storage of the URI.
        _extension_registry: torch's stream transforms, refused: StoreReader undoes none.

    Damage raises CheckpointDamaged, in torch's CheckpointException; `translated` raises it alone.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        per_rank: PerRank = "error",
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        _extension_registry: Any = None,
    ) -> None:
        super().__init__()
        refuse_transforms("_extension_registry", _extension_registry)
        check_per_rank(per_rank)
        self._given = uri
        self._per_rank = per_rank
        self._allow_pickle = allow_pickle
        self._storage_options = storage_options
        self._opened: OpenedPlace | None = None
        self._state: StoredState | StockState | None = None
        self._view = View()
        self._rank = 0
        self._failed: CkptstoreError | None = None
        self.load_id = str(uuid.uuid4())
        """The id of the load, which `reset` renews."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_state": None, "_view": View()}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The location of the checkpoint, as the caller wrote it; without secrets."""
        return printable(self._given)

    def _open(self) -> OpenedPlace:
        if self._opened is None:
            self._opened = open_place(self._given, storage_options=self._storage_options)
        return self._opened

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again. A `checkpoint_id` of `dcp.load` must be the place that the reader reads."""
        if checkpoint_id is not None and not is_same_place(checkpoint_id, self._open().storage.uri):
            raise InvalidInput(f"the reader reads {self.checkpoint_id}, checkpoint_id is {checkpoint_id}")
        self._state, self._view, self._failed = None, View(), None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of the checkpoint in the form of stock planners. Raises CheckpointDamaged, FileMissing.

        With `rank`, return those that stock DCP wrote for that rank with `use_collectives=False`.
        """
        place = self._open()
        storage, transfer = place.storage, place.transfer
        wanted_rank = kwargs.get("rank")
        self._rank = rank_of_dcp(kwargs)
        if wanted_rank is not None and self._failed is not None:
            raise self._failed  # DCP tries the rank's after any failure: a damaged one is not missing
        try:
            return self._read_metadata(storage, transfer, kwargs)
        except FileMissing:
            raise
        except CkptstoreError as error:
            self._failed = error
            raise

    def _read_metadata(self, storage: Storage, transfer: Transfer, kwargs: Mapping[str, Any]) -> Metadata:
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id)
        if kwargs.get("rank") is not None:
            return self._stock_metadata(storage, transfer, f"__{self._rank}{DCP_METADATA_NAME}", meta)
        try:
            reader = IndexReader(transfer.read, "", lambda name: storage.stat(name).size_bytes)
        except FileMissing:
            return self._stock_metadata(storage, transfer, DCP_METADATA_NAME, meta)
        index = reader.whole()  # DCP's planners look at every chunk
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        state = StoredState(
            index, transfer.read, "", self._rank, world_size, per_rank=self._per_rank, allow_pickle=self._allow_pickle
        )
        stock = self._planned(storage)
        self._state, self._view = state, view_of_state(state, stock)
        view = self._view
        if stock is not None and stock.storage_meta is not None:
            meta.save_id, meta.modules = stock.storage_meta.save_id, stock.storage_meta.modules
        found = Metadata(view.items, view.paths, view.places, meta)
        found.version = DCP_VERSION
        return found

    def _planned(self, storage: Storage) -> Metadata | None:
        """Return the `.metadata` beside an index, None if there is none. It shows how the planner of the save saw the
        state."""
        try:
            data = storage.read(DCP_METADATA_NAME)
        except FileMissing:
            return None
        try:
            manifest = Manifest.decode(storage.read(MANIFEST_NAME))
        except FileMissing:  # the data files alone were moved
            manifest = None
        for receipt in manifest.files if manifest else ():
            if receipt.name == DCP_METADATA_NAME and receipt.digest and receipt.digest.like(data) != receipt.digest:
                raise CheckpointDamaged(f"{DCP_METADATA_NAME} is damaged", file=DCP_METADATA_NAME)
        metadata: Metadata = pickle.loads(data) if self._allow_pickle else load_metadata(data)
        return metadata

    def _stock_metadata(self, storage: Storage, transfer: Transfer, name: str, meta: StorageMeta) -> Metadata:
        metadata: Metadata = load_metadata(storage.read(name), file=name)
        sizes = {file.key: file.size_bytes for file in storage.list("")}
        self._state = StockState(metadata, transfer.read, "", sizes, allow_pickle=self._allow_pickle)
        self._view = View()
        stored = getattr(metadata, "storage_meta", None)
        if stored is not None:
            meta.save_id, meta.modules = stored.save_id, stored.modules
        metadata.storage_meta = meta
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Read the metadata, unless this rank has; DCP calls it on every rank."""
        if self._state is None:
            self.read_metadata(**kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and pass the planner its plain values."""
        batch = _Batch(self._stored, planner)
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            offsets = tuple(item.storage_index.offset or ())
            wrapped = self._view.wrapped.get((item.storage_index.fqn, offsets))
            if wrapped is not None:
                batch.add_wrapped(item, *wrapped)
            else:
                start = offsets or (0,) * len(item.lengths)
                at = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))  # from the whole tensor
                key = self._view.keys.get(item.storage_index.fqn, item.storage_index.fqn)
                batch.add(item, key, Box(at, tuple(item.lengths)))
        batch.finish()
        for item in values:  # after the tensors, of which one may be refused
            planner.load_bytes(item, self._framed(item.storage_index.fqn))
        if batch.cast:
            _warn_of_casts(batch.cast)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _stored(self) -> StoredState | StockState:
        if self._state is None:
            raise InvalidInput("StoreReader reads tensors after the metadata", hint="Use it through dcp.load")
        return self._state

    def _framed(self, key: str) -> io.BytesIO:
        """Return a plain value as the planner wants it, in a new frame around a value that was read safely."""
        state, view = self._stored, self._view
        if isinstance(state, StockState) and key not in view.values:
            view.values.update(state.values(lambda name: name == key))
        if key not in view.values:
            barred = [name for name in view.barred if key == name or key.startswith(f"{name}.")]
            if barred:
                raise InvalidState(
                    f"{key} needs code to be read", hint="Pass allow_pickle=True if you trust who wrote the checkpoint"
                )
            raise InvalidState(f"the checkpoint has no plain value {key}")
        value = view.values[key]
        if isinstance(value, Frame):
            return io.BytesIO(value.data)
        if isinstance(state, StoredState):
            value = map_tensors(value, (key,), lambda name, leaf: _with_numbers(state, leaf, name))
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return buffer

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for any path or URI that is not empty."""
        return bool(os.fspath(checkpoint_id))


def _with_numbers(state: StoredState, leaf: Any, name: str) -> Any:
    """Return a leaf of a plain value; read a tensor to the host, unless it was read with the value."""
    if not isinstance(leaf, TensorRef):
        return leaf
    entry = state.entry(leaf.key)
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
    state.fill({name: (tensor, leaf.key)})
    return tensor


def _warn_of_casts(cast: Mapping[str, tuple[torch.dtype, torch.dtype]]) -> None:
    """Warn, once for all tensors of a load on this rank: stock DCP casts silently."""
    shown = [f"{key} from {name_of(saved)} to {name_of(own)}" for key, (saved, own) in cast.items()]
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    logger.warning(
        "tensors were cast to the dtype of the state: %s%s",
        ", ".join(shown[:_MOST_SHOWN]),
        more,
    )


class _Batch:
    """Tensors that are read together. None of them may share its memory with another one."""

    def __init__(self, state: StoredState | StockState, planner: LoadPlanner) -> None:
        self._state = state
        self._planner = planner
        self._wanted: list[_Wanted] = []
        self._apart: list[_Wanted] = []
        """Those of the tensors that are read into other memory first."""
        self._converted: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._committed: list[tuple[ReadItem, torch.Tensor]] = []
        self._addresses: set[int] = set()
        self.cast: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """The dtypes in the checkpoint and in the state, by key, of tensors where they differ."""

    def add(self, item: ReadItem, key: str, box: Box) -> None:
        """Fill the planner's tensor for an item with a box of the tensor stored under `key`. Raises StateMismatch."""
        target = self._planner.resolve_tensor(item)
        if tuple(target.shape) != box.sizes:
            raise StateMismatch(f"{key}: the planner gave {tuple(target.shape)} for {box.sizes}")
        self._want(key, box, target.detach())
        self._committed.append((item, target))

    def add_wrapped(self, item: ReadItem, key: str, saved: Wrapped) -> None:
        """Fill the inner tensors of the planner's tensor with those that were saved. Raises StateMismatch."""
        name, label = item.storage_index.fqn, saved.label
        target = self._planner.resolve_tensor(item)
        if not is_wrapper(target):
            raise StateMismatch(
                f"{name} was saved from a {label.kind}, and is loaded into a {type(target).__name__}",
                hint="Load it into a tensor that was made as the saved one was",
            )
        if any(item.storage_offsets) or tuple(item.lengths) != label.shape or tuple(target.shape) != label.shape:
            raise StateMismatch(
                f"{name} was saved from a {label.kind} in other parts than it is loaded into: only that class knows "
                "how to cut it",
                hint="Load it on the layout it was saved on",
            )
        given, again = unwrap(target, name, label.part), unwrap(self._planner.resolve_tensor(item), name, label.part)
        check_same(saved, given, name)
        self._want_inner(saved, given, again, name)
        self._committed.append((item, target))

    def _want_inner(self, saved: Wrapped, given: Wrapped, again: Wrapped, key: str) -> None:
        for attribute, inner in saved.items():
            name, target = f"{key}.{attribute}", given[attribute]
            if isinstance(inner, Wrapped):
                self._want_inner(inner, target, again[attribute], name)
                continue
            assert isinstance(self._state, StoredState)  # stock checkpoints have none
            entry = self._state.entry(inner.key)
            if (entry.torch_dtype, entry.shape) != (target.dtype, tuple(target.shape)):
                raise StateMismatch(
                    f"{name} is {target.dtype} {tuple(target.shape)}, the checkpoint has {entry.dtype} {entry.shape}"
                )
            if target.data_ptr() != again[attribute].data_ptr():
                raise StateMismatch(
                    f"{name} is a copy: what is read would not reach the state",
                    hint="Load it on the layout it was saved on",
                )
            self._want(inner.key, whole(entry.shape), target)

    def _want(self, key: str, box: Box, target: torch.Tensor) -> None:
        state, memory = self._state, target
        entry = state.entry(key) if isinstance(state, StoredState) else state.index.tensors[key]
        dtype = entry.torch_dtype
        is_elsewhere = is_wrapper(target)
        if not is_elsewhere:
            check_memory(target, key)
        if not is_elsewhere and target.numel():
            if target.data_ptr() in self._addresses:  # a planner may use the same memory repeatedly
                self.finish()
            self._addresses.add(target.data_ptr())
        if dtype != target.dtype or is_elsewhere:
            memory = torch.empty(box.sizes, dtype=dtype, device="cpu")
            self._converted.append((key, target, memory))
            self._apart.append((key, box, memory))
        else:
            self._wanted.append((key, box, memory))
        if dtype != target.dtype:
            self.cast[key] = dtype, target.dtype

    def finish(self) -> None:
        """Read the tensors, and commit them to the planner. Raises StateMismatch, before anything is written to any of
        these, for a number that the dtype of the planner's tensor cannot hold."""
        self._state.fill_boxes(self._apart)
        for key, target, memory in self._converted:
            if target.dtype != memory.dtype:
                check_load_cast(key, memory, target.dtype)
        self._state.fill_boxes(self._wanted)
        with torch.no_grad():
            for _, target, memory in self._converted:
                target.copy_(memory)
        for item, target in self._committed:
            self._planner.commit_tensor(item, target)
        self._wanted, self._apart, self._converted, self._committed, self._addresses = [], [], [], [], set()
