"""`ckptstore doctor`: try out everything that a store needs, and say what is missing."""
