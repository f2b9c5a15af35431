"""Tensor state: what a nested state becomes on disk, and how any number of ranks gets it back.

The submodules load torch; importing the package does not.
"""
