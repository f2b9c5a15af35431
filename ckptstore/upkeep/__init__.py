"""What keeps a store in order: leases of readers, pruning, garbage, retention from outside a job, the doctor.

It may know the log, the job and storages. It gives what deletes from a store, and the leases that hold deletion off.
"""
