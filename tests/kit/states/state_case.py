"""Describe one case as plain data: the contents of a state, its life, its save and its load. Drawn from a seed, shrunk,
printed and read back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any

from kit.states.module_makers import DIVIDING, MODULES, NEEDS_GROUP, NEEDS_RANKS, WRAPPERS
from kit.states.object_makers import SCHEDULERS, WRITERS
from kit.states.optimizer_makers import GROUPINGS, OPTIMIZERS
from kit.states.tensor_makers import TARGETS, TENSORS
from kit.states.upgraded_makers import UPGRADED
from kit.states.value_makers import VALUES

FLAGS = ("tie", "share", "first layer", "last layer", "no head", "renamed head", "renamed body", "over one", "frozen")
"""Options of a program: two tied layers, a layer that two modules share, a layer more, one fewer, another name, an
optimizer over the first module only, a frozen body.
"""
CHANGES = ("", *FLAGS, "unwrapped", "upgraded")
"""The flag in which the program that loads differs from the one that saved."""
EVENTS = ("step", "zero step", "lower lr", "freeze", "thaw", "drop optimizer state", "swap storages")
BETWEEN = ("step", "overwrite", "overwrite one tensor")
"""The last event before the second of two incremental saves; `life` has them too."""
LATER = ("step", "zero step", "lower lr", "drop optimizer state", "overwrite")
MEANWHILE = ("", "step", "overwrite")
EXTRAS = ("scaler", "rng", "loader", "per rank loader", "second optimizer", *SCHEDULERS, *WRITERS)
SAVES = ("save", "save_async", "incremental", "incremental async")
CONTEXTS = ("", "inference_mode", "no_grad", "default float64", "default meta")


@dataclass(frozen=True, slots=True)
class StateCase:
    """One program, its life, a save, and a load."""

    seed: int
    num_ranks: int = 1
    """The number of processes. Each rank has the same modules, and raw tensors and values of its own."""
    device: str = ""
    """Device of modules and tensors, "" for the host."""
    modules: tuple[str, ...] = ()
    """Names from `MODULES`; the first has the key "a", the second "b"."""
    bare: bool = False
    """True if the modules are not the body of a network with more layers."""
    wrapper: str = ""
    flags: tuple[str, ...] = ()
    optimizer: str = ""
    grouping: str = "one"
    extras: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    life: tuple[str, ...] = ()
    save: str = "save"
    stock_readable: bool = True
    storage: str = "disk"
    meanwhile: str = ""
    """The program's event after the call of save_async returns, before the checkpoint is committed."""
    later: tuple[str, ...] = ()
    """The events of a running program between the save and the load into it."""
    into: str = "fresh"
    change: str = ""
    target: str = "zeros"
    """A name from `TARGETS`, or "one memory": the target of raw tensors in a fresh program."""
    strict: bool = True
    context: str = ""

    def to_json(self) -> str:
        """Return the case as text, without the fields that have their defaults."""
        plain = StateCase(self.seed)
        values = {key: value for key, value in asdict(self).items() if value != getattr(plain, key) or key == "seed"}
        return json.dumps(values)

    @staticmethod
    def from_json(text: str) -> StateCase:
        """Read a case from text. Raises ValueError for an unknown field."""
        values: dict[str, Any] = json.loads(text)
        if unknown := values.keys() - {field.name for field in fields(StateCase)}:
            raise ValueError(f"a case has no field {min(unknown)!r}")
        arguments: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in values.items()
        }
        return StateCase(**arguments)


def draw(seed: int, *, num_ranks: int = 1, device: str = "") -> StateCase:
    """Return the case of a seed; the same for ever as long as the tables stay the same.

    With several ranks modules are wrapped and trained more often, and the program that loads is built like the one that
    saved.
    """
    random = Random(seed)
    several = num_ranks > 1
    absent = NEEDS_GROUP if device else frozenset() if several else NEEDS_RANKS  # gloo is for the host
    wrappers = [name for name in WRAPPERS if name not in absent]

    def some(table: Any, *counts: int) -> tuple[str, ...]:
        return tuple(random.choice(list(table)) for _ in range(random.choice(counts)))

    modules = some(MODULES, 0, *(1, 1, 1, 1, 1, 1) * several, 1, 1, 1, 2)
    has_optimizer = bool(modules) and random.random() < (0.9 if several else 0.7)
    into = "running" if random.random() < 0.3 else "fresh"
    change = random.choice(CHANGES) if into == "fresh" and modules and random.random() < 0.4 and not several else ""
    if into == "fresh" and modules and not several and random.random() < 0.1:
        change = "upgraded"
    if change == "upgraded":
        modules = (random.choice(list(UPGRADED)), *modules[1:])
    if change in ("tie", "share", "upgraded"):
        has_optimizer = False  # no rule says which of two layers owns the moments, nor what becomes of them
    wrapper = random.choice(wrappers) if modules and random.random() < (0.9 if several else 0.4) else ""
    save = random.choice((*SAVES, "save", "save_async"))
    case = StateCase(
        seed,
        num_ranks=num_ranks,
        device=device,
        modules=modules,
        bare=not change and random.random() < 0.4,
        wrapper="compile" if change == "unwrapped" else wrapper,
        flags=tuple(flag for flag in FLAGS if random.random() < 0.12) if modules else (),
        optimizer=random.choice(list(OPTIMIZERS)) if has_optimizer else "",
        grouping=random.choice(("one", "named") if change else GROUPINGS),
        extras=some(EXTRAS, 0, 0, 1, 2, 3),
        tensors=some(TENSORS, 0, 0, 1, 2) if modules else some(TENSORS, 1, 2, 3),
        values=some(VALUES, 0, 0, 1, 2) if modules else some(VALUES, 0, 1, 2),
        life=(*("step",) * several, *some(EVENTS, 0, 1, 1, 2, 3)) if modules else (),
        save=save,
        stock_readable=random.random() < 0.5,
        storage="disk" if several else random.choice(("disk", "memory")),
        meanwhile=random.choice(MEANWHILE) if save.endswith("async") else "",
        later=some(LATER, 0, 1, 2) if into == "running" else (),
        into=into,
        change=change,
        target="zeros" if random.random() < 0.5 else random.choice([*TARGETS, "one memory"]),
        strict=not change or random.random() < 0.3,
        context="" if random.random() < 0.8 else random.choice(CONTEXTS),
    )
    if case.optimizer in ("zero redundancy", "sparse adam", "shared state") and (wrapper in DIVIDING or device):
        # Sharded parameters need no optimizer that shards, nor sparse parts; FSDP1 copies what parameters share.
        case = replace(case, optimizer="adamw")
    if change == "upgraded" and wrapper.startswith("fsdp1"):  # under which no hook is tried
        case = replace(case, modules=("log scale",) * len(modules))
    if several and wrapper in DIVIDING:  # torch raises of quantised modules, on the ranks that have a part of them
        case = replace(case, modules=tuple("linear" if name == "quantised" else name for name in modules))
    if save.startswith("incremental"):
        return replace(case, life=(*(case.life or ("step",)), random.choice(BETWEEN)))
    return case
