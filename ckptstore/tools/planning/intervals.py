"""The best time between two saves, from what a save costs and how often the job fails. Pure.

Both formulas take failures that come independently of each other, at a constant rate. The cost of a save is the time
that it takes from the training: with saves in the background that is the stall, not the time until the save is
complete. That time adds the same loss to each failure, at any interval, so it does not move the optimum.
"""

from __future__ import annotations

import math

YOUNG = "Young 1974: sqrt(2 * stall * MTBF)"
YOUNG_SOURCE = (
    "J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17(9), 1974"
)
DALY = (
    "Daly 2006: sqrt(2 * stall * MTBF) * (1 + sqrt(stall / (2 * MTBF)) / 3 + stall / (2 * MTBF) / 9) - stall;"
    " MTBF where the stall is at least 2 * MTBF"
)
DALY_SOURCE = (
    "J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,"
    " Future Generation Computer Systems 22(3), 2006"
)


def young_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the best time of training between two saves to the first order: Young 1974."""
    return math.sqrt(2 * stall_seconds) * math.sqrt(mtbf_seconds)


def daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the best time of training between two saves to a higher order: Daly 2006.

    It is shorter than Young's by at most the stall. Where nothing fails it is infinite.
    """
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    if math.isinf(mtbf_seconds):
        return 0.0 if stall_seconds == 0 else math.inf
    ratio = stall_seconds / mtbf_seconds / 2
    return young_seconds(stall_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
