"""Simulate a machine: threads in virtual time, primitives to wait with, clocks and storages.

It may know the primitives that it replaces, and nothing of the simulated programs. It gives runs that repeat.
"""
