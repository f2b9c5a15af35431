"""The disks of the nodes: the one of this node, and connections to the others."""
