"""Fast checkpoints: complete on the disks of the nodes, whether or not a record of the log names them yet.

It may know the store format, disks, how bytes move and how ranks meet. It gives what a caller asks for (`tier`), what a
process has of it (`opening`, `place`, `members`), the certificate by which a fast checkpoint is known (`certificate`),
the directory on a node (`node_disk`), and pure decisions on what all nodes found: what can be resumed from
(`candidates`), who sends which files to whom (`routes`), what may be deleted (`sweep`).
"""
