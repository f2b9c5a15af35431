"""For those who call `dcp.save` and `dcp.load` of torch themselves.

It may know saves, states and storages. It gives `StoreWriter`, `StoreReader` and `translated`, and the targets that a
writer takes. Modules load torch; importing the package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.dcp.store_reader import StoreReader, translated
    from ckptstore.dcp.store_writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter", "translated"]

__getattr__ = exports(
    __name__,
    {"StoreReader": "store_reader", "StoreWriter": "store_writer", "translated": "store_reader"},
    extra="torch",
)
