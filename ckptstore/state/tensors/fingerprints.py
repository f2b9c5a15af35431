"""128 bits of a tensor's bytes: by a hash in host memory, by integer arithmetic on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import sched_getaffinity

import torch

from ckptstore.format.digest import fingerprint, fingerprinter
from ckptstore.runtime.parallel import mapped
from ckptstore.state.tensors.segments import as_bytes
from ckptstore.state.tensors.tensor_memory import bytes_of, is_plain_memory

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
