"""What only a machine with a GPU can tell: stalls, lost steps, first saves, and loads into the memory of the GPU.

The same code runs with tensors of the CPU, as a rehearsal. Nothing here touches CUDA when it is imported.
"""
