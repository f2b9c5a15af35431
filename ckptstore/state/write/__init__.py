"""Who writes what of a state: what each rank has, what all agree on, which file holds it.

It may know live states, tensors and the index. It gives sources for a transfer, and moves no bytes itself.
"""
