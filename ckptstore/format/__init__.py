"""The bytes of a store, as the store format specifies them: names, JSON, digests, manifests, records.

It may know the errors and nothing that reads or writes. It gives pure values, and how they become bytes and back.
"""
