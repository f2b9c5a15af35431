"""Count the host memory that this process has locked through CUDA: by ckptstore, and by torch's stager."""

from __future__ import annotations

from functools import cache
from typing import Any


class LockedMemory:
    """Wraps the two functions of CUDA that lock and unlock memory, called by ckptstore and torch's stager.

    torch's own `pin_memory` of tensors does not use them, and is not counted.
    """

    def __init__(self, cudart: Any) -> None:
        self._sizes_bytes: dict[int, int] = {}
        register, unregister = cudart.cudaHostRegister, cudart.cudaHostUnregister

        def counted_register(address: int, size_bytes: int, flags: int) -> Any:
            found = register(address, size_bytes, flags)
            if int(found) == 0:
                self._sizes_bytes[address] = size_bytes
            return found

        def counted_unregister(address: int) -> Any:
            found = unregister(address)
            if int(found) == 0:
                self._sizes_bytes.pop(address, None)
            return found

        cudart.cudaHostRegister, cudart.cudaHostUnregister = counted_register, counted_unregister

    @property
    def size_bytes(self) -> int:
        """The bytes locked now."""
        return sum([*self._sizes_bytes.values()])


@cache
def locked_memory() -> LockedMemory:
    """Return the counter of this process, which counts from the first call on. Needs CUDA."""
    import torch

    cuda: Any = torch.cuda
    return LockedMemory(cuda.cudart())
