"""Fast checkpoints: complete on the disks of the nodes, whether or not a record of the log names them yet.

It may know the store format, disks, transfers and groups. It has the options of a caller (`tier`), the fast tier of one
process (`arrival`, `fast_place`, `members`), transfers between nodes (`node_server`, `partner`, `held_storage`), the
certificate of a fast checkpoint (`certificate`), the directory on a node (`node_disk`), and two pure decisions on the
findings of all nodes: the checkpoints that a job can resume from (`candidates`), and those that may be deleted
(`sweep`).
"""
