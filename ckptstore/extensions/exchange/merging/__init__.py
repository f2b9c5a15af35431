"""Merge checkpoints of one run into one model."""
