"""Public names for checkpoints of Ray Train runs; `ckptstore.integrations.ray` defines them.

It can be imported where Ray is not installed: a training function that runs under torchrun, or in a plain process,
calls the same names.
"""

from ckptstore.integrations.ray import __all__ as __all__
from ckptstore.integrations.ray import __dir__ as __dir__
from ckptstore.integrations.ray import __getattr__ as __getattr__
