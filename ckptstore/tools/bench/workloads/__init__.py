"""Workloads that are measured without a peer: listings, growth with ranks and files, simulated ranks.

It may know places and measures. It gives `ckptstore.tools.bench.run` what to run.
"""
