"""`ckptstore s3-test`: an S3 server in memory, for tests and for trying things out."""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import click


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9000,
    show_default=True,
    metavar="PORT",
    help="Port to serve on; 0 picks a free one.",
)
@click.option(
    "--bucket",
    "buckets",
    multiple=True,
    default=["test"],
    show_default=True,
    metavar="NAME",
    help="Bucket to create at the start; repeatable.",
)
@click.option("--tls", is_flag=True, help="Serve HTTPS; needs the package cryptography.")
def command(port: int, buckets: tuple[str, ...], tls: bool) -> None:
    """Serve S3 from memory on this machine, for tests.

    Listens at 127.0.0.1 until Ctrl-C; then all data is lost. Prints the environment variables that point a client to
    it, and accepts any credentials. It has the part of S3 that stores use, and checks digests.
    """
    from ckptstore.testing.s3.certificates import make_certificates
    from ckptstore.testing.s3_server import s3_server

    with ExitStack() as stack:
        authority = None
        if tls:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-s3-test-"))
            authority = make_certificates(Path(directory))
        server = stack.enter_context(s3_server(port=port, buckets=buckets, authority=authority))
        click.echo(f"export AWS_ENDPOINT_URL={server.endpoint_url}")
        if authority is not None:
            click.echo(f"export AWS_CA_BUNDLE={authority}")
        click.echo("export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_REGION=us-east-1")
        click.echo(f"# try: ckptstore doctor s3://{buckets[0]}/run")
        threading.Event().wait()
