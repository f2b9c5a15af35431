"""The tensor index: the boxes of each tensor, and their places in files. Pure.

It may know boxes, and no live object. It gives the parts that ranks write, and the index that is joined from them.
"""
