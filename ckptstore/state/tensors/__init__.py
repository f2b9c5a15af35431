"""One tensor: which boxes of it a rank has, where their memory is, which bytes they are in a file.

It may know torch and nothing of states. It gives the rest of `ckptstore.state` its arithmetic and its access to memory.
"""
