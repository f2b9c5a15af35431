"""Save a checkpoint: from the caller's request to the record that makes it visible.

This room may import the job, the transfer, the group, states, and the handle of a saved checkpoint. It offers one story
for states and directories, synchronous or in the background.
"""
