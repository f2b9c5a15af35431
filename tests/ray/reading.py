"""A process that reads a checkpoint of Ray's as a directory, with Ray or with ckptstore, until it is told otherwise."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import ckptstore


def main(how: str, pickled: str) -> None:
    checkpoint = pickle.loads(Path(pickled).read_bytes())
    opened = checkpoint if how == "ray" else ckptstore.ray.wrap(checkpoint)
    with opened.as_directory() as directory:
        print(sorted(path.name for path in Path(directory).iterdir()))


if __name__ == "__main__":
    main(*sys.argv[1:])
