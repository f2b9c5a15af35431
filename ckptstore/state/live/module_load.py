"""Loading of a module: its own memory is filled; extra state and hooks follow."""

from __future__ import annotations

from typing import Any

import torch

from ckptstore.runtime.torch_private import fsdp1_ties
from ckptstore.state.live.contents import StoredContents
from ckptstore.state.live.matching import Matching
from ckptstore.state.live.meta import Materialised, materialise
from ckptstore.state.live.modules import read_module, shows, uses_fsdp1, with_new_memory, write_module
from ckptstore.state.live.units import Unit
from ckptstore.state.tensors.overlap import identity_of

EXTRA_STATE = "_extra_state"
"""The name that torch uses for the entry of a module's `get_extra_state`."""


class ModuleLoad:
    """One module of the state. Parts of it that are on the meta device get memory first."""

    def __init__(self, unit: Unit, matching: Matching, *, device: torch.device | None) -> None:
        self._unit = unit
        self.materialised = Materialised(lambda: None)
        self._is_wanted = matching.includes_below(unit.key)
        if not self._is_wanted:
            return
        # FSDP1 shows nothing that is on the meta device; all others show the part of it that is in the state.
        contents = None if uses_fsdp1(unit.item) else read_module(unit.key, unit.item)
        self.materialised = materialise(unit.key, unit.item, device, None if contents is None else contents.items)
        try:
            if contents is None:
                self._contents = read_module(unit.key, unit.item)
            else:
                self._contents = with_new_memory(unit.key, unit.item, contents)
            self._ties = self._match_tensors(matching)
        except BaseException:
            self.materialised.release()
            raise
        self._others = {
            name: StoredContents((*unit.path, name), item, matching, fixed=False, device=device)
            for name, item in self._contents.items.items()
            if not _is_tensor(name, item)
        }

    def finish(self) -> None:
        """Pass the module its state, which runs its hooks. Collective under FSDP1."""
        if not self._is_wanted:
            return
        loaded: dict[str, Any] = {name: contents.result() for name, contents in self._others.items()}
        for names in self._ties:  # FSDP1 shows a copy under each name, of which the first was filled
            loaded.update(dict.fromkeys(names[1:], self._contents.items[names[0]]))
        write_module(self._unit.key, self._unit.item, self._contents, loaded)

    def abandon(self) -> None:
        """Take away the memory that meta tensors received."""
        self.materialised.release()

    def _match_tensors(self, matching: Matching) -> list[list[str]]:
        ties: dict[Any, list[str]] = {}
        named = fsdp1_ties(self._unit.item) if uses_fsdp1(self._unit.item) else {}
        for name, item in self._contents.items.items():
            if _is_tensor(name, item):
                known = self._contents.items.get(named.get(name, name), item)
                ties.setdefault(identity_of(self._contents.live.get(name, known)), []).append(name)
        for names in ties.values():
            item, live = self._contents.items[names[0]], self._contents.live.get(names[0])
            is_copy = live is not None and not shows(item, live)
            keys = [f"{self._unit.key}.{name}" for name in names]
            matching.take_tensor(keys, item, live=live if is_copy else None)
        return [names for names in ties.values() if len(names) > 1]


def _is_tensor(name: str, item: Any) -> bool:
    """Return True if an item is a tensor of the module itself. A tensor that is its extra state may have any other
    shape or kind in the checkpoint, or be missing: the module's own `set_extra_state` decides about it."""
    return isinstance(item, torch.Tensor) and name.rpartition(".")[2] != EXTRA_STATE
