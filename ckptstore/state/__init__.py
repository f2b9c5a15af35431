"""Tensor state: what a nested state becomes on disk, and how any number of ranks gets it back.

`StoreWriter`, `StoreReader` and `translated` are for those who call `dcp.save` and `dcp.load` themselves; `replicated`
says of a tensor that it is the same on all ranks. Submodules load torch; importing the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptstore.state.dcp_reader import StoreReader, translated
    from ckptstore.state.dcp_writer import StoreWriter
    from ckptstore.state.flatten import replicated

__all__ = ["StoreReader", "StoreWriter", "replicated", "translated"]

_PLACES = {
    "StoreReader": "dcp_reader",
    "StoreWriter": "dcp_writer",
    "replicated": "flatten",
    "translated": "dcp_reader",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
