"""What lies on the disk of a node, judged by the log: an inventory, and what may be deleted."""
