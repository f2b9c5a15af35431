"""The commands, a module for those that share their work; `GROUPS` of the command line says which.

It may know stores as their users do. It gives the command line what to load when a command is called.
"""
