"""The state of a data loader, and what the order of its samples was drawn from.

torchdata's StatefulDataLoader keeps how many samples of a pass it has given, and repeats the pass up to there. Only a
sampler with a state of its own keeps the order. Any other one draws it once more, from what the process has then: the
epoch that it was set to, its generator, the random numbers of the process.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import torch
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckptstore.state.live.accelerated import check_can_go_on
from ckptstore.state.live.dataset_digest import digests_of, warn_of_other_data

logger = logging.getLogger("ckptstore")

_PASS = "pass"
"""The key of what is added to the state of a loader, which takes no notice of it."""
_FINISHED = "_iterator_finished"
_COUNTERS = ("epoch", "iteration", "initial_seed")
"""Attributes from which orders are made: the number of the epoch, of samplers and of Accelerate's loaders, and the seed
of Accelerate's samplers."""
_INNER = ("base_dataloader", "sampler", "batch_sampler")
_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_warned: WeakSet[Any] = WeakSet()


class LoaderState:
    """A data loader or sampler whose next pass is the rest of the saved one, and takes no random number from the
    training that the saved one had taken already.

    The pass begins with the training's loop, not with the load: only then the loop has set the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._passes = Passes.of(loader)
        self._digests = {} if self._passes is None else digests_of(loader.dataset)

    def state_dict(self) -> Any:
        if self._passes is None:
            return self.loader.state_dict()
        if self._passes.loaded is not None:
            return self._passes.loaded  # asked for its state, the loader would begin the pass
        if self._passes.base._iterator is None:
            return {}  # which torchdata takes for the state of a loader that has not begun
        now = {"counters": _counters(self.loader), "generators": _generator_states(self.loader)}
        added = {"began": self._passes.began, **now, "data": self._digests}
        state = {**self.loader.state_dict(), _PASS: added}
        if _num_batches(state) and not state[_FINISHED]:
            check_can_go_on(self.loader)
        return state

    def load_state_dict(self, state: Any) -> None:
        if self._passes is not None:
            warn_of_other_data(_added(state).get("data", {}), self._digests)
            self.loader.load_state_dict({name: item for name, item in state.items() if name != _PASS})
            self._passes.load(state)
            return
        self.loader.load_state_dict(state)
        if type(self.loader).__module__.startswith("torchdata.nodes"):
            # It begins its pass when it is asked for its state. Left to the loop, it would draw from the random numbers
            # that are restored after this. The epochs of its samplers are in its state.
            self.loader.state_dict()

    @property
    def can_repeat(self) -> bool:
        """True if the order of the pass that is under way can be drawn once more."""
        return self._passes is not None and (self._passes.began is not None or self._passes.loaded is not None)


class Passes:
    """Makes the iterators of a StatefulDataLoader, and keeps what the order of the pass under way was drawn from.

    The loader refers to this, and this to the loader only weakly: workers end as soon as nobody has their loader.
    """

    def __init__(self, loader: Any, base: Any) -> None:
        self._loader_ref, self._base_ref = ref(loader), ref(base)
        self.began: dict[str, Any] | None = None
        """The counters, generators and random numbers at the beginning of the pass; None if it began before this."""
        self.loaded: Mapping[str, Any] | None = None
        """The state that the next pass begins with."""
        base._get_iterator = self._iterator
        made = base._iterator
        if base._initial_iter_for_state_dict and not made._num_yielded and not made._finished:
            # Made for a state alone, by Accelerate for each of its loaders, before a loop could set the epoch.
            base._iterator, base._initial_iter_for_state_dict = None, False

    @classmethod
    def of(cls, loader: Any) -> Passes | None:
        """Return the one of a loader, made on first use; None for loaders of another kind."""
        base = getattr(loader, "base_dataloader", loader)
        if not hasattr(base, "next_iter_state"):
            return None
        found = getattr(vars(base).get("_get_iterator"), "__self__", None)
        return found if isinstance(found, cls) else cls(loader, base)

    @property
    def base(self) -> Any:
        """The loader of torchdata."""
        return self._base_ref()

    @property
    def _loader(self) -> Any:
        """The loader with the one of torchdata in it, or that one."""
        return self._loader_ref() or self.base

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on with a state, and set the counters for a loop that does not set them."""
        self.loaded = state or None
        counters, began = _added(state).get("counters", {}), _added(state).get("began") or {"counters": {}}
        if not state.get(_FINISHED):
            counters = {**counters, **began["counters"]}
        else:  # Accelerate's loader says that its pass is over before it counts it
            ended = {name: number + 1 for name, number in began["counters"].items() if name.endswith("iteration")}
            counters = {**counters, **ended}
        _set_counters(self._loader, counters)

    def _iterator(self) -> Any:
        """Return an iterator in place of the loader's `_get_iterator`, which is called when a pass begins."""
        if self.loaded is None:
            self._begin(draws_seed=True)
            return self._watched(self._new_iterator())
        loaded, self.loaded = self.loaded, None
        self.began, wanted = _added(loaded).get("began"), _counters(self._loader)
        is_over = bool(loaded[_FINISHED])
        before = {} if self.began is None else self.began["counters"]
        changed = [] if is_over else [name for name in wanted.keys() & before.keys() if wanted[name] != before[name]]
        with _same_numbers():
            iterator = self._new_iterator() if self.began is None else self._repeated(self.began)
            if not iterator._num_workers and (is_over or changed):
                next(iterator._sampler_iter, None)  # where samplers leave the position that they were loaded with
        if self.began is None and not iterator._num_workers and self._shares_generator():
            _draw_seed(self.base)  # torchdata has set the generator back to what it was before this
        _set_generators(self._loader, _added(loaded).get("generators", {}))
        if changed and not _is_complete(self.base, loaded):
            logger.warning(
                "a loader was saved in the middle of an epoch, and the loop has set its sampler to another one: %s, "
                "which was %s. The rest of the saved epoch is left out. Begin the loop with the epoch that was saved",
                *({name: found[name] for name in changed} for found in (wanted, before)),
            )
        if changed or is_over:
            iterator._finished = True  # so that torchdata begins a new pass
            _set_counters(self._loader, wanted)
        return self._watched(iterator)

    def _new_iterator(self) -> Any:
        return type(self.base)._get_iterator(self.base)

    def _begin(self, *, draws_seed: bool) -> None:
        counters, generators = _counters(self._loader), _generator_states(self._loader)
        drawn_from = {"generators": generators, "random": random_numbers(), "draws_seed": draws_seed}
        self.began = {"counters": counters, **drawn_from}

    def _repeated(self, began: Mapping[str, Any]) -> Any:
        """Return an iterator of the pass that was saved, with the order that it had."""
        if isinstance(self.base.dataset, IterableDataset):
            return self._new_iterator()

        def begin(sampler: Any) -> Iterator[Any]:
            set_random_numbers(began["random"])
            _set_generators(self._loader, began["generators"])
            _set_counters(self._loader, began["counters"])
            iterator: Iterator[Any] = iter(sampler)
            if began["draws_seed"]:  # as torch does before the first sample; with workers it makes the iterator twice
                _draw_seed(self.base)
                iterator = iter(sampler) if self.base.num_workers else iterator
            return iterator

        index_sampler = self.base._index_sampler
        holder, sampler = self.base, index_sampler
        if type(index_sampler).__module__.startswith("torchdata."):  # its iterators begin those of the sampler inside
            holder, sampler = index_sampler, index_sampler.sampler
        if hasattr(sampler, "state_dict"):
            return self._new_iterator()
        with ExitStack() as stack:
            held = vars(holder)  # torch's loader lets nobody set its samplers
            for name in ("sampler", "batch_sampler"):
                if held.get(name) is sampler:
                    stack.callback(held.__setitem__, name, sampler)
                    held[name] = _Again(sampler, begin)
            iterator = self._new_iterator()
            inner = getattr(iterator._sampler_iter, "sampler_iter", iterator._sampler_iter)
            if not iterator._num_workers and not hasattr(inner, "state_dict"):
                # Batch by batch, as the saved one: samplers draw with their first sample, and some after the last one.
                iterator._sampler_iter = iter(self.base._index_sampler)
                for _ in range(iterator._sampler_iter_yielded):
                    next(iterator._sampler_iter, None)
        iterator._index_sampler = index_sampler
        return iterator

    def _shares_generator(self) -> bool:
        """Return True if the seed of workers is drawn from the generator of a sampler that keeps its state."""
        sampler = self.base.sampler
        shared = type(sampler).__module__.startswith("torchdata.") and getattr(sampler, "generator", None)
        return shared is not None and shared is self.base.generator

    def _watched(self, iterator: Any) -> Any:
        """Have an iterator with persistent workers, which makes all passes, say when one begins."""
        if self.base.persistent_workers:
            iterator_ref = ref(iterator)

            def begin(*arguments: Any, **options: Any) -> None:
                self._begin(draws_seed=False)
                found: Any = iterator_ref()
                type(found)._reset(found, *arguments, **options)

            iterator._reset = begin
        return iterator


