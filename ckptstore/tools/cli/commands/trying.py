"""Commands to try things out: `demo`, a real training run that is killed and goes on, and `s3-test`, a server."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import click

from ckptstore.runtime.extras import needs
from ckptstore.tools.cli.command import Answer, Call, command
from ckptstore.tools.cli.options import option

EPOCHS = {"processes": 3, "ray": 6}
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@command(
    option(
        "--engine [processes|ray]",
        "Run the ranks as processes, or with Ray Train on a Ray of its own.",
        default="processes",
    ),
    option("--store PLACE", "Empty place for the demo's stores, which stay.", show_default="temporary directory"),
    option("--ranks N", "Number of processes.", type=click.IntRange(1, 64), default=2),
    option("--width N", "Number of channels of the first layer.", type=click.IntRange(1, 64), default=32),
    option(
        "--epochs N",
        "Number of epochs. Each saves a checkpoint.",
        type=click.IntRange(3, 100),
        show_default="3, with --engine ray 6",
    ),
    option(
        "--picture", "File for the picture that --engine ray draws.", type=_FILE, default=Path("ckptstore-demo.png")
    ),
    option("--html FILE", "Write the page of the stores to FILE. Not with --engine ray.", type=_FILE),
    common=(),
)
def demo(call: Call) -> None:
    """Train a small model, kill it during a save, and resume.

    Trains a ResNet-18 on handwritten digits on the CPU, once with DDP and once with FSDP2. A rank is killed in the
    middle of an upload. Needs the extra "demo".

    With --engine ray, which needs the extra "ray" too, Ray restarts the job by itself, an actor reads digits with the
    best checkpoint, and a picture is drawn.
    """
    if call.html is not None and call.engine == "ray":
        raise click.UsageError("--html is drawn by --engine processes")
    drawn = call.picture if call.engine == "ray" else call.html
    if drawn is not None and not drawn.absolute().parent.is_dir():  # it is written after minutes
        raise click.UsageError(f"There is no directory {drawn.absolute().parent} for {drawn.name}")
    needs("demo", *(["ray"] if call.engine == "ray" else []))
    from ckptstore.tools.demo.telling import DemoFailed

    how = {"num_ranks": call.ranks, "width": call.width, "epochs": call.epochs or EPOCHS[call.engine]}
    try:
        if call.engine == "ray":
            from ckptstore.tools.demo import ray_story

            ray_story.tell(call.store, **how, picture=call.picture)
        else:
            from ckptstore.tools.demo import story

            story.tell(call.store, **how, html=call.html)
    except DemoFailed as error:
        raise click.ClickException(f"the demo failed: {error}") from error


@command(
    option("--port PORT", "Port to serve on; 0 picks a free one.", type=click.IntRange(0, 65535), default=9000),
    option("--bucket NAME ...", "Bucket to create at the start; repeatable.", "buckets", default=["test"]),
    option("--tls", "Serve HTTPS; needs the package cryptography."),
    common=(),
)
def s3_test(call: Call) -> Answer:
    """Serve S3 from memory on this machine, for tests.

    Listens at 127.0.0.1 until Ctrl-C; then all data is lost. Prints the environment variables that point a client to
    it, and accepts any credentials. It has the part of S3 that stores use, and checks digests.
    """
    from ckptstore.testing.s3.certificates import make_certificates
    from ckptstore.testing.s3_server import s3_server

    authority = None
    if call.tls:
        directory = call.open(tempfile.TemporaryDirectory(prefix="ckptstore-s3-test-"))
        authority = make_certificates(Path(directory))
    server = call.open(s3_server(port=call.port, buckets=call.buckets, authority=authority))
    yield f"export AWS_ENDPOINT_URL={server.endpoint_url}"
    if authority is not None:
        yield f"export AWS_CA_BUNDLE={authority}"
    yield "export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test AWS_REGION=us-east-1"
    yield f"# try: ckptstore doctor s3://{call.buckets[0]}/run"
    threading.Event().wait()
