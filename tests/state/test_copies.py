"""Copies of tensors: scratch memory is the source's alone, and a staged copy is compared with its tensor."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saving import bits

from ckptstore import CkptstoreError, KeepEvery, KeepLatest, KeepWeights, open_store
from ckptstore.config import RetryConfig, TransferConfig
from ckptstore.extensions.exchange.copying import StorageSource
from ckptstore.extensions.peers.channel import NodeKeys
from ckptstore.extensions.tier.drain.own_files import _OnPartner
from ckptstore.extensions.tier.drain.paced import PacedSource
from ckptstore.extensions.tier.nodes.node_disk import NodeDisk
from ckptstore.extensions.tier.nodes.node_server import NodeClient, NodeServer
from ckptstore.format.layout import Attempt
from ckptstore.saving.staging import Staging
from ckptstore.state.tensors import device
from ckptstore.state.tensors.boxes import whole
from ckptstore.state.tensors.dense import dense_of
from ckptstore.state.tensors.frames import template
from ckptstore.state.tensors.segments import Bytes, Copied, SegmentSource, Slab, SlabLayout, payload_segment
from ckptstore.state.tensors.tensor_memory import view_of
from ckptstore.state.write.shard_files import CopyCheck, Placed
from ckptstore.storage.disk.local import LocalStorage
from ckptstore.storage.memory import MemoryStorage
from ckptstore.transfer import Transfer
from ckptstore.transfer.moves import PlannedFile
from ckptstore.transfer.sources import FileSource, MemorySource

_PATTERN = 0x5A
_BASE = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
_COMPLEX = torch.view_as_complex(torch.arange(400, dtype=torch.float32).reshape(10, 20, 2))
TENSORS = [
    _BASE[:7],
    _BASE.t(),
    _BASE[:, 5:9],
    torch.tensor(3, dtype=torch.uint8),
    _BASE.bfloat16()[:, ::3],
    _BASE[:1].expand(5, 100),
    _BASE.reshape(2, 10, 15, 20).to(memory_format=torch.channels_last),
    _BASE.as_strided((20, 30), (7, 1)),
    _COMPLEX.conj(),
    _COMPLEX.conj().imag,
    _COMPLEX.t(),
    _BASE.to(torch.float8_e4m3fn).t(),
    _BASE.to(torch.uint16).t(),
]


def gathered() -> tuple[SegmentSource, bytes]:
    """A file with a slab and a payload of each tensor, small ones under headers; and its bytes."""
    made = [template(one.dtype, tuple(one.shape)) for one in TENSORS]
    addresses = [held.address if (held := dense_of(tensor)) else 0 for tensor in TENSORS]
    segments: list[Any] = [Slab(SlabLayout(made), TENSORS, addresses)]
    expected = b"".join(one.header + bits(tensor) + one.trailer for one, tensor in zip(made, TENSORS, strict=True))
    for one, tensor in zip(made, TENSORS, strict=True):
        segments += [Bytes(memoryview(one.header)), payload_segment(tensor), Bytes(memoryview(one.trailer))]
        expected += one.header + bits(tensor) + one.trailer
    return SegmentSource(segments, ()), expected


@contextlib.contextmanager
def on_a_partner(tmp_path: Path, data: bytes) -> Iterator[_OnPartner]:
    attempt = Attempt(3, 1, "0123abcd")
    keys = [NodeKeys(), NodeKeys()]
    for one in keys:
        one.of_ranks = [each.public for each in keys]
    server = NodeServer(NodeDisk.open(tmp_path / "disk", "id", node="b"), keys[1], is_one_machine=True)
    client = NodeClient("b", server.addresses, keys[0], rank=0, server_rank=1, timeout_seconds=20)
    try:
        client.write(
            attempt,
            "f",
            MemorySource([memoryview(data)]),
            memoryview(bytearray(100)),
            given_up=NEVER,
            algorithm="crc32c",
        )
        yield _OnPartner(client, attempt, "f", len(data))
    finally:
        client.close()
        server.close()


NEVER = threading.Event()


@contextlib.contextmanager
def source_of(kind: str, tmp_path: Path) -> Iterator[tuple[Any, bytes]]:
    source, data = gathered()
    if kind == "segments":
        yield source, data
    elif kind == "paced":
        yield PacedSource(source, lambda _size_bytes: None), data
    elif kind == "memory":
        yield MemorySource([memoryview(data[:100]), memoryview(data[100:])]), data
    elif kind == "file":
        (tmp_path / "f").write_bytes(data)
        yield FileSource.of(tmp_path / "f"), data
    elif kind == "storage":
        storage = MemoryStorage("memory://copies")
        storage.write("f", [memoryview(data)])
        yield StorageSource(storage, "f", len(data)), data
    else:
        with on_a_partner(tmp_path, data) as partner:
            yield partner, data


@pytest.mark.parametrize("kind", ["segments", "paced", "memory", "file", "storage", "partner"])
def test_a_source_gives_its_bytes_and_writes_nothing_behind_the_range(kind: str, tmp_path: Path) -> None:
    numbers = random.Random(0)
    with source_of(kind, tmp_path) as (source, data), source.open() as read:
        for _ in range(60):
            start = numbers.randrange(len(data))
            size_bytes = min(numbers.choice([1, 7, 100, 5000, len(data)]), len(data) - start)
            scratch = bytearray([_PATTERN]) * (size_bytes + 64)
            views = read(start, size_bytes, memoryview(scratch))
            assert b"".join(views) == data[start : start + size_bytes]
            del views
            assert scratch[size_bytes:] == bytes([_PATTERN]) * 64


@given(st.data())
def test_fill_writes_all_of_the_target_and_nothing_else(data: st.DataObject) -> None:
    source, expected = gathered()
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    memory = bytearray([_PATTERN]) * (stop - start + 128)
    source.fill(start, memoryview(memory)[64 : 64 + stop - start])
    assert memory[64:-64] == expected[start:stop]
    assert memory[:64] == memory[-64:] == bytes([_PATTERN]) * 64


class Scribbling:
    """A source as hostile as it may be: all of its scratch is written over, its bytes are at the end of it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)
        self.payloads: Sequence[tuple[int, int]] = ()
        self.in_memory = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[int, int, memoryview], Sequence[memoryview]]]:
        def read(offset: int, size_bytes: int, scratch: memoryview) -> Sequence[memoryview]:
            head = size_bytes // 2
            scratch[:size_bytes] = bytes([_PATTERN]) * size_bytes
            scratch[head:size_bytes] = self._data[offset + head : offset + size_bytes]
            return [memoryview(self._data)[offset : offset + head], scratch[head:size_bytes]]

        yield read


