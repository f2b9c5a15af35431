"""A server of plain HTTP as one of https."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORWARD = """
import asyncio, contextlib, ssl, sys

async def copy(source, target):
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 18):
            target.write(data)
            await target.drain()
    target.close()

async def serve(reader, writer):
    below = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(copy(reader, below[1]), copy(below[0], writer))

async def main():
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(sys.argv[1])
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def behind_tls(certificate: Path, endpoint_url: str) -> Iterator[str]:
    """A server of plain HTTP, as https: trusted by whoever trusts the `certificate`."""
    command = [sys.executable, "-c", FORWARD, str(certificate.with_name("server.pem")), endpoint_url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"https://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
