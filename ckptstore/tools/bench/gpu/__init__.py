"""Measure with a GPU: stalls, lost steps, first saves, and loads into the memory of the GPU.

The same code runs with tensors of the CPU, as a rehearsal. Importing it does not touch CUDA.
"""
