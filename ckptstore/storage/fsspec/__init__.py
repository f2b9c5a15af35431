"""The generic engine: everything that has a URL, by the file systems of fsspec. The only importer of fsspec.

Options, environment and configuration mean what they mean to the file system. Of s3fs, gcsfs and adlfs the calls are
used that a store needs, create-if-absent first (`clouds`); of any other one those for one file (`generic`).
"""
