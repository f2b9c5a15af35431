"""Plain values as JSON, and back, with exact types and order. Nothing is executed while decoding.

Types that JSON lacks are `{"$t": kind, "v": ...}` (format-v1, "Plain values"). Long byte strings, long lists of
numbers, arrays and tensors travel beside the JSON, as tensors; the JSON refers to them by key. A list, tuple or dict of
very many plain values is packed into one byte string. torch and numpy are recognised without importing them.

Shared references are not preserved: a list that is reached twice comes back as two equal lists. Cycles are refused.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any

from ckptstore.errors import CheckpointDamaged, InvalidState
from ckptstore.format.encoding import as_list, as_text, float_name, parse_json, shortened
from ckptstore.runtime.collector import collector_paused
from ckptstore.runtime.torch_private import metadata_of, set_metadata
from ckptstore.state.index.packed_values import CONTAINERS, pack, plain_size, unpack
from ckptstore.state.index.tagged_scalars import DECODED, ENCODED
from ckptstore.state.tensors.wrapped import Label, Wrapped, WrappedPart

INLINE_BYTES = 64 << 10
"""Byte strings and arrays above this travel as tensors."""
MAX_DEPTH = 100
"""The most containers in each other: a load takes several times the stack of a save, and may begin deeper in it."""
INLINE_ITEMS = 1000
"""Containers of plain values with more items than this, at all levels together, are packed; lists of numbers travel as
tensors."""

_TAG = "$t"
_METADATA = "metadata"
"""The field beside the content of a state dict that a module made, for the metadata of the module."""
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_INT64 = range(-(1 << 63), 1 << 63)
_FACTORIES: Mapping[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, bool, bytes, tuple)}
_ARRAY_KINDS = frozenset("biufcmMSU")
ATOMS = frozenset({int, float, str, bool, type(None), bytes, complex})
"""Types of items of long lists, in which nothing can be found."""

Store = Callable[[Any], str]
"""The function that keeps a tensor or array beside the JSON and returns its key."""
Fetch = Callable[[str], Any]
"""The function that returns the content of a key: an array for those that `Encoder` made itself, a tensor for the
caller's tensors."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes that a planner of DCP produced for a value, and that only the planner can read."""

    data: bytes


