"""One node of a test: brings the latest checkpoint of a store to a directory when told to.

    peer_node.py URI DIRECTORY OPTIONS

reads a pattern of names from each line, copies the files that match, or has all in the node cache for "cache", and says
so; "end" ends it. The peers come from the environment.
"""

from __future__ import annotations

import json
import sys

import ckptstore
from ckptstore.events import Event, PeerLeftOut, listening


def main() -> None:
    uri, directory, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    troubles: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, PeerLeftOut):
            troubles.append(event.reason)

    with listening(hear), ckptstore.open_store(uri, storage_options=options, group="solo") as store:
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin):
            if line.strip() == "end":
                break
            checkpoint = store.latest()
            if line.strip() == "cache":
                with checkpoint.as_directory() as path:
                    print(path, flush=True)
            else:
                checkpoint.to_directory(f"{directory}/{number}", include=line.strip())
                print("done", flush=True)
    print(json.dumps(troubles), flush=True)


if __name__ == "__main__":
    main()
