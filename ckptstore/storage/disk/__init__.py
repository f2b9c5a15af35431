"""A directory on a disk or a shared file system as a storage, and file operations for disks.

It may know the contract of a storage. It has `LocalStorage`, and the file operations that the node cache needs too.
"""
