"""Plain values and objects for states. Each table entry is one case; `random` makes values that differ by seed."""

from __future__ import annotations

import datetime
import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from kit.states.upgraded_makers import state_dict_of_noting

MANY = 1500
"""Number of values in large containers: overhead per value shows in the bytes of the checkpoint."""


class _Colour(enum.Enum):
    RED = 1


@dataclass
class _Settings:
    rate: float


_Pair = namedtuple("_Pair", ["left", "right"])


def _nested(random: Random) -> Any:
    return {"a": [1, (2.5, {"b": [None, True]}, torch.randn(2, 2))], 3: {"c": (torch.randn(3), random.random())}}


VALUES: Mapping[str, Callable[[Random], Any]] = {
    "int": lambda random: random.randint(-9, 9),
    "large int": lambda random: 2**70 + random.randint(0, 9),
    "float": lambda random: random.random(),
    "special floats": lambda random: [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324],
    "none": lambda random: None,
    "text": lambda random: "a\0b \U0001f600 \n" + str(random.random()),
    "text of surrogates": lambda random: "\ud83d\ude00",
    "bytes": lambda random: random.randbytes(random.choice((0, 10, 5000))),
    "bytearray": lambda random: bytearray(random.randbytes(10)),
    "complex": lambda random: complex(random.random(), -0.0),
    "tuple": lambda random: (1, ("a", random.random()), ()),
    "set": lambda random: {random.randint(0, 9), "a", (1, 2)},
    "frozenset": lambda random: frozenset({1, 2}),
    "dict of ints": lambda random: {index: random.random() for index in range(4)},
    "dict of mixed keys": lambda random: {1: "a", "1": "b", (2, 3): "c", None: "d", True is False: "e"},
    "ordered dict": lambda random: OrderedDict([("b", 1), ("a", random.random())]),
    "default dict": lambda random: defaultdict(list, {"a": [random.random()]}),
    "counter": lambda random: Counter("abca"),
    "deque": lambda random: deque([1.0, random.random()], maxlen=5),
    "named tuple": lambda random: _Pair(1, random.random()),
    "enum": lambda random: _Colour.RED,
    "dataclass": lambda random: _Settings(random.random()),
    "function": lambda random: len,
    "date": lambda random: datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
    "numpy scalar": lambda random: np.float32(random.random()),
    "numpy array": lambda random: np.arange(6, dtype=np.int16).reshape(2, 3),
    "torch size": lambda random: torch.Size([2, 3]),
    "torch dtype": lambda random: torch.bfloat16,
    "slice": lambda random: slice(1, None, 2),
    "empty": lambda random: {"a": {}, "b": [], "c": ()},
    "nested": _nested,
    "state dict": lambda random: state_dict_of_noting(),
    "state dict inside": lambda random: {"epoch": random.randint(0, 9), "nets": [state_dict_of_noting()]},
    "tensors in tuple": lambda random: (torch.randn(2), [torch.randn(2), None]),
    "many ints": lambda random: {index: random.randint(0, 9) for index in range(MANY)},
    "many texts": lambda random: [str(random.randint(0, 9)) for _ in range(MANY)],
    "many tuples": lambda random: [(index, random.random()) for index in range(MANY)],
    "many numbers": lambda random: [random.random() for _ in range(MANY)],
}
