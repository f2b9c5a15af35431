"""The benchmark suite: ckptstore, its peers and the limits of the machine, in one run.

`ckptstore bench` and `pytest benchmarks/` are its two faces. `run` measures workloads and returns a `Report`; the rest
reads reports: `figures.compare`, `figures.page` (HTML), `figures.floors`.
"""
