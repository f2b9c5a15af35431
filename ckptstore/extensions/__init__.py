"""Capabilities that stand on the core, which is whole without them: each imports the core, and none another one.

Only `tier` and `publication` may use `peers`.
"""
