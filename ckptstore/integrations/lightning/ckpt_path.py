"""Say what the `ckpt_path` of a Trainer's methods means: "last" of a store, and a place in one, which is refused.

Lightning looks for the "last" checkpoint in `ModelCheckpoint` alone, and goes on with untrained weights where it finds
none. It calls no hook before it has chosen the file, so its choice itself is wrapped, in a class that is private.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.format.layout import (
    DCP_METADATA_NAME,
    MANIFEST_NAME,
    RESERVED_NAMES,
    STORE_KEY,
    Attempt,
    store_of,
)

logger = logging.getLogger("ckptstore.lightning")

_CONNECTORS = [f"{name}.trainer.connectors.checkpoint_connector" for name in ("lightning.pytorch", "pytorch_lightning")]
_NONE_FOUND = r".*there is no last checkpoint available"


def watch_trainers() -> None:
    """Have the Trainers of this process choose by `_chosen`. Does nothing where Lightning is not loaded."""
    for name in _CONNECTORS:
        connector = getattr(sys.modules.get(name), "_CheckpointConnector", None)
        if connector is None:
            continue
        select = getattr(connector, "_select_ckpt_path", None)  # there is no public way; a release may lack this name
        if select is None:
            logger.warning("this release of Lightning does not find the last checkpoint of a store by ckpt_path='last'")
        elif not hasattr(select, "__wrapped__"):
            setattr(connector, "_select_ckpt_path", _wrapped(select))  # noqa: B010 - a private name


def _wrapped(select: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(select)
    def choose(connector: Any, state_fn: Any, ckpt_path: Any, *args: Any, **keywords: Any) -> Any:
        def of_lightning() -> Any:
            return select(connector, state_fn, ckpt_path, *args, **keywords)

        return _chosen(connector.trainer, ckpt_path, of_lightning, fits=state_fn.value == "fit")

    return choose


def _chosen(trainer: Any, ckpt_path: Any, of_lightning: Callable[[], Any], *, fits: bool) -> Any:
    """Return the path that Lightning reads, None for none. Raises InvalidInput for a place in a store, and for "last"
    of a store that is empty where nothing is trained."""
    ours = [callback for callback in trainer.callbacks if hasattr(callback, "last_to_fit")]
    if ckpt_path == "last" and ours:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _NONE_FOUND)  # it does not know of the store
            found = of_lightning()
        found = _last_to_fit(ours, found) if fits else _last_to_read(ours, found)
    else:
        if ckpt_path == "best" and fits and trainer.checkpoint_callback in ours:
            trainer.checkpoint_callback.check_best_fits()
        found = of_lightning()
    if found:
        _check_is_of_lightning(os.fspath(found), fits=fits, has_callback=bool(ours))
    for callback in ours:
        callback.reads = found
    return found


def _last_to_fit(ours: Sequence[Any], found: Any) -> Any:
    """Return the path from which a training goes on; None or Lightning's own file if the callback itself resumes."""
    whole = [callback for callback in ours if not callback.weights_only]
    return (whole or ours)[0].last_to_fit(found)


def _last_to_read(ours: Sequence[Any], found: Any) -> Any:
    """Return the file of the newest checkpoint, among several places by time, as Lightning compares its own."""
    latest = [(checkpoint, callback) for callback in ours if (checkpoint := callback.store.latest()) is not None]
    if not latest:
        if found is None:
            raise InvalidInput(
                "ckpt_path='last', and the store has no checkpoint",
                hint="Leave out ckpt_path to measure the model as it is",
            )
        return found
    checkpoint, callback = max(latest, key=lambda item: item[0].created_at)
    is_newer = found and os.path.exists(found) and os.path.getmtime(found) > checkpoint.created_at
    return found if is_newer else callback.file_of(checkpoint)


def _check_is_of_lightning(path: str, *, fits: bool, has_callback: bool) -> None:
    """Raise InvalidInput for a store, for the directory of a checkpoint, and for a file that a state has there."""
    path = path.rstrip("/") or path
    where, _, name = path.rpartition("/")
    is_state_file = name in {*RESERVED_NAMES, DCP_METADATA_NAME, "tensors.index"} or name.endswith(".distcp")
    checkpoint = where if is_state_file else path
    store = store_of(checkpoint)
    if store is None and os.path.isfile(os.path.join(path, STORE_KEY)):
        store, what = path, "a store"
    elif store is None and not os.path.isfile(os.path.join(checkpoint, MANIFEST_NAME)):
        return
    else:
        what = "a file of a checkpoint in a store" if is_state_file else "a checkpoint of a store"
    attempt = Attempt.parse(checkpoint.rpartition("/")[2])
    raise InvalidInput(
        f"ckpt_path={path!r} is {what}, and Lightning reads its own files alone",
        step=None if attempt is None else attempt.step,
        hint=_hint(store, checkpoint, fits=fits, has_callback=has_callback),
    )


def _hint(store: str | None, checkpoint: str, *, fits: bool, has_callback: bool) -> str:
    files = [] if not os.path.isdir(checkpoint) else sorted(os.listdir(checkpoint))
    theirs = next((name for name in files if name.endswith(".ckpt")), None)
    if theirs is not None:
        return f"Give {checkpoint}/{theirs}"
    callback = f"callbacks=[CheckpointStoreCallback({store or 'the store'!r})]"
    start = "With its CheckpointStoreCallback" if has_callback else f"Give the Trainer {callback}: then"
    if fits:
        return (
            f"{start} ckpt_path='last' goes on from the newest checkpoint of the store; for an older one call "
            "store.roll_back(step) before"
        )
    load = (
        ""
        if store == checkpoint
        else f", or load this one: Checkpoint.from_uri({checkpoint!r}).load({{'model': model}})"
    )
    return f"{start} ckpt_path='last' and 'best' read the store{load}"
