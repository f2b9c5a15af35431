"""Orbax on the same bytes as JAX arrays of the CPU, one rank or several; it returns new arrays."""

from __future__ import annotations

from typing import Any

import torch

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import MOST_FILES, Contender, Settings, Wait, variant


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
