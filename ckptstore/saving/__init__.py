"""How a checkpoint is saved, from what the caller asked for to the record that makes it visible.

It may know the job, the transfer, the group and states, and how a saved checkpoint is handed out. It gives one story
for states and directories, at once or in the background.
"""
