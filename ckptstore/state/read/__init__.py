"""Reading of a stored state by a rank: the blocks of files that fill its memory.

It may know live states, tensors and the index. It gives stored states.
"""
