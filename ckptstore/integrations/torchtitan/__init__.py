"""torchtitan: a checkpoint manager for its Trainer that keeps checkpoints in a store, on a disk or in any cloud.

torchtitan is loaded with the manager, on first use.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torchtitan")
