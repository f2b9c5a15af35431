"""Jobs with a fast tier on simulated nodes, and their promises."""
