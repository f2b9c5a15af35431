"""What finds faults that no example shows: the simulation, the bench of states and the stand-in accelerator."""
