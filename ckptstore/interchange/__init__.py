"""Copies of checkpoints to other places, and states from and to files of other tools.

It may know stores, checkpoints and states. It gives `copying`, `exporting` and `importing`.
"""
