"""What a rank reads of a stored state: which blocks of which files fill which memory.

It may know live states, tensors and the index. It gives stored states.
"""
