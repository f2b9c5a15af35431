"""Saving and loading flat states without the stories above: one shard for each rank, in one directory."""

import uuid
from contextlib import closing

import torch
from exchanging import exchange

from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.format.layout import Attempt
from ckptstore.group import SoloGroup
from ckptstore.loading.index_read import IndexReader
from ckptstore.saving.request import Request
from ckptstore.saving.state_shard import StateOptions, StateShard
from ckptstore.saving.transaction import meet
from ckptstore.state.index.outline import INDEX_NAME
from ckptstore.state.live.flatten import FlatState, TensorEntry
from ckptstore.state.read.stored import StoredState
from ckptstore.state.write.assignment import SaveMemo
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import Transfer

ATTEMPT = Attempt(7, 1, "0123abcd")


def make_transfer(root, *, num_threads=2, durable=False, **more):
    config = TransferConfig(num_threads=num_threads, durable=durable, **more)
    return Transfer(LocalStorage(root, durable=durable), config=config, retry=RetryConfig(retry_attempts=1))


def plain_state(tensors, values=None):
    """A flat state of tensors and plain values under keys of their own, without any nesting."""
    flat = FlatState()
    for key, tensor in tensors.items():
        flat.add_tensor((key,), TensorEntry(tensor))
    for key, value in (values or {}).items():
        flat.add_value((key,), value)
    return flat


def save_flat(root, flat, *, group=None, memo=None, attempt=ATTEMPT, transfer=None, **options):
    """Save a flat state; the receipts of all files, on rank 0."""
    group = group or SoloGroup()
    moved = transfer or make_transfer(root)
    shard = StateShard(
        lambda: flat,
        rank=group.rank,
        world_size=group.world_size,
        memo=memo or SaveMemo(),
        storage=LocalStorage(root, durable=False),
        upload=moved.upload,
        options=StateOptions(**options),
    )
    request = Request.of(step=7, kind="state", metrics=None, metadata=None, exists="replace")
    meet(group, "save", shard, request, lambda request, decision: {})
    receipts = []

    def join(stored):
        receipts.extend(plan.join(attempt, stored).receipts)

    plan = shard.plan()
    exchange(group, "store", lambda: plan.store(attempt), join)
    if transfer is None:
        moved.close()
    return receipts


def save_plain(root, tensors, values=None, **options):
    """Save tensors and plain values by key; where the checkpoint lies."""
    save_flat(root, plain_state(tensors, values), **options)
    return root / ATTEMPT.prefix


def index_of(data, digest=None):
    """The index that these bytes are, with all parts; `digest` is that of the file."""
    storage, retry = MemoryStorage(f"memory://{uuid.uuid4().hex}"), RetryConfig(retry_attempts=1)
    storage.write(INDEX_NAME, [memoryview(data)])
    with closing(Transfer(storage, config=TransferConfig(num_threads=1), retry=retry)) as transfer:
        return IndexReader(transfer.read, "", {INDEX_NAME: len(data)}.get, digest).whole()


def open_index(root, attempt=ATTEMPT):
    return index_of((root / attempt.prefix / INDEX_NAME).read_bytes())


def open_stored(root, transfer, *, rank=0, world_size=1, attempt=ATTEMPT, **more):
    return StoredState(
        open_index(root, attempt), transfer.read, attempt.prefix, rank=rank, world_size=world_size, **more
    )


def load_into(root, targets, **more):
    """Fill tensors, each from its own key."""
    transfer = make_transfer(root)
    try:
        stored = open_stored(root, transfer, **more)
        stored.saved()
        stored.fill({key: (tensor, key) for key, tensor in targets.items()})
    finally:
        transfer.close()
    return targets


def bits(tensor):
    """The bytes of a tensor, for comparing what has no equality (fp8) or has NaN."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
