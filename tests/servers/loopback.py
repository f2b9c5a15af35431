"""Servers of a few lines, for what no real one does, and the key that they share with clients of Azure."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AZURE_KEY = base64.b64encode(b"a key for tests alone, of 64 bytes, as storage accounts have it!").decode()


@contextmanager
def answering(serve: Callable[[socket.socket, int], object]) -> Iterator[str]:
    """Serve each connection on a thread of its own, with its number; the URL of the server."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=serve, args=(connection, number), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
