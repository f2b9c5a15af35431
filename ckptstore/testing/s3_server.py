"""An S3 server in memory, fast and with faults on demand, for tests and benchmarks.

    with s3_server(buckets=["test"]) as server:
        store = open_store("s3://test/run", storage_options=server.storage_options)
        server.faults.add(Fault(action="status", match="^PUT", times=3))

or, in a process of its own: `python -m ckptstore.testing.s3_server --port 0`, which prints its endpoint.

It speaks the part of S3 that checkpoint stores use (`ckptstore.testing.s3.service` lists it), checks the digests of
bodies, and keeps a log of its requests. It serves on one thread, with TLS or without, to everybody on this machine: it
listens at 127.0.0.1. Its contents are lost when it ends.

With TLS, the thread spends about 1 s of processor time for a GiB each way, most of it in OpenSSL. A client that spends
less has to wait for it, so compare clients by their own processor time as well.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptstore.testing.s3.certificates import make_certificates, serving
from ckptstore.testing.s3.connection import ClientConnection
from ckptstore.testing.s3.control import stats
from ckptstore.testing.s3.link import Link
from ckptstore.testing.s3.objects import LoggedRequest, Objects, StoredObject
from ckptstore.testing.s3.rules import Fault, Faults
from ckptstore.testing.s3.service import Service
from ckptstore.testing.s3.shared import Shared

__all__ = ["Fault", "Faults", "Link", "LoggedRequest", "S3Server", "StoredObject", "s3_server"]

_HOST = "127.0.0.1"
_START_SECONDS = 30.0


class S3Server:
    """One server; `start` and `close` it, or use `s3_server`.

    `verify` compares bodies with their digests (0.05 s/GiB for a CRC, 1 s/GiB and more for a signed payload).
    `keep_bodies=False` keeps only sizes of larger objects, which then read as zeros, and answers at the speed of the
    socket. `md5_etags` makes an ETag the MD5 of the body, as real S3 does (1.4 s/GiB). `access_keys` are the access
    keys let in, None for all; of a signature only its time is checked. `min_part_bytes` defaults to the 5 MiB of S3.
    With `authority`, a path that `make_certificates` has returned, it speaks TLS, and its clients have to trust that
    file.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        buckets: Iterable[str] = (),
        verify: bool = True,
        keep_bodies: bool = True,
        md5_etags: bool = False,
        access_keys: Iterable[str] | None = None,
        min_part_bytes: int | None = None,
        authority: Path | None = None,
    ) -> None:
        keys = None if access_keys is None else frozenset(access_keys)
        service = Service(Objects(), access_keys=keys, min_part_bytes=min_part_bytes)
        self._shared = Shared(
            service=service,
            faults=Faults(),
            log=[],
            verify=verify,
            keep_bodies=keep_bodies,
            md5_etags=md5_etags,
            link=Link(),
        )
        for name in buckets:
            service.objects.buckets[name] = {}
        self._port, self._authority = port, authority
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listening = threading.Event()
        self._failure: BaseException | None = None

    @property
    def endpoint_url(self) -> str:
        """The URL of the server."""
        return f"{'http' if self._authority is None else 'https'}://{_HOST}:{self._port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options of a client for it."""
        trusted = {} if self._authority is None else {"verify": str(self._authority)}
        return {
            "key": "test",
            "secret": "testsecret",
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1", **trusted},
        }

    @property
    def faults(self) -> Faults:
        """The rules for faults."""
        return self._shared.faults

    @property
    def link(self) -> Link:
        """The line between it and its clients: by default one that takes no time. It may be replaced."""
        return self._shared.link

    @link.setter
    def link(self, link: Link) -> None:
        self._shared.link = link

    @property
    def log(self) -> list[LoggedRequest]:
        """The requests so far, in the order of their ends."""
        return self._shared.log

    @property
    def objects(self) -> Objects:
        """The stored objects. Read them; only the server's thread may change them while requests come in."""
        return self._shared.service.objects

    @property
    def service(self) -> Service:
        """The operations; the access keys that it lets in, and its clock, may be changed while it works."""
        return self._shared.service

    @property
    def stats(self) -> dict[str, object]:
        """Counts of objects, bytes, unfinished uploads and requests."""
        return stats(self._shared)

    def empty(self) -> None:
        """Forget all objects and unfinished uploads; the buckets, the faults and the log stay."""
        done = threading.Event()

        def forget() -> None:
            for objects in self.objects.buckets.values():
                objects.clear()
            self.objects.uploads.clear()
            done.set()

        if self._loop is None:
            forget()
        else:
            self._loop.call_soon_threadsafe(forget)
            done.wait(_START_SECONDS)

    def operations(self) -> list[str]:
        """Return the operations of the requests so far, in S3's own words."""
        return [request.operation for request in self._shared.log]

    def start(self) -> None:
        """Listen, on a thread of its own. After `close`, listens again at the same address, with its contents."""
        self._listening.clear()
        self._thread = threading.Thread(target=self.run, name="s3-server", daemon=True)
        self._thread.start()
        self._listening.wait(_START_SECONDS)
        if self._failure is not None:
            raise RuntimeError("The S3 server did not start") from self._failure

    def run(self) -> None:
        """Serve on this thread until `close` is called on another one."""
        try:
            _runner()(self._serve())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._listening.set()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await loop.create_server(
            lambda: ClientConnection(self._shared, loop),
            _HOST,
            self._port,
            backlog=1024,
            ssl=None if self._authority is None else serving(self._authority),
        )
        self._port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        while self._shared.transports:
            for transport in list(self._shared.transports):
                transport.abort()
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Stop listening and break all connections."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_START_SECONDS)


def _runner() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


@contextmanager
def s3_server(**options: Any) -> Iterator[S3Server]:
    """Run a server during the context; the options are those of `S3Server`."""
    server = S3Server(**options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def main(arguments: list[str] | None = None) -> None:
    """Serve until interrupted; the first line of output is the endpoint."""
    parser = argparse.ArgumentParser(description="An S3 server in memory, with faults on demand")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--bucket", action="append", default=[], dest="buckets", help="create it at the start")
    parser.add_argument("--md5-etags", action="store_true", help="ETags as real S3 has them; costs 1.4 s/GiB")
    parser.add_argument("--no-verify", action="store_false", dest="verify", help="believe the digests")
    parser.add_argument("--no-bodies", action="store_false", dest="keep_bodies", help="keep only sizes")
    parser.add_argument("--access-key", action="append", default=None, dest="access_keys", help="let in only these")
    parser.add_argument("--min-part-bytes", type=int, default=None)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="with a certificate; clients trust DIR/authority.pem")
    parser.add_argument("--bytes-per-second", type=float, default=None, help="each way, of all connections together")
    parser.add_argument("--latency-seconds", type=float, default=0.0, help="what each request waits for")
    options = vars(parser.parse_args(arguments))
    link = Link(bytes_per_second=options.pop("bytes_per_second"), latency_seconds=options.pop("latency_seconds"))
    directory = options.pop("tls")
    server = S3Server(**options, authority=None if directory is None else make_certificates(directory))
    server.link = link
    server.start()
    print(server.endpoint_url, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
