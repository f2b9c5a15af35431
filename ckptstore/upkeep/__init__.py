"""Keep a store in order: leases of readers, pruning, garbage, retention from outside a job.

This room may import the log, the job and storages. It deletes from a store, and has the leases that prevent deletion.
"""
