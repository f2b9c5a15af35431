"""Contenders of a GPU: DCP with a pinned stager, loads onto the device, the bus, and the first save of a store."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import cache
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.figures.report import Role
from ckptstore.tools.bench.peers.base import Contender, Settings, Wait, variant
from ckptstore.tools.bench.peers.dcp import AsyncDcp
from ckptstore.tools.bench.peers.files import Safetensors
from ckptstore.tools.bench.peers.limits import RawDiskLoad
from ckptstore.tools.bench.peers.own import Ckptstore
from ckptstore.tools.bench.raw import MIB, read_into

_BLOCK_BYTES = 16 * MIB
_PINNED_BEHIND = {"pinned": True, "behind": True}


class DefaultStaged(AsyncDcp):
    """`dcp.async_save` with torch's DefaultStager, which is reused from save to save.

    `pinned` memory is filled by copies that do not block, on a stream of their own if they are made `behind` the
    training. Then the state may change only when they have ended. Without both it is the stager that `async_save`
    creates itself.
    """

    needs = ("disk", "it writes to paths")
    _is_warm = False

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._group = dist.new_group(backend="gloo")  # the training uses the other one at the same time

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        if cls.kind is AsyncCheckpointerType.PROCESS:
            return [_PINNED_BEHIND]
        return [_PINNED_BEHIND, {"pinned": True, "behind": False}, {"pinned": False, "behind": False}]

    def prepare(self, place: str) -> None:
        """Allocate its memory before the clock runs, as `warm_up` does for ckptstore."""
        if not self._is_warm:
            staged = self.stager.stage(dict(self.case.state))
            if isinstance(staged, Future):
                staged.result()
            self._is_warm = True

    @property
    def group(self) -> Settings:
        return {"process_group": self._group}

    def close(self) -> None:
        super().close()
        dist.destroy_process_group(self._group)


DefaultStagedProcess = variant(DefaultStaged, name="dcp.async_save, process", kind=AsyncCheckpointerType.PROCESS)
"""`dcp.async_save` from a process of its own, through shared memory, as in torchtitan's `async_with_pinned_mem`."""


class SafetensorsToDevice(Safetensors):
    """`load_file` onto the device, with both of its backends."""

    tried = ({"backend": "mmap"}, {"backend": "pread"})

    def read(self, path: str) -> Any:
        from safetensors.torch import load_file

        return load_file(path, device=self.case.device, backend=self.settings["backend"])


class FastSafetensors(Safetensors):
    """fastsafetensors' file loader, by threads that read into pinned memory, or with GPUDirect Storage."""

    name = family = "fastsafetensors"
    modules = packages = ("fastsafetensors",)
    with_gds: ClassVar[bool] = False

    @classmethod
    def objection(cls, case: Case) -> str | None:
        lacks_cuda = cls.with_gds and not case.is_cuda
        return super().objection(case) or ("GPUDirect Storage needs CUDA" if lacks_cuda else None)

    def load(self, place: str) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        with closing(SafeTensorsFileLoader(SingleGroup(), self.case.device, nogds=not self.with_gds)) as loader:
            loader.add_filenames({0: [self.path(place)]})
            with closing(loader.copy_files_to_device()) as buffers:
                for name, tensor in self.case.local_target.items():
                    tensor.copy_(buffers.get_tensor(name))
                self.case.synchronize()


FastSafetensorsDirect = variant(FastSafetensors, name="fastsafetensors, GDS", with_gds=True)


