"""Small helpers around Python and torch: forks, lazy imports, pauses of the collector, private names, signs of life.

It may know no other room, and any of them may use it.
"""
