"""Capabilities that stand on the core, which is whole without them: each imports the core, and none another one.

Two exceptions: `tier` uses the connections of `peers`, and `publication` the safetensors and casts of `exchange`.
"""
