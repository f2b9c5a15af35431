"""How the ranks of a job agree: one collective, `exchange`, over whatever they have in common.

Alone (`SoloGroup`), through torch.distributed's key-value store, or through the storage itself (`StorageGroup`).
Importing this package loads no torch.
"""

from ckptstore.group.base import Group, Join, SoloGroup, Work
from ckptstore.group.board_group import BoardGroup
from ckptstore.group.find import SOLO, check_shared, find_group, has_torch_group
from ckptstore.group.keys import DRAIN_LANE
from ckptstore.group.storage_board import StorageGroup, leftover_prefixes
from ckptstore.runtime.beat import Beat

__all__ = [
    "DRAIN_LANE",
    "SOLO",
    "Beat",
    "BoardGroup",
    "Group",
    "Join",
    "SoloGroup",
    "StorageGroup",
    "Work",
    "check_shared",
    "find_group",
    "has_torch_group",
    "leftover_prefixes",
]
