"""Copy checkpoints to other places, and convert states to and from the files of other tools.

It may know stores, checkpoints and states. It gives users `export` and `import_state`, and the command line copies of
checkpoints and stores too.
"""

from ckptstore.runtime.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, extra="torch")