class Encoder:
    """Turns values into input of `json.dumps`.

    `store` keeps values that travel as tensors: it receives a torch tensor of the caller, or a one-dimensional numpy
    array of uint8, int64 or float64.
    """

    def __init__(self, store: Store, *, allow_pickle: bool = False) -> None:
        self._store = store
        self._allow_pickle = allow_pickle
        self._open: set[int] = set()
        self._is_small = False
        """True while the values that are encoded are in a container that has too few items to be packed."""

    def encode(self, value: Any, *, path: str) -> Any:
        """Return the JSON value. Raises InvalidState, with the path, for a value that cannot come back exactly."""
        try:
            return self._encode(value, path)
        except RecursionError:
            raise InvalidState(f"{path} is nested too deeply") from None

    def _encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return (
                value
                if _is_json(value)
                else _tagged("text", self._encode_bytes(value.encode("utf-8", "surrogatepass")))
            )
        if kind is int:
            return value if value in _INT64 else _tagged("int", hex(value))
        if kind is float:
            return value if value - value == 0.0 else _tagged("float", float_name(value))
        if kind in _CONTAINERS:
            if kind in CONTAINERS and not self._is_small and _may_be_large(value):
                return self._encode_plain(kind, value, path)
            return self._encode_container(kind, value, path)
        simple = ENCODED.get(kind)
        if simple is not None:
            try:
                return _tagged(*simple(value))
            except ValueError as error:
                return self._pickled(value, path, f": {error}")
        if kind is bytes or kind is bytearray:
            return _tagged(kind.__name__, self._encode_bytes(value))
        if kind is BytesIO and not value.closed and not vars(value):
            return _tagged("BytesIO", [self._encode_bytes(value.getvalue()), value.tell()])
        foreign = self._encode_foreign(value)
        return self._pickled(value, path) if foreign is None else foreign

    def _encode_plain(self, kind: type, value: Any, path: str) -> Any:
        size = len(value) if len(value) > INLINE_ITEMS else plain_size(value)
        if size is None:
            return self._encode_container(kind, value, path)
        if size > INLINE_ITEMS:
            packed = self._encode_numbers(kind, value) or self._packed(value)
            return self._encode_container(kind, value, path) if packed is None else packed
        self._is_small = True
        try:
            return self._encode_container(kind, value, path)
        finally:
            self._is_small = False

    def _encode_numbers(self, kind: type, value: Any) -> Any:
        """Encode a list or tuple of numbers of one kind; return None for any other value."""
        numbers = None if kind is dict else _numbers(value)
        if numbers is None:
            return None
        items = _tagged("floats" if numbers.dtype.kind == "f" else "ints", self._store(numbers))
        return items if kind is list else _tagged("tuple", items)

    def _packed(self, value: Any) -> Any:
        """Pack a list, tuple or dict of plain values; return None for any other value."""
        packed = pack(value)
        return None if packed is None else _tagged("packed", [packed[0], self._encode_bytes(packed[1])])

    def _encode_container(self, kind: type, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise InvalidState(f"{path} refers to itself")
        if len(self._open) == MAX_DEPTH:
            raise InvalidState(
                f"{shortened(path)} is nested too deeply", hint=f"Values are stored up to {MAX_DEPTH} levels deep"
            )
        self._open.add(id(value))
        try:
            if kind is dict:
                return self._encode_dict(value, path)
            if kind is Wrapped:
                return self._encode_wrapped(value, path)
            if kind is list or kind is tuple:
                items = [self._encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
                return items if kind is list else _tagged("tuple", items)
            if kind is set or kind is frozenset:
                return _tagged(kind.__name__, self._encode_members(value, path))
            if kind is slice:
                return _tagged("slice", [self._encode(bound, path) for bound in (value.start, value.stop, value.step)])
            pairs = self._encode_pairs(value, path)
            if (metadata := metadata_of(value)) is not None:
                noted = encode_metadata(metadata, path, allow_pickle=self._allow_pickle)
                return {**_tagged(kind.__name__, pairs), _METADATA: noted}
            if kind is not defaultdict:
                return _tagged(kind.__name__, pairs)
            factory = getattr(value.default_factory, "__name__", None)
            if value.default_factory is not None and _FACTORIES.get(str(factory)) is not value.default_factory:
                return self._pickled(value, path)
            return _tagged("defaultdict", [factory, pairs])
        finally:
            self._open.discard(id(value))

    def _encode_members(self, value: set[Any] | frozenset[Any], path: str) -> Any:
        """Encode the members in an order that does not depend on how the set was made."""
        in_order = _in_order(value) if len(value) > INLINE_ITEMS else None
        if in_order is not None:
            return self._encode(in_order, path)
        return sorted([self._encode(item, f"{path}{{}}") for item in value], key=json.dumps)

    def _encode_dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and _is_json(key) for key in value) and _TAG not in value:
            return {key: self._encode(item, f"{path}.{key}") for key, item in value.items()}
        return _tagged("dict", self._encode_pairs(value, path))

    def _encode_wrapped(self, value: Wrapped, path: str) -> Any:
        label = value.label
        return _tagged(
            "wrapper",
            {
                "class": label.kind,
                "context": label.context,
                "dtype": label.dtype,
                "shape": label.shape,
                "part": label.part,
                "tensors": [[name, self._encode(item, f"{path}.{name}")] for name, item in value.items()],
            },
        )

    def _encode_pairs(self, value: dict[Any, Any], path: str) -> Any:
        """Encode a list of pairs. Pack a large dict of a subclass as a plain one."""
        if type(value) is not dict and len(value) > INLINE_ITEMS and (packed := self._packed(dict(value))) is not None:
            return packed
        return [
            [self._encode(key, f"{path} key {key!r}"), self._encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]

    def _encode_bytes(self, value: bytes | bytearray | memoryview) -> Any:
        if len(value) <= INLINE_BYTES:
            return base64.b64encode(value).decode()
        import numpy

        return _tagged("tensor", self._store(numpy.frombuffer(value, numpy.uint8)))

    def _encode_foreign(self, value: Any) -> Any:
        """Return the JSON of a value of torch or numpy, None when it is not one that is known."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return _tagged("tensor", self._store(value))
            if isinstance(value, torch.Size):
                return _tagged("torch.Size", list(value))
            if isinstance(value, torch.dtype | torch.device):
                return _tagged(f"torch.{type(value).__name__}", str(value))
        if numpy is not None and isinstance(value, numpy.generic) and _storable(value.dtype):
            return _tagged("numpy", [value.dtype.str, base64.b64encode(value.tobytes()).decode()])
        if numpy is not None and type(value) is numpy.ndarray and _storable(value.dtype):
            data = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8) if value.size else b""
            return _tagged("ndarray", [value.dtype.str, list(value.shape), self._encode_bytes(memoryview(data))])
        return None

    def _pickled(self, value: Any, path: str, reason: str = "") -> Any:
        if not self._allow_pickle:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            if name == "numpy.ndarray":
                reason = f": its dtype is {value.dtype}"
            raise InvalidState(
                f"{path} is a {name}, which cannot be stored exactly{reason}",
                hint="Store what it is made of, or pass allow_pickle=True to save and again to load",
            )
        if type(value) is Frame:
            return _tagged("frame", self._encode_bytes(value.data))
        try:
            return _tagged("pickle", self._encode_bytes(pickle.dumps(value, protocol=4)))
        except Exception as error:  # a user's __reduce__ may raise anything
            raise InvalidState(f"{path} cannot be pickled: {error}") from error


class Decoder:
    """Turns JSON values back. `fetch` returns what `Encoder` kept beside them."""

    def __init__(self, fetch: Fetch, *, allow_pickle: bool = False) -> None:
        self._fetch = fetch
        self._allow_pickle = allow_pickle

    def decode(self, value: Any, *, path: str) -> Any:
        """Return the value. Raises CheckpointDamaged when the JSON is not in the form of `Encoder`, InvalidState for a
        pickle that was not allowed."""
        try:
            return self._decode(value)
        except InvalidState as error:
            raise InvalidState(f"{shortened(path)} {shortened(error.message)}", hint=error.hint) from None
        except Exception as error:  # constructors of torch, numpy and datetime each raise their own
            what = shortened(repr(error))
            raise CheckpointDamaged(f"the value of {shortened(path)} is not in the format: {what}") from None

    def _decode(self, value: Any) -> Any:
        if type(value) is list:
            return [self._decode(item) for item in value]
        if type(value) is not dict:
            return value
        if _TAG not in value:
            return {key: self._decode(item) for key, item in value.items()}
        kind, content = value[_TAG], value["v"]
        plain = DECODED.get(kind)
        made = _DECODE_NESTED[kind](self, content) if plain is None else plain(content)
        if _METADATA in value:
            content = parse_json(value[_METADATA])
            set_metadata(made, decode_metadata(content, path="a state dict", allow_pickle=self._allow_pickle))
        return made

    def _items(self, content: Any) -> list[Any]:
        items = self._decode(content)
        if type(items) is not list:
            raise TypeError(f"a {type(items).__name__} where a list belongs")
        return items

    def _pairs(self, content: Any) -> Iterable[tuple[Any, Any]]:
        if type(content) is dict:
            packed = self._decode(content)
            if type(packed) is not dict:
                raise TypeError(f"a {type(packed).__name__} where pairs belong")
            return packed.items()
        return ((self._decode(key), self._decode(item)) for key, item in content)

    def _bytes(self, content: Any) -> bytes:
        if type(content) is str:
            return base64.b64decode(content, validate=True)
        import numpy

        return numpy.asarray(self._fetch(_reference(content))).tobytes()

    def _bytes_io(self, content: Any) -> BytesIO:
        data, position = content
        made = BytesIO(self._bytes(data))
        made.seek(position)
        return made

    def _packed(self, content: Any) -> Any:
        levels, data = content
        with collector_paused():
            return unpack(levels, self._bytes(data))

    def _defaultdict(self, content: Any) -> defaultdict[Any, Any]:
        factory, pairs = content
        return defaultdict(None if factory is None else _FACTORIES[factory], self._pairs(pairs))

    def _wrapped(self, content: Any) -> Wrapped:
        part = content["part"]
        if part is not None:
            key, offsets, shape = part
            part = WrappedPart(key, tuple(offsets), tuple(shape))
        label = Label(content["class"], content["context"], content["dtype"], tuple(content["shape"]), part)
        return Wrapped(dict(self._pairs(content["tensors"])), label)

    def _scalar(self, content: Any) -> Any:
        dtype, data = content
        import numpy

        return numpy.frombuffer(base64.b64decode(data, validate=True), _numpy_dtype(dtype))[0]

    def _array(self, content: Any) -> Any:
        dtype, shape, data = content
        import numpy

        return numpy.frombuffer(bytearray(self._bytes(data)), _numpy_dtype(dtype)).reshape(shape)

    def _frame(self, content: Any) -> Frame:
        if not self._allow_pickle:
            raise InvalidState("is a frame of a planner, which may run code to read it", hint="Pass allow_pickle=True")
        return Frame(self._bytes(content))

    def _pickle(self, content: Any) -> Any:
        if not self._allow_pickle:
            raise InvalidState("is a pickle, which can run code when it is read", hint="Pass allow_pickle=True")
        return pickle.loads(self._bytes(content))


def encode_metadata(metadata: Mapping[Any, Any], path: str, *, allow_pickle: bool = False) -> str:
    """Return the metadata of modules, by name, as a JSON text: a list of pairs, a value and the names of all modules
    that have it; behind it the tensors in these values, if there are any.

    Raises InvalidState for a value that cannot come back exactly.
    """
    tensors: list[Any] = []

    def keep(item: Any) -> str:
        import torch

        whole = torch.as_tensor(item).detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors.append([str(whole.dtype).removeprefix("torch."), list(whole.shape), base64.b64encode(data).decode()])
        return str(len(tensors) - 1)

    encoder, names = Encoder(keep, allow_pickle=allow_pickle), dict[str, list[str]]()
    for name, value in metadata.items():
        what = f"the metadata of the module {name!r} at {path}"
        if type(name) is not str or not _is_json(name):
            raise InvalidState(f"{what} has a name that cannot be stored")
        try:
            is_usual = type(value) is dict and value.keys() == {"version"} and type(value["version"]) is int
            text = json.dumps(value if is_usual else encoder.encode(value, path=what))
            names.setdefault(text, []).append(name)
        except InvalidState:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # a tensor without memory, say
            raise InvalidState(f"{what} has a tensor that cannot be stored: {error}") from None
    pairs = [[json.loads(text), held] for text, held in names.items()]
    return json.dumps([pairs, tensors] if tensors else [pairs], separators=(",", ":"))


def decode_metadata(content: Any, *, path: str, allow_pickle: bool = False) -> OrderedDict[str, Any]:
    """Return the metadata of modules by name, from the output of `encode_metadata`, as JSON. Raises InvalidState for a
    pickle that was not allowed, CheckpointDamaged for something in another form."""
    try:
        pairs, *rest = content
        found = OrderedDict((as_text(name), value) for value, names in as_list(pairs) for name in as_list(names))
    except (TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the metadata of {path} is not in the format: {shortened(repr(error))}") from None

    def fetch(place: str) -> Any:
        import torch

        dtype, shape, content = rest[0][int(place)]
        data = bytearray(base64.b64decode(content, validate=True))
        made = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return made.view(getattr(torch, dtype)).reshape(shape)

    decoder = Decoder(fetch, allow_pickle=allow_pickle)
    for name, value in found.items():  # each module has an object of its own
        found[name] = decoder.decode(value, path=f"the metadata of {name!r} in {path}")
    return found


def check_in_sight(value: Any, path: tuple[Any, ...], kinds: tuple[type, ...]) -> None:
    """Raise InvalidState, with the path, if a set, a slice or the keys of a mapping hold a tensor, which is an item of
    these types: it has no key of its own there."""
    if _hides(value, kinds):
        where = "as a key" if isinstance(value, Mapping) else f"in a {type(value).__name__}"
        raise InvalidState(
            f"{'.'.join(map(str, path)) or 'a value'} has a tensor {where}, where no load can put it back",
            hint="Put it into a list, or into a dict under a name",
        )


def _hides(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, slice):
        return _holds((value.start, value.stop, value.step), kinds)
    return isinstance(value, Mapping | set | frozenset) and _holds(value, kinds)


def _holds(items: Iterable[Any], kinds: tuple[type, ...]) -> bool:
    return any(
        isinstance(item, kinds)
        or _hides(item, kinds)
        or (isinstance(item, list | tuple) and _holds(item, kinds))
        or (isinstance(item, Mapping) and _holds(item.values(), kinds))
        for item in items
        if type(item) not in ATOMS
    )


def references(value: Any) -> Iterator[str]:
    """Yield the keys of everything that a JSON value refers to; decoding fetches exactly those."""
    for item in dicts_in(value):
        content = item.get("v")
        if item.get(_TAG) in ("tensor", "ints", "floats") and type(content) is str:
            yield content


def needs_code(value: Any) -> bool:
    """Return True if a JSON value holds anything that `Decoder` refuses unless pickles are allowed."""
    return any(item.get(_TAG) in ("pickle", "frame") for item in dicts_in(value))


def dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts in a JSON value."""
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is list:
            stack.extend(item)
        elif type(item) is dict:
            yield item
            stack.extend(item.values())


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {_TAG: kind, "v": content}


def check_key(key: str) -> None:
    """Raise InvalidState for a key that would be another one when it is read."""
    if not _is_json(key):
        raise InvalidState(f"the key {key!r} has two surrogates that fit together: JSON makes one character of them")


def _is_json(text: str) -> bool:
    """Return True if JSON preserves a text exactly. It makes one character of two surrogates that fit together."""
    return text.isascii() or _SURROGATE_PAIR.search(text) is None


def _reference(content: Any) -> str:
    if type(content) is not dict or content.get(_TAG) != "tensor" or type(content["v"]) is not str:
        raise TypeError("neither bytes nor a reference")
    return content["v"]


def _numbers(value: Any) -> Any:
    """Return a long list as an array of int64 or float64, None when it is not all of one of them."""
    kinds = set(map(type, value))
    if kinds == {int} and min(value) in _INT64 and max(value) in _INT64:
        import numpy

        return numpy.array(value, numpy.int64)
    if kinds == {float}:
        import numpy

        return numpy.array(value, numpy.float64)
    return None


def _may_be_large(value: Any) -> bool:
    """Return True if a container is worth the time of `plain_size`: most have a few numbers."""
    if len(value) > 32:
        return True
    items = value.values() if type(value) is dict else value
    return not CONTAINERS.isdisjoint(map(type, items))


def _in_order(members: set[Any] | frozenset[Any]) -> list[Any] | None:
    """Return the members sorted, if they are numbers, texts or byte strings, or tuples of these that can be compared;
    else None."""
    kinds = set(map(type, members))
    if kinds == {tuple}:
        kinds = set(map(type, chain.from_iterable(members)))
    if not kinds <= {int, str, bytes}:
        return None
    try:
        return sorted(members)
    except TypeError:
        return None


def _storable(dtype: Any) -> bool:
    is_numpys = dtype.isbuiltin != 2  # else another package's, whose name numpy does not know
    is_exact = dtype.kind in _ARRAY_KINDS and dtype.names is None and dtype.char not in "gG"
    return is_numpys and is_exact and dtype.itemsize > 0


def _numpy_dtype(name: str) -> Any:
    import numpy

    dtype = numpy.dtype(str(name))
    if not _storable(dtype):
        raise ValueError(f"dtype {name!r}")
    return dtype


_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, slice, OrderedDict, Counter, defaultdict, Wrapped})

