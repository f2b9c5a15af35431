"""Plain values come back with exact type and order, and nothing runs while they are decoded."""

import datetime
import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import CheckpointDamaged, InvalidState
from ckptstore.state.live.values import INLINE_BYTES, MAX_DEPTH, Decoder, Encoder, references


class Kept:
    """What travels beside the JSON."""

    def __init__(self):
        self.tensors = {}

    def store(self, value):
        key = f"#{len(self.tensors)}"
        self.tensors[key] = value
        return key


def through(value, *, save_pickles=False, load_pickles=False):
    kept = Kept()
    text = json.dumps(Encoder(kept.store, allow_pickle=save_pickles).encode(value, path="state.x"), allow_nan=False)
    encoded = json.loads(text)
    assert sorted(references(encoded)) == sorted(kept.tensors)
    return Decoder(kept.tensors.__getitem__, allow_pickle=load_pickles).decode(encoded, path="state.x")


def same(left, right):
    """Equal in value, type, order and sign of zero, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (
            math.isnan(left)
            if math.isnan(right)
            else left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, numpy.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers()
    | st.dates()
    | st.datetimes(timezones=st.just(datetime.UTC) | st.none())
    | st.timedeltas()
    | st.sampled_from([..., range(3, 9, 2), torch.float8_e4m3fn, torch.device("cpu"), torch.Size([2, 3]), "$t"])
)
HASHABLE = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.just("$t"), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4).map(OrderedDict)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda value: defaultdict(list, value))
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_comes_back_with_its_type_and_order(value):
    assert same(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        5e-324,
        math.nan,
        -math.inf,
        2**63,
        -(2**63),
        1 << 40_000,
        complex(-0.0, math.nan),
        True,
        [1, True, 1.0],
        bytearray(b"ab"),
        slice(1, None, 2),
        datetime.time(1, 2, 3, 4, fold=1),
        numpy.float32("nan"),
        numpy.float64(1.5),
        numpy.int8(-3),
        numpy.bool_(True),
        numpy.datetime64("2026-11-20", "ns"),
        numpy.array(3, ">i4"),
        numpy.zeros((0, 3), numpy.float16),
        numpy.arange(12.0).reshape(3, 4).T,
        numpy.array(["a", "bcd"]),
        {"$t": 1},
        {"a": {"$t": "tuple", "v": [1]}},
        {1: "a", "1": "b"},
        "\ud800",
        "\ud83d\ude00 and \U0001f600",
        {"\ud83d\ude00": 1, "\U0001f600": 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_awkward_ones_come_back(value):
    assert same(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        bytes(range(256)) * 1000,
        bytearray(INLINE_BYTES + 1),
        list(range(-700, 700)),
        tuple(map(float, range(2000))),
        [-0.0, math.nan, math.inf] * 400,
        numpy.random.default_rng(0).random((300, 100)),
        torch.arange(5),
        {"nested": (torch.ones(2, dtype=torch.bfloat16), [torch.zeros(())])},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_long_travels_as_tensors(value):
    kept = Kept()
    Encoder(kept.store).encode(value, path="x")
    assert kept.tensors
    assert same(through(value), value)


@pytest.mark.parametrize("value", [[2**63] * 1001, [True] * 1001, [1] * 1000 + [1.0]])
def test_long_lists_that_are_not_all_int64_or_float_are_packed(value):
    kept = Kept()
    assert Encoder(kept.store).encode(value, path="x")["$t"] == "packed"
    assert not kept.tensors
    assert same(through(value), value)


@pytest.mark.parametrize("value", [[1] * 1000, {"a": [1] * 499, "b": [2.5] * 497}, {str(n): [] for n in range(500)}])
def test_short_containers_are_json(value):
    assert Encoder(Kept().store).encode(value, path="x") == value


class Colour(IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Zone(datetime.tzinfo):
    """A time zone that is more than an offset."""

    def utcoffset(self, _):
        return datetime.timedelta(0)


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        *(object(), Colour.RED, Text("a"), Point(1, 2), defaultdict(lambda: 1), len, numpy.longdouble(1), ValueError()),
        datetime.datetime(2026, 1, 2, tzinfo=Zone()),
    ],
)
def test_what_cannot_be_exact_is_refused_with_its_path(value):
    with pytest.raises(InvalidState, match=r"state\.x\.a\[1\] "):
        through({"a": [0, value]})


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "int4"])
def test_a_dtype_that_numpy_does_not_know_by_its_name_is_refused(name):
    dtype = getattr(pytest.importorskip("ml_dtypes"), name)
    for value in (numpy.zeros(2, dtype), numpy.zeros(2, dtype)[0]):
        with pytest.raises(InvalidState, match="cannot be stored exactly"):
            through(value)


def test_it_says_what_is_wrong_with_a_value_of_a_known_class():
    for value, reason in (
        (numpy.zeros(2, "i4,f8"), "its dtype is .*i4"),
        (datetime.time(1, tzinfo=Zone()), "time zone by name"),
    ):
        with pytest.raises(InvalidState, match=rf"state\.x is a .*: .*{reason}"):
            through(value)
        assert same(through([value], save_pickles=True, load_pickles=True), [value])


def test_cycles_and_depth_are_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(InvalidState, match="refers to itself"):
        through(loop)
    for nest in (lambda value: (value,), lambda value: [value], lambda value: {1: value}):
        deep = 1
        for _ in range(MAX_DEPTH):
            deep = nest(deep)
        assert through(deep) == deep
        with pytest.raises(InvalidState, match="nested too deeply"):  # what a load has no stack for is not saved
            through(nest(deep))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidState, match="too deeply"):
        through(deep)


def test_shared_lists_come_back_equal():
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]


def test_pickles_need_permission_twice():
    with pytest.raises(InvalidState, match="allow_pickle"):
        through(Point(1, 2), save_pickles=True)
    assert through(Point(1, 2), save_pickles=True, load_pickles=True) == Point(1, 2)


def test_a_pickle_in_a_file_is_not_run_unless_allowed(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    kept = Kept()
    encoded = Encoder(kept.store, allow_pickle=True).encode(Attack(), path="x")
    with pytest.raises(InvalidState, match="pickle"):
        Decoder(kept.tensors.__getitem__).decode(encoded, path="x")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "encoded",
    [
        {"$t": "nonsense", "v": 1},
        {"$t": "tuple"},
        {"$t": "tuple", "v": 3},
        {"$t": "torch.dtype", "v": "torch.load"},
        {"$t": "torch.dtype", "v": "os.system"},
        {"$t": "torch.device", "v": "nowhere"},
        {"$t": "numpy", "v": ["O", ""]},
        {"$t": "ndarray", "v": ["<f4", [3], "AAAA"]},
        {"$t": "defaultdict", "v": ["eval", []]},
        {"$t": "set", "v": [[1]]},
        {"$t": "bytes", "v": "!"},
        {"$t": "float", "v": "1"},
        {"$t": ["tuple"], "v": 1},
    ],
)
def test_hostile_json_is_damage_and_nothing_else(encoded):
    with pytest.raises((CheckpointDamaged, InvalidState)):
        Decoder({}.__getitem__).decode(encoded, path="x")
