"""Storages hold bytes. `base` is the contract; each kind of back-end has a module."""
