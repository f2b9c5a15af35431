"""Large plain values as columns of numbers and text, in place of JSON (format-v1, "Packed values").

A value is laid out level by level: the value itself, then its items, then their items. The items of a level are sorted
into one column for each kind. So no item is handled alone, equal values have equal bytes on all ranks, and a reader of
the bytes creates only objects of the named kinds.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, islice, pairwise
from typing import Any

MAX_LEVELS = 200
"""Values nested deeper than this are not packed. Recursive functions walk over what was unpacked, and have a limit."""

_NONE = type(None)
CONTAINERS = frozenset({list, tuple, dict})
"""The containers that can be packed with their items, unless an item is of another type."""
_NAMED = (bool, int, float, str, bytes, list, tuple, dict)
_KINDS: Mapping[type, str] = {_NONE: "none", **{kind: kind.__name__ for kind in _NAMED}}
_PLAIN = frozenset(_KINDS)
_SIGNED, _UNSIGNED = {1: "b", 2: "h", 4: "i", 8: "q"}, {1: "B", 2: "H", 4: "I", 8: "Q"}
_SHORT = 32
_BOOLS = (False, True)
_LITTLE = sys.byteorder == "little"

Levels = list[list[list[Any]]]
"""The columns of each level: the kind, the number of items, and the layout of each column."""


def plain_size(value: Any) -> int | None:
    """Return the number of items in a list, tuple or dict, at all levels, if each is exactly of a type that can be
    packed. Keys of a dict are items too.

    Return None for anything else, and for a value that is nested deeper than `MAX_LEVELS` or contains itself.
    """
    if type(value) not in CONTAINERS:
        return None
    level, size = [value], -1
    for _ in range(MAX_LEVELS):
        kinds = set(map(type, level))
        if not kinds <= _PLAIN:
            return None
        size += len(level)
        if kinds.isdisjoint(CONTAINERS):
            return size
        level = _below(_sorted(level, _codes(level, kinds), kinds & CONTAINERS))
    return None


def is_plain(value: Any) -> bool:
    """Return True if a long container holds only types that can be packed, so that nothing can be found in it. False
    for short ones, which are walked over as fast."""
    return type(value) in CONTAINERS and len(value) > _SHORT and plain_size(value) is not None


def pack(value: Any) -> tuple[Levels, bytearray] | None:
    """Return the layout and the bytes of a list, tuple or dict; None if `plain_size` returns None."""
    levels: Levels = []
    data = bytearray()
    level = [value]
    while level:
        kinds = set(map(type, level))
        if not kinds <= _PLAIN or len(levels) == MAX_LEVELS:
            return None
        codes = _codes(level, kinds)
        data += codes
        columns = _sorted(level, codes, kinds)
        levels.append([_packed_column(kind, items, data) for kind, items in columns.items()])
        level = _below(columns)
    return levels, data


def unpack(levels: Any, data: bytes) -> Any:
    """Return the value, from the output of `pack`, in time and memory that grow with the number of bytes.

    Raises ValueError, TypeError, KeyError or IndexError for anything that `pack` does not write.
    """
    if len(levels) > MAX_LEVELS:
        raise ValueError(f"{len(levels)} levels")
    source = _Bytes(data)
    columns: list[tuple[bytes, list[tuple[str, Sequence[Any]]]]] = []
    count = 1
    for layout in levels:
        kinds, counts = [column[0] for column in layout], [_size(column[1]) for column in layout]
        if sum(counts) != count or not all(counts):
            raise ValueError(f"a level that has not {count} items")
        if kinds != [kind for kind in _UNPACKED if kind in kinds]:
            raise ValueError("columns in another order")
        codes = source.take(count) if len(kinds) > 1 or kinds == ["none"] else b""
        if codes and [codes.count(code) for code in range(len(kinds))] != counts:
            raise ValueError("codes that do not fit the columns")
        columns.append((codes, [(kind, _UNPACKED[kind](source, *form)) for kind, *form in layout]))
        lengths = {kind: sum(column) for kind, column in columns[-1][1] if kind in ("list", "tuple", "dict")}
        count = sum(lengths.values()) + lengths.get("dict", 0)
    if count or source.left or not columns:
        raise ValueError("another number of items than the levels have")
    below: list[Any] = []
    for codes, found in reversed(columns):
        below = _merged(codes, _containers(found, below))
    (value,) = below
    return value


def _codes(level: list[Any], kinds: set[type]) -> bytes:
    """Return the number of the column of each item. Empty if there is one column, unless it is of None, which has no
    bytes."""
    present = [kind for kind in _KINDS if kind in kinds]
    if len(present) == 1 and present != [_NONE]:
        return b""
    codes = {kind: code for code, kind in enumerate(present)}
    return bytes(map(codes.__getitem__, map(type, level)))


def _sorted(level: list[Any], codes: bytes, kinds: set[type]) -> dict[type, list[Any]]:
    """Return the items of some kinds of a level."""
    if not codes:
        return dict.fromkeys(kinds, level)
    present = {type(level[codes.index(code)]): code for code in sorted(set(codes))}
    return {
        kind: list(compress(level, codes.translate(bytes(other == code for other in range(256)))))
        for kind, code in present.items()
        if kind in kinds
    }


def _below(columns: Mapping[type, list[Any]]) -> list[Any]:
    """Return the items of the next level: those of lists, those of tuples, the keys of dicts, the values of dicts."""
    items = (chain.from_iterable(columns.get(kind, ())) for kind in (list, tuple, dict))
    return list(chain(*items, chain.from_iterable(map(dict.values, columns.get(dict, ())))))


def _packed_column(kind: type, items: list[Any], data: bytearray) -> list[Any]:
    """Return the layout of a column, and add its bytes to `data`."""
    form: list[Any] = [_KINDS[kind], len(items)]
    if kind is bool:
        data += bytes(items)
    elif kind is int:
        low, high = min(items), max(items)
        width = next((width for width in _SIGNED if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1), 0)
        form.append(width)
        if width:
            data += _bytes_of(array(_SIGNED[width], items))
        else:
            form += _packed_texts(list(map(hex, items)), data)
    elif kind is float:
        data += _bytes_of(array("d", items))
    elif kind in (str, bytes):
        form += _packed_texts(items, data)
    elif kind in CONTAINERS:
        form.append(_packed_lengths(list(map(len, items)), data))
    return form


def _packed_texts(items: Sequence[str] | Sequence[bytes], data: bytearray) -> list[int]:
    """Add text or bytes to `data`, each once if at most half of them differ. Return the numbers of their layout."""
    places = {item: place for place, item in enumerate(dict.fromkeys(items))}
    width, distinct = 0, len(items)
    if 2 * len(places) <= len(items):
        width, distinct = _packed_lengths(list(map(places.__getitem__, items)), data), len(places)
        items = list(places)  # type: ignore[assignment]  # of the same type
    lengths = _packed_lengths(list(map(len, items)), data)
    first = items[0]
    joined = b"".join(items) if isinstance(first, bytes) else "".join(items).encode("utf-8", "surrogatepass")  # type: ignore[arg-type]
    data += joined
    return [distinct, width, lengths, len(joined)]


def _packed_lengths(numbers: list[int], data: bytearray) -> int:
    """Add numbers from 0 on to `data`. Return the bytes that each takes."""
    high = max(numbers)
    width = next(width for width in _UNSIGNED if high < 1 << 8 * width)
    data += _bytes_of(array(_UNSIGNED[width], numbers))
    return width


def _bytes_of(numbers: array[Any]) -> bytes:
    if not _LITTLE:
        numbers.byteswap()
    return numbers.tobytes()


def _size(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} where a number of items or bytes belongs")
    return number


class _Bytes:
    """The bytes of a packed value, taken from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """The number of bytes that have not been taken."""
        return len(self._data) - self._at

    def take(self, size_bytes: int) -> bytes:
        """Return the next bytes. Raises ValueError if there are not as many."""
        if _size(size_bytes) > self.left:
            raise ValueError(f"{size_bytes} bytes where {self.left} are left")
        self._at += size_bytes
        return self._data[self._at - size_bytes : self._at]

    def numbers(self, typecode: str, count: int) -> list[Any]:
        """Return the next numbers."""
        found = array(typecode)
        found.frombytes(self.take(_size(count) * found.itemsize))
        if not _LITTLE:
            found.byteswap()
        return found.tolist()


