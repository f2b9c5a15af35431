"""Find, check and read checkpoints, into files or straight into tensors.

This room may import the job, the transfer, the node cache and states. `Checkpoint` and `CheckpointStore` forward to it.
"""
