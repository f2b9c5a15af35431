"""Axolotl: `plugins: [ckptstore.integrations.axolotl.CkptstorePlugin]` in the YAML, and the store beside it.

Axolotl is loaded with the plugin, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="transformers")
