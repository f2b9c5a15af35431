"""Find the node of a job that this agent runs on: by the options, else by SLURM or a launcher of PyTorch jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.errors import InvalidInput

_PER_NODE = re.compile(r"1(\(x\d+\))?")
"""SLURM_STEP_TASKS_PER_NODE of a step with one task on each node."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """This node among those of the job."""

    count: int = 1
    rank: int = 0
    run_id: str = ""
    """The same on all nodes, and new for each start of the job. Empty for one node."""


def find_nodes(
    count: int | None, rank: int | None, run_id: str | None, environ: Mapping[str, str] | None = None
) -> Nodes:
    """Return what the options say, completed from the environment.

    Raises InvalidInput for options that do not fit together, for several nodes without a run id, and inside of a
    launcher that starts several processes on a node: each of them would start an agent.
    """
    environ = os.environ if environ is None else environ
    _refuse_ranks(environ)
    found = _of_slurm(environ) or _of_launcher(environ) or Nodes()
    count = found.count if count is None else count
    if count == 1:
        if rank not in (None, 0):
            raise InvalidInput(f"--node-rank is {rank}, and there is one node", hint="Give --nodes too")
        return Nodes()
    rank = found.rank if rank is None and found.count == count else rank
    run_id = run_id or (found.run_id if found.count == count else "")
    if rank is None or not run_id:
        missing = "--node-rank" if rank is None else "--run-id"
        raise InvalidInput(
            f"There are {count} nodes, and {missing} is missing",
            hint="The run id is the same on all nodes and new for each start of the job; --nodes 1 for one agent alone",
        )
    if count < 1 or not 0 <= rank < count:
        raise InvalidInput(f"--node-rank is {rank}, it must be from 0 to {count - 1}")
    return Nodes(count, rank, run_id)


def _of_slurm(environ: Mapping[str, str]) -> Nodes | None:
    """Read the node from SLURM, inside of `srun` alone: a batch script runs on one node, whatever the number of nodes
    of its job."""
    count = environ.get("SLURM_STEP_NUM_NODES", "")
    if not environ.get("SLURM_STEP_ID", "").isdecimal() or not count.isdecimal():
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    run_id = "-".join(environ[name] for name in names if environ.get(name))
    return Nodes(int(count), int(environ.get("SLURM_NODEID", "0")), f"slurm-{run_id}")


def _of_launcher(environ: Mapping[str, str]) -> Nodes | None:
    """Read the variables that torchrun takes for its options, as the operators of Kubernetes set them."""
    count = environ.get("PET_NNODES", "")
    if not count.isdecimal():
        return None
    rank = environ.get("PET_NODE_RANK", "")
    if not rank.isdecimal():
        return Nodes() if int(count) == 1 else None
    return Nodes(int(count), int(rank), environ.get("PET_RDZV_ID") or environ.get("TORCHELASTIC_RUN_ID") or "")


def _refuse_ranks(environ: Mapping[str, str]) -> None:
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    in_step = environ.get("SLURM_STEP_ID", "").isdecimal()
    if in_step and not all(_PER_NODE.fullmatch(part) for part in per_node.split(",")):
        raise InvalidInput(
            f"srun starts {per_node} tasks per node, and each would be an agent of its own",
            hint="Start one a node: srun --ntasks-per-node=1 ckptstore run ... -- torchrun --nproc-per-node ...",
        )
    local = environ.get("LOCAL_WORLD_SIZE", "1")
    if local.isdecimal() and int(local) > 1:
        raise InvalidInput(
            f"This is one of {local} processes that a launcher has started on this node",
            hint="Write ckptstore run before the launcher: ckptstore run ... -- torchrun ...",
        )
