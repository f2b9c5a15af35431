"""One file for each rank: torch.save, safetensors, Lightning's checkpoint I/O, Orbax on the same arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptstore.bench.case import Case
from ckptstore.bench.peers.base import Contender, Wait, make_durable


class OneFile(Contender):
    """Writes this rank's tensors to a file, and makes it durable where the run is: none of these does so itself."""

    suffix = ""

    @classmethod
    def objection(cls, case: Case) -> str | None:
        return super().objection(case) or (None if case.place.is_local else "it writes to paths")

    def path(self, place: str) -> Path:
        """This rank's file."""
        return Path(place) / f"rank-{self.case.rank}{self.suffix}"

    def prepare(self, place: str) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)

    def save(self, place: str) -> Wait | None:
        self.write(self.path(place))
        if self.case.durable:
            make_durable(self.path(place))
        return None

    def write(self, path: Path) -> None:
        """Write the file."""
        raise NotImplementedError

    def read(self, path: Path) -> Mapping[str, torch.Tensor]:
        """What is in it."""
        raise NotImplementedError

    def load(self, place: str) -> None:
        found = self.read(self.path(place))
        for name, tensor in self.case.local_target.items():
            tensor.copy_(found[name])


class TorchSave(OneFile):
    """`torch.save` and `torch.load`, with and without mmap."""

    name, family, suffix, packages = "torch.save", "torch", ".pt", ("torch",)

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        return [{}] if action == "save" else [{"mmap": False}, {"mmap": True}]

    def write(self, path: Path) -> None:
        torch.save(self.case.local, path)

    def read(self, path: Path) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = torch.load(path, mmap=self.settings.get("mmap", False), weights_only=True)
        return found


class Safetensors(OneFile):
    """`save_file` and `load_file`."""

    name, family, suffix = "safetensors", "safetensors", ".safetensors"
    modules = packages = ("safetensors",)

    def write(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.case.local, path)

    def read(self, path: Path) -> Mapping[str, torch.Tensor]:
        from safetensors.torch import load_file

        found: Mapping[str, torch.Tensor] = load_file(path)
        return found


class Lightning(OneFile):
    """`TorchCheckpointIO`, by which its Trainer and Fabric save."""

    name, family, suffix = "Lightning TorchCheckpointIO", "lightning", ".ckpt"
    modules = packages = ("lightning",)

    def _io(self) -> Any:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        return TorchCheckpointIO()

    def write(self, path: Path) -> None:
        self._io().save_checkpoint(self.case.local, str(path))

    def read(self, path: Path) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = self._io().load_checkpoint(str(path), weights_only=True)
        return found


class Orbax(Contender):
    """`StandardCheckpointer` on the same bytes as JAX arrays of the CPU. It returns new arrays; its writes are durable
    always."""

    name, family = "Orbax", "orbax"
    modules = ("orbax.checkpoint", "jax")
    packages = ("orbax-checkpoint", "jax", "tensorstore")

    @classmethod
    def objection(cls, case: Case) -> str | None:
        try:
            missing = super().objection(case)
        except ModuleNotFoundError:  # of a parent package
            missing = "orbax-checkpoint is not installed"
        if missing:
            return missing
        if not case.place.is_local:
            return "it writes to paths, and to Google Cloud Storage"
        if not case.durable:
            return "it makes everything durable, and this run does not"
        return None if case.alone else "it shards JAX arrays over JAX's own processes"

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        import jax
        import ml_dtypes
        import orbax.checkpoint as ocp

        def array(tensor: torch.Tensor) -> Any:
            if tensor.dtype == torch.bfloat16:
                return jax.numpy.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
            return jax.numpy.asarray(tensor.numpy())

        self._tree = {name: array(tensor) for name, tensor in case.local.items()}
        self._checkpointer = ocp.StandardCheckpointer()
        self._found: Mapping[str, Any] = {}

    def save(self, place: str) -> Wait | None:
        self._checkpointer.save(f"{place}/tree", self._tree)
        self._checkpointer.wait_until_finished()
        return None

    def load(self, place: str) -> None:
        import jax

        wanted = jax.tree.map(
            lambda item: jax.ShapeDtypeStruct(item.shape, item.dtype, sharding=item.sharding), self._tree
        )
        self._found = self._checkpointer.restore(f"{place}/tree", wanted)
        jax.block_until_ready(self._found)

    def wrong(self) -> str | None:
        import numpy as np

        for name, item in self._tree.items():
            if np.asarray(item).tobytes() != np.asarray(self._found[name]).tobytes():
                return name
        return None

    def close(self) -> None:
        self._checkpointer.close()
