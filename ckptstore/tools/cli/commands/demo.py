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
    help="Run the ranks as processes, or with Ray Train on a Ray of its own.",
)
@click.option(
    "--store",
    metavar="PLACE",
    show_default="temporary directory",
    help="Empty place for the demo's stores, which stay.",
)
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Number of processes."
)
@click.option(
    "--width",
    type=click.IntRange(1, 64),
    default=32,
    show_default=True,
    metavar="N",
    help="Number of channels of the first layer.",
)
@click.option(
    "--epochs",
    type=click.IntRange(3, 100),
    show_default="3, with --engine ray 6",
    metavar="N",
    help="Number of epochs. Each saves a checkpoint.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("ckptstore-demo.png"),
    show_default=True,
    help="File for the picture that --engine ray draws.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the page of the stores to FILE. Not with --engine ray.",
)
def command(
    engine: str,
    store: str | None,
    ranks: int,
    width: int,
    epochs: int | None,
    picture: Path,
    html: Path | None,
) -> None:
    """Train a small model, kill it during a save, and resume.

    Trains a ResNet-18 on handwritten digits on the CPU, once with DDP and once with FSDP2. A rank is killed in the
    middle of an upload. Needs the extra "demo".

    With --engine ray, which needs the extra "ray" too, Ray restarts the job by itself, an actor reads digits with the
    best checkpoint, and a picture is drawn.
    """
    if html is not None and engine == "ray":
        raise click.UsageError("--html is drawn by --engine processes")
    drawn = picture if engine == "ray" else html
    if drawn is not None and not drawn.absolute().parent.is_dir():  # it is written after minutes
        raise click.UsageError(f"There is no directory {drawn.absolute().parent} for {drawn.name}")
    needs("demo", *(["ray"] if engine == "ray" else []))
    from ckptstore.tools.demo.telling import DemoFailed

    epochs = epochs or EPOCHS[engine]
    try:
        if engine == "ray":
            from ckptstore.tools.demo import ray_story

            ray_story.tell(store, num_ranks=ranks, width=width, epochs=epochs, picture=picture)
        else:
            from ckptstore.tools.demo import story

            story.tell(store, num_ranks=ranks, width=width, epochs=epochs, html=html)
    except DemoFailed as error:
        raise click.ClickException(f"the demo failed: {error}") from error
