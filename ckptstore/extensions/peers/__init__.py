"""Connections between processes, and nodes that give each other extents of a checkpoint that all of them read.

`channel` has the proofs and the messages, `line_server` and `line_client` the two ends of a connection; the fast tier
uses them as well.
"""
