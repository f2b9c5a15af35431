"""Who takes part: ckptstore, others that do the same, and what the machine does without any of them.

Each is a small class that calls the other's own functions with its own documented settings; what is best among these is
found by trying. `contenders` says who takes part in a workload.
"""
