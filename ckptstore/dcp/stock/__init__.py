"""The forms of stock DCP: what makes a checkpoint of ours readable by it, and how one that it wrote is read.

It may know states, and nothing of jobs and stores. It gives saves `StockShare`, loads `StockState`, and `dcp` and
exports the parts of both. Modules load torch; importing the package does not.
"""
