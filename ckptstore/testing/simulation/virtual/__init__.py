"""The simulated machine: threads in virtual time, what code waits with, clocks and storages.

It may know the primitives that it stands in for, and nothing of what simulated programs do. It gives runs that repeat.
"""
