"""Live objects under flat keys and back: modules, optimizers, nested containers, plain values.

It may know tensors, and nothing of files. It gives a flat state for a save, and fills the objects in a load.
"""
