"""The disk of a node, judged by the log: an inventory, and the attempts that may be deleted."""
