"""Checkpoint managers of other projects: torch_checkpointing's, and Orbax's on the same bytes as JAX arrays of the CPU.

torch_checkpointing has its own settings for machines without CUDA, on a local disk. Its storage opens files with
O_DIRECT by default and then writes lengths that are no multiple of the disk's blocks. ext4 refuses these, so it runs
with `use_direct_io=False`. It makes nothing durable by itself. It gets no resharder, whose collectives need CUDA: each
rank loads what it saved. Orbax returns new arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import MOST_FILES, ZIPPED, Contender, Settings, Wait, shares_of, variant


class TorchCheckpointing(Contender):
    """`CheckpointManager.save` and `.load`, synchronous. The manager lives as long as the contender, as in a job.

    It saves named items, each to a file, and has threads for several of them: so there are as many items as threads.
    """

    name = family = "torch_checkpointing"
    modules = packages = ("torch_checkpointing",)
    needs = ("disk", "its one storage is the local disk")
    checks = ZIPPED
    warmed = ("save",)
    tried = (*({"thread_count": count} for count in (1, 2, 4)), {"thread_count": 2, "format": "safetensors"})
    tried_in_load = ({"mmap": True}, {"mmap": False}, {"format": "safetensors"})

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        found = super().sweep(case, action)
        # It cannot copy tensors of safetensors into a DTensor.
        return found if case.alone or action == "save" else [each for each in found if "format" not in each]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import CheckpointLoaderConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        def spec(name: str) -> Any:
            if settings.get("format") != "safetensors":
                return ItemSpec()
            return ItemSpec(layout=LayoutInfo(f"{name}_{{rank}}.safetensors", SafetensorsSerialization()))

        count = settings.get("thread_count", 1)
        self._items = {f"model{number}": names for number, names in enumerate(shares_of(case.local, count))}
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                items={name: spec(name) for name in self._items},
                save=self.saver(CheckpointWriterConfig(file_write_max_threads=count)),
                load=CheckpointLoaderConfig(use_mmap=settings.get("mmap", True)),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def saver(self, writer: Any) -> Any:
        """Return the configuration of its way to save."""
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        return SyncCheckpointSaverConfig(writer_config=writer)

    def _payload(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {item: {name: state[name] for name in names} for item, names in self._items.items()}

    def start(self, place: str) -> Wait | None:
        future = self._manager.save(place, self._payload(self.case.state))

        def wait() -> None:
            if future is not None:
                future.result()
            self.case.gather(None)  # rank 0 renames the directory: the others do not wait for it by themselves
            if self.case.rank == 0:
                self.persist(place)
            self.case.gather(None)

        return wait

    def load(self, place: str) -> None:
        self._manager.load(place, into=self._payload(self.case.target), strict=True)

    def close(self) -> None:
        self._manager.close()


class AsyncTorchCheckpointing(TorchCheckpointing):
    """`CheckpointManager.save` from its background process.

    The copy is made before the call returns, as with all peers: by default it goes on afterwards, and the next change
    of the state waits for it.
    """

    name = "torch_checkpointing, async"
    tried = ({"thread_count": 2, "shared_memory": True}, {"thread_count": 2, "shared_memory": False})
    in_background = True

    def saver(self, writer: Any) -> Any:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        shared = self.settings["shared_memory"]
        staging = CheckpointStagerConfig(use_async_staging=False, use_shared_memory=shared)
        return AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)


class Orbax(Contender):
    """`AsyncCheckpointer` with PyTreeCheckpointHandler, in the foreground. Its writes are always durable.

    Each of several ranks is a process of JAX with one device, and a tensor is an array whose rows are spread over them.
    They meet through JAX's own service.
    """

    name, family = "Orbax", "orbax"
    modules = ("orbax.checkpoint", "jax")
    packages = ("orbax-checkpoint", "jax", "tensorstore")
    checks = "a checksum of its index; nothing of the data"
    warmed = ("save",)
    needs = ("disk", "it writes to paths, and to Google Cloud Storage")
    tried = ({}, {"uncompressed": True}, {"uncompressed": True, "without_ocdbt": True})

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return super().unfit(case) or (None if case.durable else "it makes everything durable, and this run does not")

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[Settings]:
        return super().sweep(case, action)[: 3 if len(case.local) <= MOST_FILES else 2]

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        _meet(case)
        import orbax.checkpoint as ocp

        self._tree = {name: _array(tensor, case.world_size) for name, tensor in case.local.items()}
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(
                use_ocdbt=not settings.get("without_ocdbt", False),
                use_compression=not settings.get("uncompressed", False),
            )
        )

    def start(self, place: str) -> Wait | None:
        import orbax.checkpoint as ocp

        self._checkpointer.save(f"{place}/tree", args=ocp.args.PyTreeSave(self._tree))
        wait: Wait = self._checkpointer.wait_until_finished
        return wait

    def load(self, place: str) -> None:
        import jax
        import orbax.checkpoint as ocp

        how = ocp.checkpoint_utils.construct_restore_args(self._tree)
        args = ocp.args.PyTreeRestore(item=self._tree, restore_args=how)
        self._found = self._checkpointer.restore(f"{place}/tree", args=args)
        jax.block_until_ready(self._found)

    def wrong(self) -> str | None:
        return next((name for name, item in self._tree.items() if _bytes(item) != _bytes(self._found[name])), None)

    def close(self) -> None:
        self._checkpointer.close()


AsyncOrbax = variant(Orbax, name="Orbax, async", in_background=True)
"""Orbax in the background. Arrays of JAX never change, so on a CPU it has nothing to copy before it returns."""


def _meet(case: Case) -> None:
    """Initialize JAX's processes on the ranks, once per process and before any other call of JAX."""
    if case.alone:
        return
    import socket

    import jax

    if jax.distributed.is_initialized():
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = case.gather(listener.getsockname()[1])[0]
    case.gather(None)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=case.world_size, process_id=case.rank)


def _array(tensor: torch.Tensor, world_size: int) -> Any:
    """Return the array of which this rank holds the rows."""
    import jax
    import ml_dtypes
    import numpy as np

    is_bfloat16 = tensor.dtype == torch.bfloat16
    local = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy()
    local = local.copy()  # an array of JAX may lie where the one of numpy does, which training changes
    if world_size == 1:
        return jax.numpy.asarray(local)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    return jax.make_array_from_process_local_data(rows, local)


def _bytes(array: Any) -> bytes:
    """Return the bytes that this rank holds."""
    import numpy as np

    (shard,) = array.addressable_shards
    return np.asarray(shard.data).tobytes()
