"""Let the ranks of a job agree, by one collective: the meeting.

A process may be alone (`SoloGroup`), or ranks meet through torch.distributed's key-value store or through the storage
itself (`StorageGroup`).
Importing this package loads no torch.
"""

from ckptstore.group.base import Group, SoloGroup
from ckptstore.group.find import SOLO, check_shared, find_group, has_torch_group
from ckptstore.group.meeting import Meeting
from ckptstore.group.storage_group import StorageGroup

__all__ = [
    "SOLO",
    "Group",
    "Meeting",
    "SoloGroup",
    "StorageGroup",
    "check_shared",
    "find_group",
    "has_torch_group",
]
