"""For `pytest -p stand_in_plugin`: a process whose accelerator is the stand-in.

With STAND_IN_DEFAULT=standin:1 every test runs with that as torch's default device, so that the states of tests that
know nothing of it lie there; with STAND_IN_DEFAULT="test_x.py=standin:1 test_y.py=standin:0" those of some files do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from kit import accelerator

accelerator.load()
_WORDS = os.environ.get("STAND_IN_DEFAULT", "").split()
_DEFAULTS = {file: device for file, _, device in (f"={word}".rpartition("=") for word in _WORDS)}
"""By the name of a file, after "="; "" stands for all."""


@pytest.fixture(autouse=True)
def _stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins on device 0, with nothing to be done on any device."""
    accelerator.synchronize()
    torch.accelerator.set_device_index(0)
    accelerator.forget_contexts()
    default = _DEFAULTS.get(f"={request.path.name}", _DEFAULTS.get(""))
    if default is None:
        yield
    else:
        accelerator.draw_from_host()  # they set and get the host's random numbers
        with torch.device(default):
            yield
