"""A directory on a disk or a shared file system as a storage, and what is worth doing on disks alone.

It may know the contract of a storage. It gives `LocalStorage`, and the file operations that the node cache needs too.
"""
