"""What Python and torch leave to us (forks, lazy imports, pauses of the collector, private names), and signs of life.

It may know no other room. It gives small helpers that any of them may use.
"""
