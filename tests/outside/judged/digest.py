"""Prints the step of the newest checkpoint of a store, and one digest of its tensors: `digest.py STORE`."""

from __future__ import annotations

import hashlib
import sys

from ckptstore import open_store


def main() -> None:
    with open_store(sys.argv[1]) as store:
        newest = store.latest()
        assert newest is not None
        digest = hashlib.sha256()
        for key in sorted(newest.tensors):
            digest.update(newest.tensors[key].numpy().tobytes())
        print(newest.step, digest.hexdigest())


if __name__ == "__main__":
    main()
