"""Cases of one process: plain values, dtypes, shapes and views, nested states, planners, tensors that wrap others."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.two_tensor import TwoTensor
from trials import Trial, add, case

CODE = "cannot be stored exactly"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Plain:
    size: int = 3


def bytes_io(data: bytes, **attributes: str) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(2)
    vars(made).update(attributes)
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bool": lambda: True,
    "int": lambda: -7,
    "large int": lambda: 1 << 200,
    "float": lambda: 0.1,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("-inf"),
    "minus zero": lambda: -0.0,
    "complex": lambda: complex(1.5, float("inf")),
    "text": lambda: "naïve 雪 \n \x00",
    "empty text": lambda: "",
    "bytes": lambda: b"\x00\xff",
    "bytes of 100 KiB": lambda: bytes(range(256)) * 400,
    "bytearray": lambda: bytearray(b"abc"),
    "BytesIO": lambda: bytes_io(b"abc"),
    "BytesIO of 100 KiB": lambda: bytes_io(bytes(range(256)) * 400),
    "empty list": list,
    "list": lambda: [1, "two", 3.0, None],
    "lists in lists": lambda: [[1, 2], [[3], []]],
    "list of 5,000 integers": lambda: list(range(5000)),
    "list of 5,000 floats": lambda: [n / 7 for n in range(5000)],
    "list of 5,000 of both": lambda: [n / 7 if n % 2 else n for n in range(5000)],
    "tuple": lambda: (1, (2, "three")),
    "tuple with tensors": lambda: (randn(3, 4), {"x": torch.ones(2, dtype=torch.bfloat16)}, [randn(0)]),
    "tuple with large tensor": lambda: (randn(400, 1000), 3),
    "set": lambda: {1, 2, 3},
    "frozenset": lambda: frozenset({"a"}),
    "range": lambda: range(1, 10, 3),
    "slice": lambda: slice(1, None, 2),
    "Ellipsis": lambda: ...,
    "date": lambda: datetime.date(2024, 2, 29),
    "time": lambda: datetime.time(1, 2, 3, 4),
    "datetime": lambda: datetime.datetime(2024, 2, 29, 1, tzinfo=datetime.UTC),
    "timedelta": lambda: datetime.timedelta(days=-1, microseconds=7),
    "torch.Size": lambda: torch.Size([2, 3]),
    "torch.dtype": lambda: torch.float8_e4m3fn,
    "torch.device": lambda: torch.device("cpu", 0),
    "numpy scalar": lambda: numpy.float32(0.1),
    "numpy array": lambda: numpy.arange(12, dtype=numpy.int16).reshape(3, 4),
    "numpy array of 1 MB": lambda: numpy.arange(131072, dtype=numpy.float64),
    "OrderedDict in a tuple": lambda: (collections.OrderedDict(b=1, a=2),),
    "Counter in a tuple": lambda: (collections.Counter("aab"),),
    "defaultdict in a tuple": lambda: (collections.defaultdict(list, a=[1]),),
    "dict with other keys in a tuple": lambda: ({1: "a", (2, 3): "b", None: "c"},),
}
CODE_VALUES: dict[str, Callable[[], Any]] = {
    "Path": lambda: pathlib.PurePosixPath("a/b"),
    "UUID": lambda: uuid.UUID(int=7),
    "Decimal": lambda: decimal.Decimal("0.1"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "enum": lambda: Colour.RED,
    "namedtuple": lambda: Point(1, 2),
    "dataclass": Plain,
    "function": lambda: functools.partial(int, base=2),
    "BytesIO with attributes": lambda: bytes_io(b"abc", label="x"),
    "numpy array of objects": lambda: numpy.array([None, 1], dtype=object),
    "lists with code in them": lambda: [1, [Colour.RED]],
}


def value_trial(make: Callable[[], Any], *, allow_pickle: bool = False) -> Trial:
    return Trial(
        lambda: {"w": randn(2), "nested": {"v": make()}},
        lambda: {"w": torch.zeros(2), "nested": {"v": 0}},
        allow_pickle=allow_pickle,
    )


for _name, _make in VALUES.items():
    add(f"value: {_name}", "plain values", _name, functools.partial(value_trial, _make))
for _name, _make in CODE_VALUES.items():
    add(f"value: {_name}", "values that need code", _name, functools.partial(value_trial, _make), ours=CODE)
    add(
        f"value: {_name}, allow_pickle",
        "values that need code, `allow_pickle=True`",
        _name,
        functools.partial(value_trial, _make, allow_pickle=True),
    )


def tensor_trial(make: Callable[[], torch.Tensor], blank: Callable[[], torch.Tensor] | None = None) -> Trial:
    return Trial(lambda: {"t": make()}, lambda: {"t": blank() if blank else torch.zeros_like(make())})


DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def of_dtype(name: str, count: int = 96) -> torch.Tensor:
    dtype = getattr(torch, name)
    data = torch.randint(0, 2 if name == "bool" else 120, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(2, -1)


for _name in DTYPES:
    add(
        f"dtype: {_name}",
        "dtypes",
        _name,
        functools.partial(
            lambda name: tensor_trial(
                functools.cache(lambda: of_dtype(name)), lambda: torch.empty(2, 48, dtype=getattr(torch, name))
            ),
            _name,
        ),
    )


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], dict[str, Any]]] = {
    "no dimension": (lambda: torch.tensor(3.5), {}),
    "no element": (lambda: torch.ones(0), {}),
    "no element in two dimensions": (lambda: torch.ones(3, 0, 2), {}),
    "one element": (lambda: randn(1), {}),
    "2 MB": (lambda: randn(512, 1024), {}),
    "transposed": (lambda: randn(30, 4).t(), {}),
    "every second column": (lambda: randn(30, 8)[:, ::2], {}),
    "part of a larger one": (lambda: randn(100)[10:20], {}),
    "expanded": (lambda: randn(1, 4).expand(30, 4), {}),
    "channels last": (lambda: randn(2, 3, 4, 5).to(memory_format=torch.channels_last), {}),
    "conjugate view": (lambda: torch.view_as_complex(randn(4, 2)).conj(), {}),
    "negative view": (lambda: torch.view_as_complex(randn(4, 2)).conj().imag, {}),
    "parameter": (lambda: torch.nn.Parameter(randn(4)), {}),
    "sparse": (lambda: torch.eye(3).to_sparse(), {"ours": "t has the layout torch.sparse_coo", "stock": "raises"}),
    "on the meta device": (
        lambda: torch.ones(3, device="meta"),
        {"ours": "t is on the meta device", "stock": "raises"},
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(randn(4), 0.1, 0, torch.qint8),
        {"ours": "t has the (layout|dtype)", "stock": "raises"},
    ),
}
for _name, (_make, _more) in TENSORS.items():
    add(f"tensor: {_name}", "tensors", _name, functools.partial(tensor_trial, _make), **_more)


@case("tensors", "into a strided view")
def into_a_view() -> Trial:
    return Trial(lambda: {"t": randn(30, 4)}, lambda: {"t": torch.zeros(4, 60).t()[::2]})


@case("tensors", "into another dtype")
def into_another_dtype() -> Trial:
    return Trial(
        lambda: {"t": randn(30, 4)},
        lambda: {"t": torch.zeros(30, 4, dtype=torch.float64)},
        expected=lambda: {"t": randn(30, 4).double()},
    )


@case(
    "tensors", "into another shape", ours="ValueError|Size mismatch", stock="raises", refused_at="load", by_torch=True
)
def into_another_shape() -> Trial:
    return Trial(lambda: {"t": randn(30, 4)}, lambda: {"t": torch.zeros(4, 30)})


@case("tensors", "tied ones")
def tied() -> Trial:
    def make(filled: bool) -> dict[str, Any]:
        one = randn(300, 4) if filled else torch.zeros(300, 4)
        return {"a": one, "b": {"c": one}, "d": one[:10]}

    return Trial(lambda: make(True), lambda: make(False))


def nested(filled: bool) -> dict[str, Any]:
    def of(seed: int) -> torch.Tensor:
        return randn(5, seed=seed) if filled else torch.zeros(5)

    return {
        "dotted.key": of(1),
        "a": {"b": {"c": of(2), 7: of(3)}, "list": [of(4), {"d": of(5)}, 3 if filled else 0]},
        "empty": {},
        "empty list": [],
        "step": 7 if filled else 0,
    }


@case("nested states", "dicts, lists and dots in keys")
def nested_state() -> Trial:
    return Trial(lambda: nested(True), lambda: nested(False))


@case("nested states", "`_load_state_dict_from_keys`: everything")
def from_keys_all() -> Trial:
    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        return _load_state_dict_from_keys(storage_reader=reader)

    state = {"a": {"b": randn(3), "c": [randn(2), {"d": 4}]}, "x.y": randn(1), "step": 3, "t": (1, 2)}
    return Trial(lambda: state, dict, load=load)


@case("nested states", "`_load_state_dict_from_keys`: some keys")
def from_keys_some() -> Trial:
    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        return _load_state_dict_from_keys({"a.c", "step"}, storage_reader=reader)

    state = {"a": {"b": randn(3), "c": {"d": randn(2), "e": "x"}}, "step": 3}
    return Trial(lambda: state, dict, load=load, expected=lambda: {"a": {"c": {"d": randn(2), "e": "x"}}, "step": 3})


@case("nested states", "`dcp_to_torch_save`")
def to_torch_save() -> Trial:
    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        path = str(reader.checkpoint_id)
        dcp_to_torch_save(path, f"{path}.pt")  # reads with the stock reader
        loaded: dict[str, Any] = torch.load(f"{path}.pt", weights_only=False)
        return loaded

    state = {"a": {"b": randn(3), "t": (1, randn(2))}, "step": 3}
    return Trial(lambda: state, dict, load=load)


class Counting:
    """Stateful."""

    def __init__(self, count: int) -> None:
        self.count, self.weight = count, torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weight = state["count"], state["weight"]

    def __repr__(self) -> str:
        return f"Counting({self.count}, {self.weight.tolist()})"


@case("nested states", "objects with `state_dict`")
def stateful() -> Trial:
    return Trial(lambda: {"it": Counting(3)}, lambda: {"it": Counting(0)})


@case("nested states", "a key that is missing", ours="missing", stock="raises", refused_at="load", by_torch=True)
def missing_key() -> Trial:
    return Trial(lambda: {"a": randn(2)}, lambda: {"a": torch.zeros(2), "missing": torch.zeros(2)})


@case("planners", "`flatten_state_dict=False`")
def unflattened() -> Trial:
    return Trial(
        lambda: {"a": {"w": randn(3), "x": [1, 2]}, "t": randn(4)},
        lambda: {"a": {}, "t": torch.zeros(4)},
        planner=lambda: dcp.DefaultSavePlanner(flatten_state_dict=False),
        load_planner=lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )


@case("planners", "`allow_partial_load=True`")
def partial() -> Trial:
    return Trial(
        lambda: {"a": randn(2), "b": 3},
        lambda: {"a": torch.zeros(2), "c": "mine"},
        load_planner=lambda: dcp.DefaultLoadPlanner(allow_partial_load=True),
        expected=lambda: {"a": randn(2), "c": "mine"},
    )


class Renaming(dcp.DefaultLoadPlanner):
    """Asks for what it calls new.x under old.x."""

    def create_local_plan(self) -> Any:
        self.state_dict = {f"old.{key.removeprefix('new.')}": item for key, item in self.state_dict.items()}
        self.mappings = {f"old.{key.removeprefix('new.')}": path for key, path in self.mappings.items()}
        return super().create_local_plan()


@case("planners", "a user's: other names at the load")
def renaming() -> Trial:
    return Trial(
        lambda: {"old": {"a": randn(3), "b": 4}},
        lambda: {"new": {"a": torch.zeros(3), "b": 0}},
        load_planner=Renaming,
        expected=lambda: {"new": {"a": randn(3), "b": 4}},
    )


class Scratch(dcp.DefaultLoadPlanner):
    """Reads everything into one piece of memory, and copies it out as DCP hands it over."""

    memory = torch.zeros(100)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.memory[: read_item.lengths[0]]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index)).copy_(tensor)


@case("planners", "a user's: `commit_tensor` copies out of memory that is used again")
def scratch() -> Trial:
    return Trial(
        lambda: {str(n): randn(10 + n, seed=n) for n in range(5)},
        lambda: {str(n): torch.zeros(10 + n) for n in range(5)},
        load_planner=Scratch,
    )


class Halving(dcp.DefaultSavePlanner):
    """Saves in another dtype."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        halved = {key: item.half() for key, item in state_dict.items()}
        super().set_up_planner(halved, storage_meta, is_coordinator)


