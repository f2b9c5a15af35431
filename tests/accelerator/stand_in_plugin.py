"""For `pytest -p stand_in_plugin`: a process whose accelerator is the stand-in.

With STAND_IN_DEFAULT=standin:1 every test runs with that as torch's default device, so that the states of tests that
know nothing of it lie there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ckptstore.testing import accelerator

accelerator.load()
_DEFAULT = os.environ.get("STAND_IN_DEFAULT")
if _DEFAULT is not None:
    accelerator.draw_from_host()  # they set and get the host's random numbers


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    """Each test begins on device 0, with nothing to be done on any device."""
    accelerator.synchronize()
    torch.accelerator.set_device_index(0)
    accelerator.forget_contexts()
    if _DEFAULT is None:
        yield
    else:
        with torch.device(_DEFAULT):
            yield