_DECODE_NESTED: Mapping[str, Callable[[Decoder, Any], Any]] = {
    "tuple": lambda self, content: tuple(self._items(content)),
    "set": lambda self, content: set(self._items(content)),
    "frozenset": lambda self, content: frozenset(self._items(content)),
    "slice": lambda self, content: slice(*self._items(content)),
    "dict": lambda self, content: dict(self._pairs(content)),
    "OrderedDict": lambda self, content: OrderedDict(self._pairs(content)),
    "Counter": lambda self, content: Counter(dict(self._pairs(content))),
    "defaultdict": Decoder._defaultdict,
    "wrapper": Decoder._wrapped,
    "text": lambda self, content: self._bytes(content).decode("utf-8", "surrogatepass"),
    "bytes": Decoder._bytes,
    "bytearray": lambda self, content: bytearray(self._bytes(content)),
    "BytesIO": Decoder._bytes_io,
    "packed": Decoder._packed,
    "ints": lambda self, content: self._fetch(content).tolist(),
    "floats": lambda self, content: self._fetch(content).tolist(),
    "tensor": lambda self, content: self._fetch(content),
    "numpy": Decoder._scalar,
    "ndarray": Decoder._array,
    "pickle": Decoder._pickle,
    "frame": Decoder._frame,
}
