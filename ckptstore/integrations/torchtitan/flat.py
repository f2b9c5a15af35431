"""Arrange the states of a Trainer under the keys of torchtitan's own DCP manager.

The keys name parameters, never ranks or stages: `layers.0.attention.wo.weight`, `optimizer.state.<parameter>.exp_avg`,
`dataloader.dp_rank_0`. So any layout finds its part again, and stock DCP reads the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any

import torch

from ckptstore.errors import InvalidState, StateMismatch
from ckptstore.state.live.contents import same_random_numbers
from ckptstore.state.live.run_state import RandomNumbers
from ckptstore.state.tensors.overlap import local_memory
from ckptstore.state.tensors.segments import check_range

MODEL, DATALOADER = "model", "dataloader"
"""torchtitan's names of these two. The keys of the model have no prefix."""
RANDOM = "rng"
"""The name of the random numbers, which torchtitan's own managers do not keep. The last of the states."""
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


class LayoutRandomNumbers(RandomNumbers):
    """The random numbers of a rank, which are restored in the layout that they were saved in alone: in another one they
    may be equal where ranks need different ones, or different where they need equal ones."""

    def __init__(self, model_parts: Iterable[torch.nn.Module], dims: Any) -> None:
        """Take torchtitan's `ParallelDims`, or None."""
        super().__init__(model_parts)
        self._layout = [getattr(dims, degree, 1) for degree in _DEGREES]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators, and the degrees of the layout."""
        return {**super().state_dict(), "layout": self._layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators, if the layout is the same."""
        if state["layout"] == self._layout:
            super().load_state_dict(state)


class FlatStates:
    """The parts of a training, each tensor and each plain value an entry of its own in `entries`.

    Created for each save and each load: the tensors are the live ones, the values the present ones. Reading the state
    of an optimizer that has not stepped creates one, as torchtitan does.
    """

    def __init__(self, states: MutableMapping[str, Any]) -> None:
        self._states = states
        self._keys: dict[str, dict[str, str]] = {}
        """Maps each object with a state_dict to the entry of each of its items."""
        self.entries: dict[str, Any] = {}
        """The state that a store saves and loads."""
        for name, item in states.items():
            if item is None:
                continue  # a Trainer without a data loader
            if not callable(getattr(item, "state_dict", None)):
                self._add(name, item)
                continue
            with same_random_numbers():  # a data loader's state_dict before its first batch draws some
                contents = item.state_dict()
            prefix = "" if name == MODEL else f"{name}."
            self._keys[name] = {part: f"{prefix}{part}" for part in _parts(name, contents)}
            for part, key in self._keys[name].items():
                self._add(key, contents[part])

    @property
    def names(self) -> set[str]:
        """torchtitan's names of the parts."""
        return set(self._states)

    def hand_back(self) -> None:
        """Load the entries into each object. Raises StateMismatch when one refuses them."""
        for name in self._states:
            if name not in self._keys:
                if name in self.entries:
                    self._states[name] = _loaded(self.entries[name])
                continue
            if name == RANDOM and self._states.get(DATALOADER) is not None:
                self._states[DATALOADER].state_dict()  # begins a pass, which draws a number, where there is none
            contents = {part: _loaded(self.entries[key]) for part, key in self._keys[name].items()}
            try:
                self._states[name].load_state_dict(contents)
            except Exception as error:  # the object is torchtitan's or the user's, and so is what it raises
                raise StateMismatch(
                    f"the {type(self._states[name]).__name__} at {name!r} refused its state: "
                    f"{type(error).__name__}: {error}",
                    hint=f'checkpoint.exclude_from_loading=["{name}"] leaves it as it is' if name != MODEL else None,
                ) from error

    def _add(self, key: str, item: Any) -> None:
        if key in self.entries:
            raise InvalidState(f"two parts of the training have the same key {key!r}", hint="Rename one of the states")
        self.entries[key] = item if isinstance(item, torch.Tensor) else Value(item)


class Lazily(Mapping[str, Any]):
    """Creates states on first access: where there is nothing to load, an optimizer need not create its state.

    torchtitan's optimizers count that as a step.
    """

    def __init__(self, make: Callable[[], FlatStates]) -> None:
        self._build_states = make

    @cached_property
    def made(self) -> FlatStates:
        """The states."""
        return self._build_states()

    def __getitem__(self, key: str) -> Any:
        return self.made.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.made.entries)

    def __len__(self) -> int:
        return len(self.made.entries)


class Value:
    """A plain value that is stored and loaded as a whole, whatever its present value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, value: Any) -> None:
        """Take the value of a checkpoint."""
        self.value = value


def in_dtype(contents: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a model's contents with floating-point tensors in a dtype, copying only those in another one. Raises
    InvalidState for a number that it cannot hold."""
    found = dict(contents)
    for key, item in contents.items():
        if isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype != dtype:
            found[key] = made = item.to(dtype)
            for part, cast in zip(local_memory(item), local_memory(made), strict=True):
                check_range(key, part, cast)
    return found


def _loaded(entry: Any) -> Any:
    return entry.value if isinstance(entry, Value) else entry


def _parts(name: str, contents: Any) -> Iterator[str]:
    if not isinstance(contents, Mapping):
        raise InvalidState(f"the state_dict of {name!r} is a {type(contents).__name__}, not a mapping")
    for part in contents:
        if not isinstance(part, str):
            raise InvalidState(f"the state_dict of {name!r} has the key {part!r}, which is not text")
        yield part
