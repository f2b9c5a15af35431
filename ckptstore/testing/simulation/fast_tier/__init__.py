"""Jobs with a fast tier on simulated nodes, and what must hold of them."""
