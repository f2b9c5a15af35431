"""Tensor state: what a nested state becomes on disk, and how any number of ranks gets it back.

`StoreWriter`, `StoreReader` and `translated` are for those who call `dcp.save` and `dcp.load` themselves; `replicated`
says of a tensor that it is the same on all ranks. Submodules load torch; importing the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.lazy import exports

if TYPE_CHECKING:
    from ckptstore.state.dcp_reader import StoreReader, translated
    from ckptstore.state.dcp_writer import StoreWriter
    from ckptstore.state.flatten import replicated

__all__ = ["StoreReader", "StoreWriter", "replicated", "translated"]

__getattr__ = exports(
    __name__,
    {
        "StoreReader": "dcp_reader",
        "StoreWriter": "dcp_writer",
        "replicated": "flatten",
        "translated": "dcp_reader",
    },
)