@pytest.mark.parametrize("size_bytes", [3, 100_000, (17 << 20) + 3])
@pytest.mark.parametrize("place", ["disk", "memory", "node"])
def test_no_caller_takes_scratch_for_the_bytes(place: str, size_bytes: int, tmp_path: Path) -> None:
    data = random.Random(size_bytes).randbytes(size_bytes)
    if place == "node":
        with on_a_partner(tmp_path, b"") as partner:
            scratch = memoryview(bytearray(1 << 20))
            source = Scribbling(data)
            partner.client.write(partner.attempt, "g", source, scratch, given_up=NEVER, algorithm="crc32c")
            found = bytearray(size_bytes)
            partner.client.read_into(partner.attempt, "g", 0, [memoryview(found)])
    else:
        storage = MemoryStorage("memory://copies") if place == "memory" else LocalStorage(tmp_path)
        transfer = Transfer(storage, config=TransferConfig(), retry=RetryConfig())
        with closing(transfer):
            transfer.upload([PlannedFile("f", Scribbling(data)), PlannedFile("g", Scribbling(b"small"))])
        found = bytearray(storage.read("f"))
    assert found == data


def states() -> dict[str, Any]:
    """Large tensors as training has them, none of which is contiguous memory."""
    weights = torch.randn(256, 128, 3, 3).to(memory_format=torch.channels_last)
    return {
        "channels_last": weights,
        "transposed": torch.randn(700, 1000).t(),
        "expanded": torch.randn(1, 700).expand(1000, 700),
        "columns": torch.randn(1000, 2000)[:, :700],
        "conj": torch.randn(400, 400, dtype=torch.complex64).conj(),
        "neg": torch.randn(600, 600, dtype=torch.complex64).conj().imag,
        "bfloat16": torch.randn(1500, 1000).bfloat16().t(),
        "plain": torch.randn(1000, 700),
        "small": torch.randn(10, 10).t(),
    }


def scribbled(copied: Copied, offset: int, target: memoryview) -> None:
    _FILL(copied, offset, target)
    target[: len(target) // 4] = bytes(len(target) // 4)


_FILL = Copied.fill


@pytest.mark.parametrize("much", ["all", "sample"])
def test_a_copy_that_is_wrong_fails_the_save_by_key(
    much: str, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", much)
    store = open_store(store_root)
    store.save_async(1, states()).result()
    monkeypatch.setattr(Copied, "fill", scribbled)
    store.save_async(2, states())
    with pytest.raises(CkptstoreError, match=r"the copy of \w+ that was made for this save is not the tensor"):
        store.close()
    with open_store(store_root) as store:
        assert [checkpoint.step for checkpoint in store] == [1]


def test_small_tensors_of_every_file_are_compared(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that retention will drop have files of their own, and so a slab of their own."""
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", "all")
    policy = KeepLatest(2) | KeepWeights(KeepEvery(steps=1), drop="o*")
    state = {name: torch.arange(100) + ord(name) for name in "mo"}
    for name in state:

        def stage(staging: Staging, sources: Any, launched: Any, wanted: bytes = bytes(view_of(state[name]))) -> Any:
            copies = _STAGE(staging, sources, launched)
            for copy in copies:
                if (at := bytes(copy.views[0]).find(wanted)) >= 0:
                    copy.views[0][at] ^= 1
            return copies

        monkeypatch.setattr(Staging, "stage", stage)
        store = open_store(store_root, retention=policy)
        store.save_async(1, state)
        with pytest.raises(CkptstoreError, match=f"the copy of {name} "):
            store.close()


_STAGE = Staging.stage


@pytest.mark.parametrize("large", [True, False])
def test_every_tensor_has_its_turn(large: bool) -> None:
    tensors = [torch.arange(50.0) + number for number in range(30)]
    placed = [
        Placed(f"t{number}", whole((50,)), 200 * number, 200 << 20, tensor) for number, tensor in enumerate(tensors)
    ]
    copy = bytearray(b"".join(bytes(view_of(tensor)) for tensor in tensors))
    copy[200 * 17 : 200 * 18] = bytes(200)
    of_files = [(0, one) for one in placed] if large else []
    checks = [CopyCheck(of_files, [] if large else [(0, placed)], turn=turn, every=False) for turn in range(10)]
    refused = [check for check in checks if any(one.key == "t17" for _, one, _, _ in check.samples)]
    assert refused
    for check in checks:
        with pytest.raises(CkptstoreError, match="t17") if check in refused else contextlib.nullcontext():
            check.compare([memoryview(copy)])


def test_a_staged_file_is_the_file(tmp_path: Path) -> None:
    source, expected = gathered()
    staging = Staging(num_threads=2, device=device)
    (copy,) = staging.stage([source], device.LaunchedWork(()))
    assert copy.views[0] == expected
    del copy
    staging.close()
