"""Sequences and sets of numbers in the log: arithmetic runs as short text ("3-40 50-500/10"). Pure.

Retention keeps "every tenth" and "the last five", a history without retention keeps everything between two claims: such
sets are a few runs however many numbers they hold. A long irregular sequence is packed instead: its differences,
zigzag varints, deflated, in base64, after a "z".
"""

from __future__ import annotations

import base64
import binascii
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, chain
from typing import Any, NamedTuple

_PACK_ABOVE_CHARS = 256
MAX_LISTED = 1 << 20
"""The most numbers in a sequence, and in a set except that of the live checkpoints: a few characters can stand for
billions of numbers."""


class Progression(NamedTuple):
    """`length` numbers from `first` on, each `stride` above the one before; the stride may be 0 or negative."""

    first: int
    length: int
    stride: int

    @property
    def last(self) -> int:
        """The last number of the run."""
        return self.first + (self.length - 1) * self.stride

    @property
    def reversed(self) -> Progression:
        """The same numbers from the last to the first."""
        return Progression(self.last, self.length, -self.stride)

    def __str__(self) -> str:
        if self.length == 1:
            return str(self.first)
        if self.stride == 0:
            return f"{self.first}*{self.length}"
        text = f"{self.first}-{self.last}"
        return text if abs(self.stride) == 1 else f"{text}/{abs(self.stride)}"

    @staticmethod
    def parse(text: str) -> Progression:
        """Return the run that a text stands for; raise ValueError if it is not one."""
        first, star, count = text.partition("*")
        if star:
            if not _digits(count):
                raise ValueError(f"{text!r} is not a range")
            return Progression(_digits(first), _digits(count), 0)
        span, slash, step = text.partition("/")
        first, dash, last = span.partition("-")
        if not dash:
            return Progression(_digits(text), 1, 1)
        distance, stride = _digits(last) - _digits(first), _digits(step) if slash else 1
        if stride == 0 or distance == 0 or distance % stride:
            raise ValueError(f"{text!r} is not a range")
        return Progression(_digits(first), abs(distance) // stride + 1, stride if distance > 0 else -stride)


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def find_runs(numbers: Sequence[int]) -> list[Progression]:
    """Split the sequence into runs, in the one canonical way: from the left, runs of one number or at least three."""
    runs: list[Progression] = []
    start = 0
    while start < len(numbers):
        end = start + 1
        if start + 2 < len(numbers):
            stride = numbers[start + 1] - numbers[start]
            while end < len(numbers) and numbers[end] - numbers[end - 1] == stride:
                end += 1
        if end - start < 3:
            end, stride = start + 1, 1
        runs.append(Progression(numbers[start], end - start, stride))
        start = end
    return runs


def _expand(runs: Iterable[Progression]) -> Iterator[int]:
    return chain.from_iterable(
        range(run.first, run.first + run.length * run.stride, run.stride) if run.stride else [run.first] * run.length
        for run in runs
    )


def _encode_runs(runs: Sequence[Progression]) -> str:
    text = " ".join(map(str, runs))
    if len(text) <= _PACK_ABOVE_CHARS:
        return text
    packed = _pack(_expand(runs))
    return packed if len(packed) < len(text) else text


def encode_sequence(numbers: Sequence[int]) -> str:
    """Return any sequence of numbers of at least 0 as text; the order and repetitions are kept."""
    return _encode_runs(find_runs(numbers))


def decode_sequence(text: str, *, limit: int) -> list[int]:
    """Return the sequence that `encode_sequence` wrote.

    Raises ValueError if the text is not one, has a number above `limit`, more than `limit` numbers, or more than
    `MAX_LISTED`: so a torn or hostile text costs no more memory than an honest one.
    """
    return list(_expand(_check_listed(_decode_runs(text, limit))))


def _check_listed(runs: list[Progression]) -> list[Progression]:
    if sum(run.length for run in runs) > MAX_LISTED:
        raise ValueError(f"there are more than {MAX_LISTED} numbers")
    return runs


def _decode_runs(text: str, limit: int) -> list[Progression]:
    if text == "":
        return []
    if text.startswith("z"):
        return find_runs(_unpack(text, limit))
    runs = [Progression.parse(part) for part in text.split(" ")]
    if sum(run.length for run in runs) > limit or any(max(run.first, run.last) > limit for run in runs):
        raise ValueError(f"there are more numbers than {limit}, or higher ones")
    return runs


def _pack(numbers: Iterable[int]) -> str:
    out = bytearray()
    previous = 0
    for number in numbers:
        difference = number - previous
        previous = number
        rest = 2 * difference if difference >= 0 else -2 * difference - 1
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return "z" + base64.b64encode(zlib.compress(bytes(out), 9)).decode()


def _unpack(text: str, limit: int) -> list[int]:
    limit_bytes = 5 * min(limit, MAX_LISTED) + 1
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text[1:], validate=True), limit_bytes)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"packed numbers cannot be unpacked: {error}") from None
    differences, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            differences.append(-(value + 1) // 2 if value & 1 else value // 2)
            value = shift = 0
    numbers = list(accumulate(differences))
    if not inflate.eof or shift or len(numbers) > limit or any(not 0 <= number <= limit for number in numbers):
        raise ValueError("packed numbers are cut off, too many or too high")
    return numbers


class Numbers(Set[int]):
    """An immutable set of numbers of at least 0, iterated in order; its size in memory is that of its runs.

    It compares equal to any set with the same numbers.
    """

    __slots__ = ("_firsts", "_runs")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._set(find_runs(sorted(set(numbers))))

    def _set(self, runs: Sequence[Progression]) -> None:
        self._runs = tuple(runs)
        self._firsts = [run.first for run in runs]

    @classmethod
    def _of(cls, runs: Sequence[Progression]) -> Numbers:
        numbers = cls.__new__(cls)
        numbers._set(runs)
        return numbers

    def __contains__(self, number: Any) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return (
            at >= 0 and number <= self._runs[at].last and (number - self._runs[at].first) % self._runs[at].stride == 0
        )

    def __iter__(self) -> Iterator[int]:
        return iter(_expand(self._runs))

    def __reversed__(self) -> Iterator[int]:
        return _expand(run.reversed for run in reversed(self._runs))

    def __len__(self) -> int:
        return sum(run.length for run in self._runs)

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"Numbers({str(self)!r})"

    def __str__(self) -> str:
        return " ".join(map(str, self._runs))

    @property
    def highest(self) -> int | None:
        """The highest number, None if there is none."""
        return self._runs[-1].last if self._runs else None

    def with_number(self, number: int) -> Numbers:
        """Return the set with one more number; fast if it is the highest."""
        if self._runs and number <= self._runs[-1].last:
            return Numbers([*self, number])
        runs = list(self._runs)
        tail = [number]
        if runs and runs[-1].length > 1 and runs[-1].last + runs[-1].stride == number:
            return Numbers._of([*runs[:-1], runs[-1]._replace(length=runs[-1].length + 1)])
        while runs and runs[-1].length == 1 and len(tail) < 3:
            tail.insert(0, runs.pop().first)
        return Numbers._of([*runs, *find_runs(tail)])

    def without(self, numbers: Iterable[int]) -> Numbers:
        """Return the set without these numbers; those that are not in it are no error."""
        gone = set(numbers)
        return Numbers(number for number in self if number not in gone) if gone else self

    def encode(self) -> str:
        """Return the set as text."""
        return _encode_runs(self._runs)

    @staticmethod
    def decode(text: str, *, limit: int) -> Numbers:
        """Return the set that `encode` wrote; raise ValueError if it is not one, or has a number above `limit`."""
        runs = _decode_runs(text, limit)
        ends = [-1, *(run.last for run in runs)]
        if any(run.stride <= 0 or run.first <= end for run, end in zip(runs, ends, strict=False)):
            raise ValueError("the numbers are not in ascending order")
        return Numbers._of(runs)
