"""Division of the writes of a state: the items of each rank, the agreement of all, the file of each frame.

It may know live states, tensors and the index. It gives sources for a transfer, and moves no bytes itself.
"""
