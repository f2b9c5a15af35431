"""Ranks of the cases. At small sizes they are forked: else most of the time would be the imports of each rank."""

from __future__ import annotations

import sys
from pathlib import Path

from sizes import FULL

from ckptstore import testing

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import forked_ranks

run_ranks = testing.run_ranks if FULL else forked_ranks.run_ranks
