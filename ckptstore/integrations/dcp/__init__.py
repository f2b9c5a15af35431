"""The interface for users who call `dcp.save` and `dcp.load` of torch themselves; its public names are `ckptstore.dcp`.

It may know saves, states and storages. It gives `StoreWriter`, `StoreReader` and `translated`, and the targets that a
writer takes. Modules load torch; importing the package does not.
"""
