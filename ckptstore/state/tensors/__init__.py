"""One tensor: the boxes of it that a rank has, where their memory is, and the bytes that they are in a file.

It may know torch and nothing of states. It gives the rest of `ckptstore.state` its arithmetic and its access to memory.
"""