class _Again:
    """A sampler each of whose iterators has the order of the pass that was saved: torchdata makes several for one."""

    def __init__(self, sampler: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._sampler, self._begin = sampler, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def warn_of_order(key: str, item: Any, state: Any) -> None:
    """Warn, once for each loader, that a position in the middle of a pass stands for other samples after a load."""
    loader = item.loader if isinstance(item, LoaderState) else item
    if not _num_batches(state) or state[_FINISHED] or loader in _warned:
        return
    if isinstance(item, LoaderState) and item.can_repeat:
        return
    drawing = [part for _, part in _parts(loader) if _draws_its_order(part)]
    if drawing:
        _warned.add(loader)
        logger.warning(
            "the %s at %r is saved in the middle of a pass, whose order its %s draws anew in each process: a resume "
            "goes on with other samples, some of them twice. Make the state with ckptstore.all_state before the loop, "
            "which keeps what the order was drawn from; or take a sampler with a state_dict; or save at ends of epochs",
            *(type(loader).__name__, key, type(drawing[0]).__name__),
        )


def go_on(key: str, item: Any, state: Any) -> None:
    """See to the next pass of a loader that has got its state. Warn if nothing is left of the one that it had begun."""
    if not isinstance(state, Mapping) or _FINISHED not in state:
        return
    loader = item.loader if isinstance(item, LoaderState) else item
    if loader is item and (passes := Passes.of(loader)) is not None:
        passes.load(state)
    if _num_batches(state) and not state[_FINISHED] and _is_complete(loader, state):
        logger.warning(
            "the %s at %r was saved when it had given the last batch of an epoch, and its pass had not ended: its next "
            "pass is the rest of that epoch, which is empty, and the one after it is the next epoch. A loop that has "
            "counted that epoch already loses one by it: save when the pass has ended, or count the epoch after it",
            *(type(loader).__name__, key),
        )


def _added(state: Mapping[str, Any]) -> Mapping[str, Any]:
    added: Mapping[str, Any] = state.get(_PASS, {})
    return added


def _num_batches(state: Any) -> int:
    """Return how many batches of the pass a StatefulDataLoader has given; 0 for a state of another kind."""
    if not isinstance(state, Mapping) or _FINISHED not in state:
        return 0
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])
    return int(state.get("_num_yielded", 0))


