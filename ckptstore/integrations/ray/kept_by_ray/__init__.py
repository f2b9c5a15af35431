"""Store checkpoints whose files Ray keeps: `report`, `upload_fn`, and reading their results.

It may know what saving knows, and Ray's context. It gives checkpoints in Ray's own directories, without a log.
"""
