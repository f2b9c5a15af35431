"""One case as plain data: what a state holds, how it lives, is saved and is loaded. Drawn from a seed, made smaller,
printed and read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any

from ckptstore.testing.states.module_makers import DIVIDING, MODULES, NEEDS_GROUP, NEEDS_RANKS, WRAPPERS
from ckptstore.testing.states.optimizer_makers import GROUPINGS, OPTIMIZERS
from ckptstore.testing.states.tensor_makers import TARGETS, TENSORS
from ckptstore.testing.states.value_makers import VALUES

FLAGS = ("tie", "share", "first layer", "last layer", "no head", "renamed head", "renamed body", "over one", "frozen")
"""What a program may be built with: two tied layers, a layer that two modules share, a layer more, one fewer, another
name, an optimizer over the first module only, a frozen body."""
CHANGES = ("", *FLAGS, "unwrapped")
"""The flag in which the program that loads differs from the one that saved."""
EVENTS = ("step", "zero step", "lower lr", "freeze", "thaw", "drop optimizer state", "swap storages")
BETWEEN = ("step", "overwrite", "overwrite one tensor")
"""What happens last before the second of two incremental saves; `life` has them too."""
LATER = ("step", "zero step", "lower lr", "drop optimizer state", "overwrite")
MEANWHILE = ("", "step", "overwrite")
EXTRAS = ("scheduler", "one cycle", "plateau", "scaler", "rng", "loader", "per rank loader")
SAVES = ("save", "save_async", "incremental", "incremental async")
CONTEXTS = ("", "inference_mode", "no_grad", "default float64", "default meta")


@dataclass(frozen=True, slots=True)
class StateCase:
    """One program, its life, a save, and a load."""

    seed: int
    num_ranks: int = 1
    """In how many processes it runs at once. Each rank has the same modules, and raw tensors and values of its own."""
    device: str = ""
    """Where modules and tensors are made, "" for the host."""
    modules: tuple[str, ...] = ()
    """Of `MODULES`; the first stands in the state as "a", the second as "b"."""
    bare: bool = False
    """Whether the modules stand there themselves, not as the body of a network with more layers."""
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
    """What the program does after the call of save_async returns, before the checkpoint is committed."""
    later: tuple[str, ...] = ()
    """What a running program does between the save and the load into it."""
    into: str = "fresh"
    change: str = ""
    target: str = "zeros"
    """Of `TARGETS`, or "one memory": what raw tensors are loaded into by a fresh program."""
    strict: bool = True
    context: str = ""

    def to_json(self) -> str:
        """Return the case as text, without the fields that have their defaults."""
        plain = StateCase(self.seed)
        told = {key: value for key, value in asdict(self).items() if value != getattr(plain, key) or key == "seed"}
        return json.dumps(told)

    @staticmethod
    def from_json(text: str) -> StateCase:
        """Return the case of a text. Raises ValueError for a field that there is not."""
        told: dict[str, Any] = json.loads(text)
        if unknown := told.keys() - {field.name for field in fields(StateCase)}:
            raise ValueError(f"a case has no field {min(unknown)!r}")
        given: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in told.items()}
        return StateCase(**given)


def draw(seed: int, *, num_ranks: int = 1, device: str = "") -> StateCase:
    """Return the case of a seed; the same for ever as long as the tables stay the same.

    With several ranks modules are wrapped and trained more often, and the program that loads is built as the one that
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
    if change in ("tie", "share"):
        has_optimizer = False  # whose moments belong to which of two layers is nobody's promise
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
        extras=some(EXTRAS, 0, 0, 1, 2),
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
    if case.optimizer in ("zero redundancy", "sparse adam") and (wrapper in DIVIDING or device):
        case = replace(case, optimizer="adamw")  # who divides parameters needs no optimizer that does, nor sparse parts
    if several and wrapper in DIVIDING:  # torch raises of quantised modules, on the ranks that have a part of them
        case = replace(case, modules=tuple("linear" if name == "quantised" else name for name in modules))
    if save.startswith("incremental"):
        return replace(case, life=(*(case.life or ("step",)), random.choice(BETWEEN)))
    return case
