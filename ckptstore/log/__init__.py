"""The log: the one place where the truth about a store is written, one numbered record after another.

    record = log.append(lambda newest: Pin((7,)))      # decides on the newest state until its record is the next one
    newest = log.newest()                              # has the state of the store

A record is created if absent, never changed and never removed, and numbers have no gaps. So the newest one is found by
probing upwards from any known number, and the writer of number n + 1 has decided on the state of n. All guarantees of a
store rest on this atomic create; the rules between two states are in `ckptstore.format.changes`.
"""

from ckptstore.log.writer import SALVAGE_HINT, Log

__all__ = ["SALVAGE_HINT", "Log"]