def _is_complete(loader: Any, state: Any) -> bool:
    """Return True if a loader has given all batches of the pass; False where nobody knows their number."""
    return not isinstance(loader.dataset, IterableDataset) and _num_batches(state) >= len(loader)


def _draws_its_order(part: Any) -> bool:
    if hasattr(part, "set_epoch") or hasattr(part, "state_dict") or type(part).__module__.startswith("torchdata."):
        return False
    return isinstance(part, _DRAWING) or isinstance(getattr(part, "generator", None), torch.Generator)


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield a loader and the samplers in it, each once, with the names that lead to it."""
    seen: list[Any] = []
    waiting = [("", loader)]
    while waiting:
        path, part = waiting.pop(0)
        if any(part is other for other in seen) or not hasattr(part, "__dict__"):
            continue
        seen.append(part)
        yield path, part
        waiting += [(f"{path}{name}.", vars(part)[name]) for name in _INNER if vars(part).get(name) is not None]


def _counters(loader: Any) -> dict[str, int]:
    return {
        f"{path}{name}": vars(part)[name]
        for path, part in _parts(loader)
        for name in _COUNTERS
        if type(vars(part).get(name)) is int
    }


def _set_counters(loader: Any, counters: Mapping[str, int]) -> None:
    for path, part in _parts(loader):
        for name in _COUNTERS:
            if f"{path}{name}" in counters:
                setattr(part, name, counters[f"{path}{name}"])


def _draw_seed(base: Any) -> None:
    """Draw the seed of workers, as torch does for each iterator."""
    torch.empty((), dtype=torch.int64).random_(generator=base.generator)


def _generators(loader: Any) -> dict[str, torch.Generator]:
    found = {path: vars(part).get("generator") for path, part in _parts(loader)}
    return {path: item for path, item in found.items() if isinstance(item, torch.Generator)}


def _generator_states(loader: Any) -> dict[str, torch.Tensor]:
    return {path: generator.get_state() for path, generator in _generators(loader).items()}


def _set_generators(loader: Any, states: Mapping[str, torch.Tensor]) -> None:
    for path, generator in _generators(loader).items():
        if path in states:
            generator.set_state(states[path])


def random_numbers() -> dict[str, Any]:
    """Return the random numbers of the process, without those of accelerators."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def set_random_numbers(state: Mapping[str, Any]) -> None:
    """Set them to what `random_numbers` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


@contextmanager
def _same_numbers() -> Iterator[None]:
    before = random_numbers()
    try:
        yield
    finally:
        set_random_numbers(before)
