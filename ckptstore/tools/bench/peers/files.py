"""One file for each rank: torch.save, safetensors, Lightning's checkpoint I/O, s3torchconnector's S3Checkpoint.

On an object store, formats that know only files go through fsspec, as their users do.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import torch

from ckptstore.storage.uri import parse_uri
from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import BY_FSSPEC, FSSPEC, ZIPPED, Contender, Wait
from ckptstore.tools.bench.peers.dcp import client_options
from ckptstore.tools.bench.raw import MIB


class OneFile(Contender):
    """Writes this rank's tensors to a file, and makes it durable if the run is: none of these does so itself."""

    suffix: ClassVar[str]
    needs = ("disk", "it writes to paths")

    def path(self, place: str) -> str:
        """Return the path of this rank's file."""
        return f"{place}/rank-{self.case.rank}{self.suffix}"

    def prepare(self, place: str) -> None:
        if self.case.place.is_local:
            Path(place).mkdir(parents=True, exist_ok=True)

    def start(self, place: str) -> Wait | None:
        self.write(self.path(place))
        self.persist(self.path(place))
        return None

    def write(self, path: str) -> None:
        """Write the file."""
        raise NotImplementedError

    def read(self, path: str) -> Any:
        """Read the file."""
        raise NotImplementedError

    def load(self, place: str) -> None:
        self.fill(self.read(self.path(place)))

    def fill(self, found: Any) -> None:
        """Copy what was read into the target."""
        for name, tensor in self.case.local_target.items():
            tensor.copy_(found[name])


class TorchSave(OneFile):
    """`torch.save` and `torch.load`, with and without mmap."""

    name, family, suffix, packages = "torch.save", "torch", ".pt", ("torch",)
    checks = ZIPPED
    tried_in_load = ({"mmap": False}, {"mmap": True})

    def write(self, path: str) -> None:
        torch.save(self.case.local, path)

    def read(self, path: str) -> Any:
        return torch.load(path, mmap=self.settings["mmap"], weights_only=True)


class Safetensors(OneFile):
    """`save_file` and `load_file`."""

    name, family, suffix = "safetensors", "safetensors", ".safetensors"
    modules = packages = ("safetensors",)

    def write(self, path: str) -> None:
        from safetensors.torch import save_file

        save_file(self.case.local, path)

    def read(self, path: str) -> Any:
        from safetensors.torch import load_file

        return load_file(path)


class ThroughFsspec(OneFile):
    """An object for each rank, of bytes that are made in memory first: fsspec sends these in parts at a time."""

    needs = ("bucket", "there is a disk")

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from fsspec.core import url_to_fs

        self.fs: Any = url_to_fs(case.place.uri, **case.place.storage_options)[0]


class TorchSaveFsspec(ThroughFsspec):
    """`torch.save` and `torch.load`."""

    name, family, suffix = "torch.save through fsspec", "torch", ".pt"
    modules, packages = ("fsspec",), ("torch", *FSSPEC)
    checks = f"{ZIPPED}; {BY_FSSPEC}"
    tried = ({"as_stream": False}, {"as_stream": True})

    def write(self, path: str) -> None:
        if self.settings["as_stream"]:
            with self.fs.open(path, "wb") as file:
                torch.save(self.case.local, file)
            return
        made = io.BytesIO()
        torch.save(self.case.local, made)
        self.fs.pipe_file(path, made.getvalue())

    def read(self, path: str) -> Any:
        if self.settings["as_stream"]:
            with self.fs.open(path, "rb") as file:
                return torch.load(file, weights_only=True)
        return torch.load(io.BytesIO(self.fs.cat_file(path)), weights_only=True)


class SafetensorsFsspec(ThroughFsspec):
    """`safetensors.torch.save` and `load`, which make and take bytes."""

    name, family, suffix = "safetensors through fsspec", "safetensors", ".safetensors"
    modules, packages = ("safetensors", "fsspec"), ("safetensors", *FSSPEC)
    checks = BY_FSSPEC

    def write(self, path: str) -> None:
        from safetensors.torch import save

        self.fs.pipe_file(path, save(self.case.local))

    def read(self, path: str) -> Any:
        from safetensors.torch import load

        return load(self.fs.cat_file(path))


class S3Checkpoint(OneFile):
    """`torch.save` and `torch.load` with the streams of S3Checkpoint, as s3torchconnector's plugin for Lightning."""

    name, family, suffix = "s3torchconnector S3Checkpoint", "s3torchconnector", ".pt"
    modules, packages = ("s3torchconnector",), ("torch", "s3torchconnector")
    needs = ("S3", "it knows S3 alone")
    checks = ZIPPED
    tried = ({"part_bytes": 8 * MIB}, {"part_bytes": 32 * MIB})

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        import s3torchconnector

        self._objects: Any = s3torchconnector.S3Checkpoint(**client_options(case, settings))

    def write(self, path: str) -> None:
        with self._objects.writer(path) as file:
            torch.save(self.case.local, file)

    def read(self, path: str) -> Any:
        with self._objects.reader(path) as file:
            return torch.load(file, weights_only=True)


class Lightning(OneFile):
    """`TorchCheckpointIO`, by which its Trainer and Fabric save: to paths, and through fsspec."""

    name, family, suffix = "Lightning TorchCheckpointIO", "lightning", ".ckpt"
    modules, packages = ("lightning",), ("lightning", *FSSPEC)
    needs = ("any", "")
    checks = f"{ZIPPED}; {BY_FSSPEC}"

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from fsspec.config import conf
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        self.io: Any = TorchCheckpointIO()
        self._before = dict(conf)
        if case.place.storage_options:  # it takes none, and fsspec's configuration is where its users put them
            conf[parse_uri(case.place.uri).scheme] = dict(case.place.storage_options)

    def write(self, path: str) -> None:
        self.io.save_checkpoint(self.case.local, path)

    def read(self, path: str) -> Any:
        return self.io.load_checkpoint(path, weights_only=True)

    def close(self) -> None:
        from fsspec.config import conf

        conf.clear()
        conf.update(self._before)


class AsyncLightning(Lightning):
    """`TorchCheckpointIO` from the thread of its `AsyncCheckpointIO`, which copies the tensors first."""

    name = "Lightning AsyncCheckpointIO"
    in_background = True

    def start(self, place: str) -> Wait | None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        background = AsyncCheckpointIO(self.io)
        background.save_checkpoint(self.case.local, self.path(place))

        def wait() -> None:
            background.teardown()  # waits, and raises what went wrong
            self.persist(self.path(place))

        return wait
