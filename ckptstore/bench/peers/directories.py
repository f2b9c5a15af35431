"""Directories of files: Ray Train's way of persisting one, and `cp -r`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from ckptstore.bench.case import Case
from ckptstore.bench.destination import Place
from ckptstore.bench.peers.base import Contender, Wait, make_durable
from ckptstore.storage.uri import parse_uri


def arrow_filesystem(place: Place) -> Any:
    """pyarrow's file system for a place, with the same credentials."""
    from pyarrow import fs

    if place.is_local:
        return fs.LocalFileSystem()
    options = place.storage_options
    endpoint = str(options.get("endpoint_url", ""))
    chosen = {
        "access_key": options.get("key"),
        "secret_key": options.get("secret"),
        "endpoint_override": endpoint.partition("://")[2] or None,
        "scheme": endpoint.partition("://")[0] or None,
        "region": options.get("client_kwargs", {}).get("region_name"),
    }
    return fs.S3FileSystem(**{name: value for name, value in chosen.items() if value})


def arrow_path(place: str) -> str:
    """A URI as pyarrow's file systems want it."""
    location = parse_uri(place)
    return f"{location.container}/{location.prefix}" if location.scheme else location.prefix


class RayPersist(Contender):
    """`StorageContext.persist_current_checkpoint`, by which `ray.train.report` uploads a checkpoint directory."""

    name, family = "Ray Train persist", "ray"
    modules = ("ray", "pyarrow")
    packages = ("ray", "pyarrow")

    @classmethod
    def objection(cls, case: Case) -> str | None:
        known = case.place.is_local or case.place.is_s3
        return super().objection(case) or (None if known else "pyarrow gets its credentials for S3 alone here")

    def prepare(self, place: str) -> None:
        from ray.train.v2._internal.execution.storage import StorageContext

        above, _, name = arrow_path(place).rpartition("/")
        Path(above).mkdir(parents=True, exist_ok=True) if self.case.place.is_local else None
        self._context = StorageContext(above, name, storage_filesystem=arrow_filesystem(self.case.place))

    def save(self, place: str) -> Wait | None:
        from ray.train import Checkpoint

        self._context.persist_current_checkpoint(Checkpoint.from_directory(self.case.files), "checkpoint_000000")
        if self.case.durable and self.case.place.is_local:
            make_durable(Path(place))
        return None


class CopyRecursively(Contender):
    """`cp -r`, and everything made durable where the run is."""

    name, family = "cp -r", "cp"

    @classmethod
    def objection(cls, case: Case) -> str | None:
        return None if case.place.is_local else "it writes to paths"

    def prepare(self, place: str) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)

    def save(self, place: str) -> Wait | None:
        target = Path(place) / f"rank-{self.case.rank}"
        subprocess.run(["cp", "-r", str(self.case.files), str(target)], check=True)
        if self.case.durable:
            make_durable(target)
        return None
