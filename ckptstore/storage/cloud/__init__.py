"""Object stores: S3, GCS and Azure.

It may know the contract of a storage. It has one storage for each cloud, with one meaning of their errors.
"""
