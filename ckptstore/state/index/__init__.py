"""The tensor index: which box of which tensor lies where in which file. Pure.

It may know boxes, and no live object. It gives the parts that ranks write, and the index that is joined from them.
"""
