"""How a checkpoint is found, checked and read, into files or straight into tensors.

It may know the job, the transfer, the node cache and states. It gives what `Checkpoint` and `CheckpointStore` forward
to.
"""