def _ints(source: _Bytes, count: int, width: int, *form: int) -> list[int]:
    if width:
        return source.numbers(_SIGNED[width], count)
    return [int(text, 16) for text in _texts(source, count, *form)]


def _texts(source: _Bytes, *form: int) -> list[str]:
    return _spread(source, *form, read=lambda data: str(data, "utf-8", "surrogatepass"))


def _spread(
    source: _Bytes,
    count: int,
    distinct: int,
    width: int,
    lengths: int,
    size_bytes: int,
    *,
    read: Callable[[bytes], Any],
) -> list[Any]:
    """Return the texts or byte strings of a column; `read` makes one text of the bytes of all."""
    places = source.numbers(_UNSIGNED[width], count) if width else None
    ends = [0, *accumulate(source.numbers(_UNSIGNED[lengths], distinct))]
    whole = read(source.take(size_bytes))
    if ends[-1] != len(whole) or (places is None and distinct != count):
        raise ValueError("text of another length")
    items = [whole[start:end] for start, end in pairwise(ends)]
    return items if places is None else [items[place] for place in places]


_UNPACKED: Mapping[str, Callable[..., Sequence[Any]]] = {
    "none": lambda source, count: [None] * count,
    "bool": lambda source, count: [_BOOLS[byte] for byte in source.take(count)],
    "int": _ints,
    "float": lambda source, count: source.numbers("d", count),
    "str": _texts,
    "bytes": lambda source, *form: _spread(source, *form, read=bytes),
    **dict.fromkeys(("list", "tuple", "dict"), lambda source, count, width: source.numbers(_UNSIGNED[width], count)),
}


def _containers(columns: Iterable[tuple[str, Sequence[Any]]], below: list[Any]) -> list[Sequence[Any]]:
    """Return the columns with the containers of a level in the place of their lengths, filled with the items below."""
    lengths = dict(columns)
    items = iter(below)
    lists = [list(islice(items, length)) for length in lengths.get("list", ())]
    tuples = _tuples(items, lengths.get("tuple", ()))
    of_dicts = lengths.get("dict", ())
    keys = iter(list(islice(items, sum(of_dicts))))
    dicts = [dict(zip(islice(keys, length), islice(items, length), strict=True)) for length in of_dicts]
    if sum(map(len, dicts)) != sum(of_dicts):
        raise ValueError("a dict that has a key twice")
    made: dict[str, Sequence[Any]] = {"list": lists, "tuple": tuples, "dict": dicts}
    return [made.get(kind, column) for kind, column in columns]


def _tuples(items: Iterator[Any], lengths: Sequence[int]) -> Sequence[tuple[Any, ...]]:
    if lengths and lengths[0] and min(lengths) == max(lengths):
        return list(islice(zip(*[items] * lengths[0], strict=False), len(lengths)))
    return [tuple(islice(items, length)) for length in lengths]


def _merged(codes: bytes, columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the items of a level in their order."""
    if len(columns) == 1:
        return list(columns[0])
    takes = [iter(column).__next__ for column in columns]
    return [takes[code]() for code in codes]
