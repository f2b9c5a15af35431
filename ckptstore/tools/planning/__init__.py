"""Compute how often to save, and what failures then cost: with a bucket alone, and with fast checkpoints. Pure
arithmetic.

It knows errors and nothing else, and measures nothing: every figure comes with the job (`planned_job`). It has the
formulas for the best interval (`intervals`), and their consequences for each way to save (`outlook`).
"""
