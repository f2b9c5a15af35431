"""The first `save_async` of a store, and its memory: nothing is reused from turn to turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil
import torch

from ckptstore.tools.bench.gpu.device_peers import DefaultStaged
from ckptstore.tools.bench.peers.base import Contender, Wait
from ckptstore.tools.bench.peers.own import Ckptstore

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
