"""Check for users that their own state comes back from ckptstore as from torch.save."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ckptstore.opening import open_store
from ckptstore.runtime.extras import needs

needs("torch")

import torch  # noqa: E402

from ckptstore.testing.oracle import difference, frozen, give_back, keep, kept_in, observed  # noqa: E402


class StateDiffers(AssertionError):
    """Raised when ckptstore restores another state than torch, or a save changes the state."""


def check(
    state: Mapping[str, Any],
    *,
    make: Callable[[], Mapping[str, Any]],
    step: Callable[[Mapping[str, Any]], object] | None = None,
    allow_pickle: bool = False,
) -> None:
    """Save `state` with `save`, with `save_async` and with `torch.save`, load each, and compare them bit by bit.

    Every process does so for itself, in a temporary directory that is removed at the end. Only `step` trains, on the
    states of `make`.

    Args:
        state: the argument of `store.save`; it may have been trained. It is not changed.
        make: returns a state as in a restarted process: the same keys, fresh objects. It is called twice
            for each way to save, with the same random numbers.
        step: does a training step with such a state; its changes are compared too. It must do the same each time.
        allow_pickle: as for `store.save` and `store.load`.

    Raises StateDiffers, with the first key that differs; the errors of `store.save` and `store.load`; and torch's error
    when it cannot load the state itself.
    """
    saved, before = keep(state), frozen(observed(state))
    with tempfile.TemporaryDirectory(prefix="ckptstore-states-") as directory:
        for number, how in enumerate(("save", "save_async")):
            with open_store(f"{directory}/{how}", group="solo", durable=False) as store:
                if how == "save":
                    store.save(number, state, allow_pickle=allow_pickle)
                else:
                    store.save_async(number, state, allow_pickle=allow_pickle).result()
                _refuse(difference(observed(state), before), f"{how} changes the state")
                ours, theirs = _seeded(make), _seeded(make)
                if ours.keys() != state.keys():
                    raise StateDiffers(f"make returns the keys {sorted(ours)}, and the state has {sorted(state)}")
                give_back(theirs, kept_in(saved))
                store.load(ours, allow_pickle=allow_pickle)
            _refuse(
                difference(observed(ours), observed(theirs)), f"what {how} stored is loaded otherwise than by torch"
            )
            if step is not None:
                for each in (ours, theirs):
                    _seeded(lambda each=each: step(each))  # type: ignore[misc]
                _refuse(difference(observed(ours), observed(theirs)), f"a step after the load of {how} differs")


def _refuse(found: str | None, what: str) -> None:
    if found:
        raise StateDiffers(f"{what}: {found}")


def _seeded(call: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return call()
