"""The forms of stock DCP: they make a checkpoint of ours readable by it, and its own checkpoints readable by us.

It may know states, and nothing of jobs and stores. It gives saves `StockShare`, loads `StockState`, and `dcp` and
exports the parts of both. Modules load torch; importing the package does not.
"""
