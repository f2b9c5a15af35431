"""The benchmark suite: ckptstore beside its peers and the limits of the machine, in one run.

`ckptstore bench` and `pytest benchmarks/` are two faces of it. `run` asks for workloads and gives a `Report`; the rest
reads reports: `figures.compare`, `figures.page` (HTML), `figures.floors`.
"""
