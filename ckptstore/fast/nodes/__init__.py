"""The disks of the nodes: what lies on this node's, and how ranks reach those of the others."""
