"""Object stores: S3, GCS and Azure through their SDKs and through obstore.

It may know the contract of a storage. It has one storage for each cloud and engine, with one meaning of their errors.
"""
