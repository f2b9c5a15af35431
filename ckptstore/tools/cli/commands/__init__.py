"""The commands, a module for each. A module has the name of its command and `command` in it.

It may know stores as their users do. It gives the command line what to load when a command is called.
"""
