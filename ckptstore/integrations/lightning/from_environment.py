"""Create the callback for a program that does not name it: Lightning finds this by the package's entry points.

No Trainer gets it unless `CKPTSTORE_LIGHTNING_STORE` is set; then every one of the program does. Without it, a
`ckpt_path` that is a place in a store is refused with what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.integrations.lightning.ckpt_path import watch_trainers

STORE, KEEP, EVERY = "CKPTSTORE_LIGHTNING_STORE", "CKPTSTORE_LIGHTNING_KEEP", "CKPTSTORE_LIGHTNING_EVERY_N_TRAIN_STEPS"
_PREFIX = "CKPTSTORE_LIGHTNING_"


def callbacks(environ: Mapping[str, str] | None = None) -> list[Any]:
    """Return a `CheckpointStoreCallback` for the store that the environment names; an empty list without one.

    Variables that begin with `CKPTSTORE_LIGHTNING_FAST` describe a fast tier. Raises InvalidInput for an unreadable
    value, and for an unknown variable with this prefix.
    """
    watch_trainers()
    environ = os.environ if environ is None else environ
    variables = {name: value for name, value in environ.items() if name.startswith(_PREFIX)}
    if not variables:
        return []

    from ckptstore.integrations.tier_settings import FAST_SETTINGS, tier_of

    known = [STORE, KEEP, EVERY, *map(_variable, FAST_SETTINGS)]
    unknown = sorted(variables.keys() - {*known})
    if unknown or not variables.get(STORE):
        what = f"{unknown[0]} is no variable of ckptstore" if unknown else f"{STORE} is missing"
        raise InvalidInput(what, hint=f"There are {', '.join(known)}")
    steps = variables.get(EVERY)
    if steps is not None and not (steps.isdecimal() and int(steps) > 0):
        raise InvalidInput(f"{EVERY}={steps!r} is no number above 0")

    from ckptstore.integrations.lightning import CheckpointStoreCallback
    from ckptstore.retention import parse_policy

    keep = parse_policy(variables.get(KEEP, ""))
    tier = tier_of({name: variables.get(_variable(name)) for name in FAST_SETTINGS}, shown=_variable)
    options: dict[str, Any] = {} if keep is None else {"retention": keep}
    options |= {} if tier is None else {"fast": tier}
    return [
        CheckpointStoreCallback(variables[STORE], every_n_train_steps=None if steps is None else int(steps), **options)
    ]


def _variable(setting: str) -> str:
    return f"{_PREFIX}{setting.upper()}"