class PinnedCopy(Contender):
    """One copy of the state from the device to existing pinned memory: no stall can be shorter. `one_buffer` is a
    single copy of as many bytes.
    """

    name, family = "pinned copy", "limit"
    role: ClassVar[Role] = "limit"
    tried = ({"one_buffer": True}, {"one_buffer": False})

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._tensors = list(case.local.values())
        if settings["one_buffer"]:
            self._tensors = [torch.ones(case.rank_bytes, dtype=torch.uint8, device=case.device)]
        self._hosts = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=case.is_cuda).zero_() for tensor in self._tensors
        ]

    def save(self, place: str) -> None:
        for host, tensor in zip(self._hosts, self._tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self.case.synchronize()

    def close(self) -> None:
        self._tensors, self._hosts = [], []


class RawToDevice(RawDiskLoad):
    """`preadv` into pinned memory, and a copy of each block to the device as soon as it is read; nothing is checked."""

    name = "raw disk to device"
    tried_in_load = tuple({"threads": count} for count in (1, 2, 4, 8) if count <= max(2, os.cpu_count() or 1))

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self._host = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=self.case.is_cuda).zero_()
        self._device = torch.zeros(self.size_bytes, dtype=torch.uint8, device=self.case.device)

    def load(self, place: str) -> None:
        host: Any = self._host.numpy()

        def to_device(start: int, end: int) -> None:
            self.case.enter_thread()
            self._device[start:end].copy_(self._host[start:end], non_blocking=True)

        paths, num_threads = sorted(self.directory(place).iterdir()), self.settings["threads"]
        read_into(memoryview(host), paths, num_threads=num_threads, block_bytes=_BLOCK_BYTES, then=to_device)
        self.case.synchronize()


_RESUMED, _SAVED = 0, 1
_STILL_SECONDS, _MOST_SECONDS = 0.3, 600.0


def watch_locked(cudart: Any) -> dict[int, int]:
    """Wrap the two functions of CUDA that lock and unlock memory, which ckptstore and torch's stager call; return the
    bytes that are locked, by address, which go on changing.

    torch's own `pin_memory` of tensors does not use them, and is not counted.
    """
    sizes_bytes: dict[int, int] = {}
    register, unregister = cudart.cudaHostRegister, cudart.cudaHostUnregister

    def counted_register(address: int, size_bytes: int, flags: int) -> Any:
        found = register(address, size_bytes, flags)
        if int(found) == 0:
            sizes_bytes[address] = size_bytes
        return found

    def counted_unregister(address: int) -> Any:
        found = unregister(address)
        if int(found) == 0:
            sizes_bytes.pop(address, None)
        return found

    cudart.cudaHostRegister, cudart.cudaHostUnregister = counted_register, counted_unregister
    return sizes_bytes


@cache
def _locked() -> dict[int, int]:
    """Return what this process locks from the first call on. Needs CUDA."""
    cuda: Any = torch.cuda
    return watch_locked(cuda.cudart())


def footprint(contender: Contender) -> Callable[[str], None]:
    """Return a function that records the memory that was added to this process since now, under names with its suffix.

    Locked memory is part of the resident memory.
    """

    def now() -> dict[str, int]:
        gc.collect()
        locked = {"locked": sum([*_locked().values()])} if contender.case.is_cuda else {}
        return {"resident": psutil.Process().memory_info().rss, **locked}

    def note(suffix: str) -> None:
        for name, size_bytes in now().items():
            contender.note(f"{name}_bytes{suffix}", size_bytes - before[name])

    before = now()
    return note


class FirstSave(Ckptstore):
    """A store that is new and has its claim, with nothing prepared."""

    def prepare(self, place: str) -> None:
        self._note = footprint(self)
        super().prepare(place)

    def save(self, place: str) -> Wait | None:
        return self.store.save_async(_SAVED, self.case.state).result

    def after(self, place: str) -> None:
        self._note("")
        self.close()
        self._note("_after_close")


class FirstSaveWarmed(FirstSave):
    """The first save after `warm_up`."""

    name = "ckptstore, after warm_up"

    def prepare(self, place: str) -> None:
        super().prepare(place)
        self.store.warm_up(self.case.state)


class FirstSaveResumed(FirstSave):
    """The first save of a resumed job, once it has prepared its memory in the background."""

    name = "ckptstore, after resume"

    def prepare(self, place: str) -> None:
        with self.opened(place) as store:
            store.save(_RESUMED, self.case.state)
        self._note = footprint(self)
        self._store = self.opened(place)
        self.store.resume(self.case.state)
        process, end, before = psutil.Process(), time.monotonic() + _MOST_SECONDS, -1
        while (now := process.memory_info().rss) != before and time.monotonic() < end:  # it allocates memory
            before = now
            time.sleep(_STILL_SECONDS)


class FirstDefaultStaged(DefaultStaged):
    """`dcp.async_save` with a stager that is new."""

    def prepare(self, place: str) -> None:
        self._note = footprint(self)

    def after(self, place: str) -> None:
        self._note("")
        self.stager.close()
        self.stager = self.new_stager()  # the old one holds its last copy as long as it lives
        self._note("_after_close")
