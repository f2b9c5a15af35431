"""Fast checkpoints: complete on the disks of the nodes, whether or not a record of the log names them yet.

It may know the store format, disks, how bytes move and how ranks meet. It gives what a caller asks for (`tier`), what a
process has of it (`arrival`, `fast_place`, `members`), how bytes get from node to node (`node_server`, `partner`,
`held_storage`), the certificate by which a fast checkpoint is known (`certificate`), the directory on a node
(`node_disk`), and pure decisions on what all nodes found: what can be resumed from (`candidates`), what may be deleted
(`sweep`).
"""
