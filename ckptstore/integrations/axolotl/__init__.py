"""Axolotl: `plugins: [ckptstore.integrations.axolotl.CkptstorePlugin]` in the YAML, and the store beside it.

Axolotl is loaded with the plugin, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.axolotl.plugin import CkptstorePlugin

__all__ = ["CkptstorePlugin"]

__getattr__ = exports(__name__, {"CkptstorePlugin": "plugin"}, extra="transformers")
