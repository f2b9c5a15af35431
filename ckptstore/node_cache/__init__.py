"""The node cache: one downloaded copy of a checkpoint per node, shared by its processes.

    <cache_dir>/<key>/               a finished copy; appears whole, by a rename
    <cache_dir>/.tmp-<id>/           a download, or a copy on its way out; private to one process
    <cache_dir>/locks/<key>.lock     whose turn it is to download; <key>.holder says who that is, for messages only
    <cache_dir>/leases/<key>.lease   locked shared by every process that reads the copy; holds its size
    <cache_dir>/leases/tmp-<id>      locked by the owner of `.tmp-<id>`

What lies in locks/ and leases/ goes with its copy; whoever opened it before finds that out by its inode.

All locks are of the kernel, which releases them when a process dies. Nothing that must hold rests on the turn: a
download is verified and then renamed, and of two downloads the first rename wins. `cache` has the story, `place` the
directory, `readers` the leases, `eviction` what goes and when.
"""

from __future__ import annotations

from ckptstore.node_cache.cache import NodeCache
from ckptstore.node_cache.place import copy_key

__all__ = ["NodeCache", "copy_key"]
