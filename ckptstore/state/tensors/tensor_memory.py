"""The memory of a tensor: a check that its numbers lie there as they are stored, a view of them, and 128 bits of them,
by a hash in host memory or by integer arithmetic on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import sched_getaffinity

import torch
from torch.nn.parameter import is_lazy

from ckptstore.errors import InvalidState
from ckptstore.format.digest import fingerprint, fingerprinter
from ckptstore.runtime.parallel import mapped
from ckptstore.state.tensors.placement import PLAIN_TYPES, is_dtensor


@contextmanager
def outside_inference() -> Iterator[None]:
    """Make ordinary tensors, also if the caller is in inference mode; a decorator too. The recording of gradients stays
    on or off as it is."""
    records_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records_gradients):
        yield


def obstacle_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor of this kind is neither stored nor loaded into, as words that follow "is", and what to do;
    None if it has its numbers in a dense array, or in other tensors that do. Look at the kind alone, not at shape or
    memory."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    if type(tensor) not in PLAIN_TYPES:
        if is_lazy(tensor):
            return ("lazy: it has no shape before its module is first called", "Call the module once before")
        if hasattr(tensor, "local_shards"):  # any other attribute of which raises
            return None
    if tensor.is_nested:
        return ("a nested tensor", "Use its values and offsets, or torch.nested.to_padded_tensor")
    if tensor.is_quantized:
        return ("a quantised tensor of torch.ao", "Use its int_repr(), scale and zero point, or a torchao tensor")
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return (f"a tensor with the layout {name}", "Use to_dense(), or the dense tensors that it is made of")
    return None


def check_memory(tensor: torch.Tensor, key: str) -> None:
    """Raise InvalidState unless a tensor that is read or written by its address has memory there for all its elements.

    Some subclasses keep their elements elsewhere, and a tensor may have had its memory taken away.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidState(f"{key} has the layout {tensor.layout}", hint="Store a dense tensor")
    if not tensor.numel():
        return
    try:
        last = sum([(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
        end_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
        has_memory = bool(tensor.data_ptr()) and tensor.untyped_storage().nbytes() >= end_bytes
    except (RuntimeError, NotImplementedError):  # torch says of some that they have no storage
        has_memory = False
    if has_memory:
        return
    if type(tensor) in PLAIN_TYPES:
        what = f"The memory of {key} has been given back, or is smaller than the tensor"
        raise InvalidState(what, hint="Do this while the whole tensor is there, for instance before it is offloaded")
    raise InvalidState(
        f"{key} is a {type(tensor).__name__} that has no memory of its own for its numbers",
        hint="Store the tensors that have them, or give the class __tensor_flatten__",
    )


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True if the bytes of a tensor lie in this process's memory, one after another, as they are to be
    stored."""
    if type(tensor) not in PLAIN_TYPES and not tensor.data_ptr():
        return False  # a subclass that keeps them elsewhere
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def address_of(tensor: torch.Tensor, size_bytes: int) -> int:
    """Return the address at which the memory of a tensor of `size_bytes` begins, for which `is_plain_memory` holds.
    Raises InvalidState when the memory has been freed."""
    address = tensor.data_ptr()
    end_bytes = tensor.storage_offset() * tensor.element_size() + size_bytes
    if not address or end_bytes > tensor.untyped_storage().nbytes():
        raise InvalidState("a tensor's memory has been given back, or is smaller than the tensor")
    return address


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_plain_memory` holds. It does not keep the tensor alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(address_of(tensor, size_bytes))).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as one row: its own memory if they lie there in one row, else a copy."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous with any stride


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of any small tensor: its memory, or a copy of it."""
    if is_plain_memory(tensor):
        return view_of(tensor)
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().data


def digest_of(tensor: torch.Tensor) -> str:
    """Return the fingerprint of a tensor's dtype, shape and bytes, as they are stored."""
    hasher = fingerprinter(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    hasher.update(bytes_of(tensor))
    return hasher.hexdigest()


_PIECE_BYTES = 16 << 20
"""The most bytes that a pass over a tensor that is strided or on a device copies, or calculates with, at a time."""
_IN_THREAD_BYTES = 1 << 20
"""The size below which a thread costs more than it saves."""
_MAX_THREADS = 4
"""The most threads: more do not read memory faster, and the ranks of a node share its cores."""
_WORD_BYTES = 8
_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, -0x00AE502812AA7333, -0x3B314601E57A13AD
"""The odd numbers that splitmix64 and murmur3 multiply by, as signed."""


def digest_of_host(tensor: torch.Tensor) -> bytes:
    """Return the fingerprint of a tensor's bytes in the order of its elements, on any device; 16 bytes.

    A strided tensor, and one on a device, is copied 16 MiB at a time.
    """
    if is_plain_memory(tensor):
        return fingerprint(bytes_of(tensor))
    hasher = fingerprinter()
    for piece in _pieces(tensor.detach()):
        hasher.update(bytes_of(piece))
    return hasher.digest()


def fingerprints_of(tensors: Mapping[str, tuple[torch.Tensor, ...]]) -> dict[str, bytes]:
    """Return for each key the fingerprint of its tensors, which lie in host memory or on one device; 16 bytes.

    Equal bytes have equal fingerprints, however they are strided. Different bytes have different ones but for one case
    in about 2**64, and always if only one word of 8 bytes differs. Fingerprints made by the host and by a device cannot
    be compared.
    """
    parts = {(key, number): part for key, held in tensors.items() for number, part in enumerate(held)}
    found: dict[tuple[str, int], bytes] = {}
    on_device: dict[torch.device, dict[tuple[str, int], torch.Tensor]] = {}
    large = []
    for place, part in parts.items():
        if not part.is_cpu:
            try:
                on_device.setdefault(part.device, {})[place] = fingerprint_on_device(part)
                continue
            except (NotImplementedError, torch.OutOfMemoryError):  # the host can do it too, only more slowly
                pass
        elif part.numel() * part.element_size() >= _IN_THREAD_BYTES:
            large.append(place)
            continue
        found[place] = digest_of_host(part)
    if large:
        num_threads = min(_MAX_THREADS, len(sched_getaffinity(0)))
        digests = mapped(
            lambda place: digest_of_host(parts[place]), large, num_threads=num_threads, name="ckptstore-digest"
        )
        found.update(zip(large, digests, strict=True))
    for results in on_device.values():
        rows = torch.stack(list(results.values())).cpu().numpy()
        found.update((place, row.tobytes()) for place, row in zip(results, rows, strict=True))
    return {
        key: found[key, 0] if len(held) == 1 else fingerprint(b"".join(found[key, n] for n in range(len(held))))
        for key, held in tensors.items()
    }


@torch.no_grad()
def fingerprint_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return two 64-bit sums over the words of a tensor's bytes, as int64 of shape (2,) on its device.

    Each word is mixed with its place, one to one, so that the change of a single word always shows in the first sum.
    The second one counts each word by its place. All arithmetic is modulo 2**64, so no order of adding matters. Takes
    64 MiB of the device's memory beside the tensor, and does not wait for the device.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = 0
    for piece in _pieces(tensor.detach()):
        words = _words_of(piece)
        places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=tensor.device)
        mixed = (places * _PLACE).add_(words)
        for shift, factor in ((33, _FIRST), (33, _SECOND)):
            mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(factor)
        mixed.bitwise_xor_(_shifted(mixed, 33))
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(places.mul_(2).add_(1)).sum()
        first += words.numel()
    return sums


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right with zeros; torch shifts the sign in."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _words_of(piece: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as int64, with zeros at the end."""
    plain = as_bytes(piece)
    missing = -plain.numel() % _WORD_BYTES
    if missing or plain.storage_offset() % _WORD_BYTES:
        padded = torch.zeros(plain.numel() + missing, dtype=torch.uint8, device=plain.device)
        padded[: plain.numel()] = plain
        plain = padded
    return plain.view(torch.int64)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor in parts of at most 16 MiB, in the order of its elements. The cuts follow from its shape and
    dtype alone."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes <= _PIECE_BYTES:
        if size_bytes:
            yield tensor
        return
    rows = _PIECE_BYTES * len(tensor) // size_bytes
    if rows == 0:
        for row in tensor:
            yield from _pieces(row)
        return
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]
