"""torchtitan: a checkpoint manager for its Trainer that keeps checkpoints in a store, on a disk or in any cloud.

torchtitan is loaded with the manager, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptstore.runtime.lazy import exports

if TYPE_CHECKING:
    from ckptstore.integrations.torchtitan.manager import CkptstoreCheckpointManager

__all__ = ["CkptstoreCheckpointManager"]

__getattr__ = exports(__name__, {"CkptstoreCheckpointManager": "manager"}, extra="torchtitan")
