"""The contract in which Ray keeps the files: `report`, `upload_fn`, and reading what they stored.

It may know what saving knows, and Ray's context. It gives checkpoints in Ray's own directories, without a log.
"""
