"""What the machine can do; it lives in the package, where `ckptstore bench` uses it too."""

from ckptstore.bench.raw import MIB, Memory, Way, best_ways, copy, quickest, read_into, settle, ways

__all__ = ["MIB", "Memory", "Way", "best_ways", "copy", "quickest", "read_into", "settle", "ways"]
