"""The programs for people: the command line, `ckptstore run`, reports, watching, the benchmarks, the demo.

The core imports nothing of it.
"""
