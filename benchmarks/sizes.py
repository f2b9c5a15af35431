"""The sizes of the cases.

A case measures what `ckptstore bench` does not. It never fails for being slow. `CKPTSTORE_BENCH=full`, which `make
bench` sets, takes the real sizes; else they are small and only show that the cases run.
"""

from __future__ import annotations

import os

FULL = os.environ.get("CKPTSTORE_BENCH") == "full"
ROUNDS = int(os.environ.get("CKPTSTORE_BENCH_ROUNDS", "7" if FULL else "1"))
