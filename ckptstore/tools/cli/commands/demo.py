"""`ckptstore demo`: a real training run that is killed in the middle of an upload, and goes on."""

from __future__ import annotations

from pathlib import Path

import click

from ckptstore.runtime.extras import needs

EPOCHS = {"processes": 3, "ray": 6}


@click.command()
@click.option(
    "--engine",
    type=click.Choice(list(EPOCHS)),
    default="processes",
    show_default=True,
    help="What runs the ranks: processes of its own, or Ray Train on a Ray of its own.",
)
@click.option(
    "--fast-tier",
    is_flag=True,
    help="Two nodes with a fast tier, of which one is lost with its disk. Not with --engine ray or --store.",
)
@click.option("--store", help="An empty place for the demo's stores, which stay.  [temporary directory]")
@click.option("--ranks", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes.")
@click.option("--width", type=click.IntRange(1, 64), help="Channels of the stem.  [32, with a fast tier 16]")
@click.option(
    "--epochs",
    type=click.IntRange(3, 100),
    help="Each saves a checkpoint, with a fast tier each step does.  [3, with Ray 6]",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("ckptstore-demo.png"),
    show_default=True,
    help="Where the picture goes; drawn with --engine ray.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the page of the stores there, before garbage is removed; with --fast-tier the timeline. Not with "
    "--engine ray.",
)
def command(
    engine: str,
    fast_tier: bool,
    store: str | None,
    ranks: int,
    width: int | None,
    epochs: int | None,
    picture: Path,
    html: Path | None,
) -> None:
    """Train a ResNet-18 on handwritten digits, kill a rank in the middle of an upload, and resume.

    Once with DDP and once sharded with FSDP2, on the CPU. Needs the extra "demo". With --engine ray, which needs the
    extra "ray" too, Ray recovers by itself, an actor reads digits with the best checkpoint, and a picture shows them.

    With --fast-tier, which needs the extra "s3" too, two nodes save to their own disks after every step, and a slow
    bucket follows. One node is lost, and the job goes on from the copy that the other one holds.
    """
    if fast_tier:
        _check_fast_tier_options(engine, store, ranks)
    if html is not None and engine == "ray":
        raise click.UsageError("--html is drawn by --engine processes")
    needs("demo", *(["ray"] if engine == "ray" else []), *(["s3"] if fast_tier else []))
    from ckptstore.tools.demo.telling import DemoFailed

    epochs = epochs or EPOCHS[engine]
    width = width or (16 if fast_tier else 32)
    try:
        if fast_tier:
            from ckptstore.tools.demo import tier_story

            tier_story.tell(num_ranks=ranks, width=width, epochs=epochs, html=html)
        elif engine == "ray":
            from ckptstore.tools.demo import ray_story

            ray_story.tell(store, num_ranks=ranks, width=width, epochs=epochs, picture=picture)
        else:
            from ckptstore.tools.demo import story

            story.tell(store, num_ranks=ranks, width=width, epochs=epochs, html=html)
    except DemoFailed as error:
        raise click.ClickException(f"the demo failed: {error}") from error


def _check_fast_tier_options(engine: str, store: str | None, ranks: int) -> None:
    if engine == "ray":
        raise click.UsageError("--fast-tier is told by --engine processes")
    if store is not None:
        raise click.UsageError("--fast-tier has a bucket of its own, so it takes no --store")
    if ranks % 2:
        raise click.UsageError(f"--fast-tier divides --ranks between two nodes, and {ranks} is odd")
