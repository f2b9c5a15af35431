"""Workloads without a peer: listings, growth with ranks and files, simulated ranks.

It may know places and measures. `ckptstore.tools.bench.run` runs them.
"""
