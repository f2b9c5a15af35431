"""Find the processes of a job in the system, and their ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptstore.tools.run.folders.open_files import PROC, pids
from ckptstore.transfer.sources import refuse_shortage

RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")
"""The variables with the rank of a process: of torchrun, Open MPI, MPICH, Slurm."""
_LOCAL_RANK = b"LOCAL_RANK"
_SET_WITH_RANK = (_LOCAL_RANK, b"WORLD_SIZE")
"""The variables that launchers set beside `RANK`: a node and one of its ranks may have the same number."""


@dataclass(frozen=True, slots=True)
class JobSeen:
    """The facts of a job at the moment of a look."""

    ranks: frozenset[int] | None = None
    """The ranks of its processes on this node, empty for a job that has none; None when they are unknown. One that has
    ended counts as long as another one runs: what it has not written is lacking."""
    is_started: bool = False
    """True if the agent started it, after its first look into the folder: what was there then is not its own."""
    is_alive: bool = True
    """False once all its processes have ended, or it has failed: what is unfinished stays so."""
    ended_well: bool = False
    """True if it ended with exit code 0: then it has left nothing half-written."""


class StartedJob:
    """The job that a child of this process began: those below it, and those of its session that outlived their
    parents."""

    def __init__(self, root: int) -> None:
        self.root = root
        self._ranks: dict[int, int] = {}
        """The ranks by process. One that has ended stays as long as another one that was started with it runs."""

    def seen(self) -> JobSeen:
        """Look at its processes."""
        parents, sessions = _processes()
        members = {self.root} if self.root in parents else set()
        grew = True
        while grew:
            more = {pid for pid, parent in parents.items() if parent in members} - members
            grew = bool(more)
            members |= more
        members |= {pid for pid, session in sessions.items() if session == self.root}
        own_ranks = _own_ranks(members, parents)
        if own_ranks:
            self._ranks = {**self._ranks, **own_ranks} if own_ranks.keys() & self._ranks.keys() else own_ranks
        ranks = frozenset(self._ranks.values())
        if members and not ranks and (rank := _rank_in(os.environb, RANK_VARIABLES)) is not None:
            ranks = frozenset([rank])  # nothing in the job got another one: it is that of the whole job
        return JobSeen(ranks, is_started=True, is_alive=bool(members))


def _processes() -> tuple[dict[int, int], dict[int, int]]:
    """Return the parent of each process, and its session; of those that have not ended."""
    parents, sessions = {}, {}
    for pid in pids():
        try:
            # The name of the program may hold anything, a bracket too; nothing after it does.
            fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError as error:  # it has ended
            refuse_shortage(error, PROC)
            continue
        if fields[0] != b"Z":
            parents[pid], sessions[pid] = int(fields[1]), int(fields[3])
    return parents, sessions


def _own_ranks(members: Collection[int], parents: Mapping[int, int]) -> dict[int, int]:
    """Return the ranks of those of these processes that got one of their own from whoever started them.

    What a process has from its parent says nothing: a launcher has the number of its node (`SLURM_PROCID` with one task
    a node, `RANK` in a pod of Kubeflow), and all that it starts inherits that. So who starts others with ranks is none.
    Below a rank of this node there are no further ones: what it starts is a job of its own.
    """
    variables = {pid: found for pid in members if (found := _variables(pid)) is not None}
    outside = {name: os.environb[name] for name in (*RANK_VARIABLES, *_SET_WITH_RANK) if name in os.environb}
    own_ranks: dict[int, int] = {}
    local: set[int] = set()
    for pid, own in variables.items():
        above = variables.get(parents[pid], outside)
        new = [name for name in (*RANK_VARIABLES, *_SET_WITH_RANK) if name in own and own[name] != above.get(name)]
        rank = _rank_in(own, [name for name in RANK_VARIABLES if name in new] or RANK_VARIABLES[:1]) if new else None
        if rank is not None:
            own_ranks[pid] = rank
            local |= {pid} if _LOCAL_RANK in new else set()
    no_ranks = set()
    for pid in own_ranks:
        above_it = parents[pid]
        while above_it in variables:
            no_ranks.add(pid if above_it in local else above_it)
            above_it = parents[above_it]
    return {pid: rank for pid, rank in own_ranks.items() if pid not in no_ranks}


def _variables(pid: int) -> dict[bytes, bytes] | None:
    """Return the environment that a process was started with; None for one that has ended, or is another user's."""
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError as error:
        refuse_shortage(error, PROC)
        return None
    return dict(entry.partition(b"=")[::2] for entry in entries)


def _rank_in(variables: Mapping[bytes, bytes], names: Collection[bytes]) -> int | None:
    return next((int(variables[name]) for name in names if variables.get(name, b"").isdigit()), None)
