"""The contenders: ckptstore, systems that do the same, and the limits of the machine.

Each is a small class that calls the other's own functions with its own documented settings, of which trials choose the
best. `registry` lists the contenders of a workload.
"""
