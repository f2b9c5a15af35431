"""Storages: where bytes lie. `base` is the contract; one module for each kind of back-end."""
