"""Compute how often to save, and what failures then cost: with a bucket alone, and with fast checkpoints. Pure
arithmetic.

It knows errors and nothing else, and measures nothing: every figure is given (`given`). It has the formulas for the
best interval (`intervals`), and what follows from them for each way to save (`outlook`).
"""
