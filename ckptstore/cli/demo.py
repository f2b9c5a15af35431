"""`ckptstore demo`: a real training run that is killed in the middle of an upload, and goes on."""

from __future__ import annotations

import click


@click.command()
@click.option("--store", help="Where the demo's stores go; an empty place. A temporary directory without it.")
@click.option("--ranks", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes.")
@click.option("--width", type=click.IntRange(1, 64), default=32, show_default=True, help="Channels of the stem.")
@click.option(
    "--epochs", type=click.IntRange(3, 100), default=3, show_default=True, help="A checkpoint is saved in each."
)
def command(store: str | None, ranks: int, width: int, epochs: int) -> None:
    """Train a ResNet-18 on handwritten digits, kill a rank in the middle of an upload, and resume.

    Once with DDP and once sharded with FSDP2, on the CPU. Needs the extra "demo".
    """
    from ckptstore.demo.story import DemoFailed, tell

    try:
        tell(store, num_ranks=ranks, width=width, epochs=epochs)
    except DemoFailed as error:
        raise click.ClickException(f"the demo failed: {error}") from error
