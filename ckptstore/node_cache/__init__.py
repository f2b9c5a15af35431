"""The node cache: one downloaded copy of a checkpoint per node, shared by its processes.

    <cache_dir>/<key>/               a finished copy; appears whole, by a rename
    <cache_dir>/.tmp-<id>/           a download, or a copy on its way out; private to one process
    <cache_dir>/locks/<key>.lock     locked by the process that downloads; <key>.holder names it, for messages only
    <cache_dir>/leases/<key>.lease   locked shared by every process that reads the copy; holds its size
    <cache_dir>/leases/tmp-<id>      locked by the owner of `.tmp-<id>`

The files in locks/ and leases/ are removed with their copy; a process that opened one before notices by its inode.

All locks are of the kernel, which releases them when a process dies. Correctness does not depend on the download lock:
a download is verified and then renamed, and of two downloads the first rename wins. `cache` has the download, `place`
the directory, `readers` the leases, `eviction` the removal of copies.
"""

from __future__ import annotations

from ckptstore.node_cache.cache import NodeCache
from ckptstore.node_cache.place import copy_key, root_of

__all__ = ["NodeCache", "copy_key", "root_of"]