@case("planners", "a user's: another dtype at the save")
def halving() -> Trial:
    return Trial(
        lambda: {"t": randn(9)},
        lambda: {"t": torch.zeros(9)},
        planner=Halving,
        expected=lambda: {"t": randn(9).half().float()},
    )


class Raw(dcp.DefaultSavePlanner):
    """Turns plain values into bytes of its own."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(repr(object).encode())


class RawLoad(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = int(value.getvalue())


def raw(allow_pickle: bool) -> Trial:
    return Trial(
        lambda: {"t": randn(9), "n": 123456},
        lambda: {"t": torch.zeros(9), "n": 0},
        planner=Raw,
        load_planner=RawLoad,
        allow_pickle=allow_pickle,
        across=not allow_pickle,
    )


add("raw bytes", "planners", "a user's: bytes of its own", lambda: raw(False), ours="n is a .*Frame")
add("raw bytes, allow_pickle", "planners", "a user's: bytes of its own, `allow_pickle=True`", lambda: raw(True))


def steps(writer: Any, states: list[dict[str, Any]], make: Callable[[], Any]) -> None:
    """Save one state after another beside each other; the last is where the writer goes."""
    path = pathlib.Path(writer.checkpoint_id)
    for number, state in enumerate(states):
        goes = path if number == len(states) - 1 else path.with_name(f"{path.name}-{number}")
        dcp.save(state, storage_writer=type(writer)(goes), planner=make(), no_dist=True)


def cached() -> Any:
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


@case("planners", "plan caching over steps")
def plan_caching() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        steps(writer, [{"t": randn(9, seed=1), "n": 1}, {"t": randn(9, seed=2), "n": 2}, state], cached)

    return Trial(lambda: {"t": randn(9), "n": 7}, lambda: {"t": torch.zeros(9), "n": 0}, save=save)


@case("planners", "plan caching, a state that changes")
def plan_caching_changes() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        steps(writer, [{"t": randn(9)}, {"t": randn(9)}, {"t": randn(8), "u": randn(3)}, state, state], cached)

    return Trial(lambda: {"t": randn(7), "n": 7}, lambda: {"t": torch.zeros(7), "n": 0}, save=save)


@case("planners", "plan caching, a dtype that changes")
def plan_caching_dtype() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        steps(writer, [{"t": randn(9)}, state], cached)

    return Trial(lambda: {"t": randn(9).double()}, lambda: {"t": torch.zeros(9, dtype=torch.float64)}, save=save)


class Quantised(torch.Tensor):
    """Shaped as the quantised tensors of libraries are."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, block: int = 8) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale, made.block = codes, scale, block
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"block": self.block}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, *_: Any) -> Quantised:
        return cls(inner["codes"], inner["scale"], context["block"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale, args[0].block)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(str(func))


def quantised(filled: bool, rows: int = 4, block: int = 8) -> Quantised:
    codes = torch.randint(0, 99, (rows, 16), dtype=torch.int8) if filled else torch.zeros(rows, 16, dtype=torch.int8)
    return Quantised(codes, torch.rand(rows * 16 // 8) if filled else torch.zeros(rows * 16 // 8), block)


class Silent(torch.Tensor):
    """Wraps, and does not say what."""

    is_silent = True

    @staticmethod
    def __new__(cls) -> Silent:
        made: Silent = torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func is torch.ops.aten.is_pinned.default else cls()


def optim_state(kind: str, filled: bool) -> torch.Tensor:
    import torchao.optim.subclass_4bit
    import torchao.optim.subclass_8bit
    import torchao.optim.subclass_fp8

    classes = {
        "OptimState8bit": torchao.optim.subclass_8bit.OptimState8bit,
        "OptimState4bit": torchao.optim.subclass_4bit.OptimState4bit,
        "OptimStateFp8": torchao.optim.subclass_fp8.OptimStateFp8,
    }
    state: torch.Tensor = classes[kind].zeros((8, 256))
    if filled:
        state.copy_(randn(8, 256))
    return state


def int8_weight(filled: bool) -> torch.Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight.copy_(randn(32, 64) if filled else torch.ones(32, 64))
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


WRAPPERS: dict[str, tuple[Callable[[bool], torch.Tensor], dict[str, Any]]] = {
    "`__tensor_flatten__` with a context": (lambda filled: quantised(filled), {"stock": "raises"}),
    "`TwoTensor`": (lambda f: TwoTensor(randn(4) * f, randn(4, seed=1) * f), {"stock": "raises"}),
    "`TwoTensor` in `TwoTensor`": (
        lambda f: TwoTensor(TwoTensor(randn(4) * f, randn(4) * f), TwoTensor(randn(4) * f, torch.ones(4))),
        {"stock": "raises"},
    ),
    "torchao `Int8Tensor`": (int8_weight, {}),
    "torchao `OptimState8bit`": (lambda f: optim_state("OptimState8bit", f), {}),
    "torchao `OptimState4bit`": (lambda f: optim_state("OptimState4bit", f), {}),
    "torchao `OptimStateFp8`": (lambda f: optim_state("OptimStateFp8", f), {}),
    "a wrapper that does not say what it wraps": (lambda f: Silent(), {"stock": "raises", "ours": "t is a Silent"}),
}


def wrapper_trial(make: Callable[[bool], torch.Tensor]) -> Trial:
    made = functools.cache(lambda: make(True))
    return Trial(
        lambda: {"t": made(), "more": {"t": made(), "n": 3}},
        lambda: {"t": make(False), "more": {"t": make(False), "n": 0}},
        across=False,
    )


for _name, (_wrapper, _more) in WRAPPERS.items():
    add(f"wrapper: {_name}", "tensors that wrap others", _name, functools.partial(wrapper_trial, _wrapper), **_more)


@case(
    "tensors that wrap others",
    "into a plain tensor",
    ours="t was saved from a .*Quantised, and is loaded into a Tensor",
    stock="raises",
    refused_at="load",
)
def wrapper_into_plain() -> Trial:
    return Trial(lambda: {"t": quantised(True)}, lambda: {"t": torch.zeros(4, 16)}, across=False)


@case(
    "tensors that wrap others",
    "into one with another context",
    ours="t was saved from another kind of tensor",
    stock="raises",
    refused_at="load",
)
def wrapper_other_context() -> Trial:
    return Trial(lambda: {"t": quantised(True)}, lambda: {"t": quantised(False, block=4)}, across=False)


@case(
    "tensors that wrap others", "a key that its parts need", ours="t.codes' is needed for a part of 't'", stock="raises"
)
def wrapper_key_taken() -> Trial:
    return Trial(
        lambda: {"t": quantised(True), "t.codes": randn(3)}, lambda: {"t": quantised(False), "t.codes": torch.zeros(3)}
    )


@case("identity", "`checkpoint_id`, `save_id`, `load_id` and version")
def identity() -> Trial:
    def save(writer: Any, state: dict[str, Any], planner: Any) -> None:
        before = writer.save_id
        metadata = dcp.save(state, storage_writer=writer, checkpoint_id=writer.checkpoint_id, no_dist=True)
        assert metadata.version == "1.0.0"
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.save_id == writer.save_id != before
        assert str(metadata.storage_meta.checkpoint_id) == str(writer.checkpoint_id)

    def load(reader: Any, state: dict[str, Any], planner: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=reader, checkpoint_id=reader.checkpoint_id, no_dist=True)
        metadata = reader.read_metadata()
        first = reader.load_id
        assert metadata.storage_meta.load_id == first
        reader.reset()
        assert first != reader.load_id
        assert metadata.storage_meta.save_id
        assert metadata.version == "1.0.0"
        assert not str(reader.checkpoint_id).startswith("//")
        return state

    return Trial(lambda: {"t": randn(2)}, lambda: {"t": torch.zeros(2)}, save=save, load=load)
