"""Copy checkpoints to other places, and convert states to and from the files of other tools.

It may know stores, checkpoints and states. It gives users `export` and `import_state`, by `ckptstore.interchange`, and
the command line copies of checkpoints and stores too.
"""
