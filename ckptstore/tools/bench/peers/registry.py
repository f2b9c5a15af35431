"""Every contest: what all contenders do, what counts, and who they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptstore.tools.bench.peers import dcp, device, directories, files, finding, limits, managers, own, tier
from ckptstore.tools.bench.peers.base import Contender
from ckptstore.tools.bench.training import Steps
from ckptstore.tools.bench.turns import Contest

Kinds = tuple[type[Contender], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One contest."""

    title: str = ""
    contenders: Kinds
    action: str = "save"
    """The timed method of a contender: "save" or "load"."""
    figure: str = "total_seconds"
    """The figure of a sample that ratios are made of."""
    contest: type[Contest] = Contest
    watched: type[own.Ckptstore] | None = None
    """The contender whose save is watched for a timeline."""


_ON_DISK: Kinds = (
    *(dcp.Dcp, dcp.DcpHuggingFace, managers.TorchCheckpointing, files.TorchSave, files.Safetensors),
    *(files.Lightning, directories.RayReport, managers.Orbax),
)
_STATES: Kinds = (
    *(dcp.Dcp, dcp.DcpHuggingFace, dcp.DcpFsspec, dcp.DcpS3, files.S3Checkpoint),
    *(managers.TorchCheckpointing, files.TorchSave, files.TorchSaveFsspec),
    *(files.Safetensors, files.SafetensorsFsspec, files.Lightning, directories.RayReport, managers.Orbax),
)
_ASYNC: Kinds = (
    *(dcp.AsyncDcp, dcp.AsyncDcpProcess, managers.AsyncTorchCheckpointing),
    *(files.AsyncLightning, directories.RayReportAsync, managers.AsyncOrbax),
)
_STAGED: Kinds = (own.AsyncCkptstore, device.DefaultStaged, device.DefaultStagedProcess)

TABLES: Mapping[str, Table] = {
    "save": Table(
        title="Save a state",
        contenders=(
            *(own.KeptCkptstore, own.FirstSaveCkptstore, *_STATES),
            *(limits.RawDisk, limits.RawRequests, limits.PlainSockets),
        ),
        watched=own.Ckptstore,
    ),
    "load": Table(
        title="Load into tensors that exist",
        action="load",
        contenders=(own.Ckptstore, *_STATES, limits.RawDiskLoad, limits.RawRequests),
    ),
    "async": Table(
        title="Stall of an asynchronous save",
        figure="blocked_seconds",
        contenders=(own.AsyncCkptstore, *_ASYNC, limits.Memcpy),
        watched=own.AsyncCkptstore,
    ),
    "directory": Table(
        title="Save a directory of files",
        contenders=(
            *(own.DirectoryCkptstore, own.LinkedCkptstore, directories.RayPersist, directories.CopyRecursively),
            *(directories.PyarrowCopy, directories.FsspecCopy, limits.RawDisk, limits.RawRequests),
        ),
    ),
    "node-cache": Table(
        title="All processes of a node open one checkpoint",
        action="load",
        contenders=(
            *(
                directories.OneDownload,
                directories.RayAsDirectory,
                directories.PyarrowDownload,
                directories.FsspecDownload,
            ),
            directories.RawDownload,
        ),
    ),
    "tier-save": Table(
        contenders=(
            *(tier.OneCopy, tier.TwoCopies, tier.NoTier, tier.ToDisk, *_ASYNC, *tier.TO_BUCKET),
            *(limits.RawNode, limits.BothCopies, limits.Loopback, limits.Memcpy),
        )
    ),
    "tier-resume": Table(
        action="load",
        contenders=(
            *(tier.FromOwnNode, tier.FromPartner, tier.FromEmptyNodes, tier.FromDisk, tier.FromBucket),
            *(*_ON_DISK, *tier.OF_BUCKET, limits.RawDiskLoad),
        ),
    ),
    "tier-steps": Table(contenders=(tier.CappedDrain, *tier.BESIDE, tier.NoDrain)),
    "ranks": Table(contenders=(own.Ckptstore, *_STATES, limits.RawDisk, limits.RawRequests)),
    "gpu-stall": Table(
        title="Stall of an asynchronous save",
        figure="blocked_seconds",
        contenders=(*_STAGED, device.PinnedCopy),
    ),
    "gpu-steps": Table(title="Seconds that a training loses to one save beside it", contenders=_STAGED, contest=Steps),
    "gpu-first": Table(
        title="Stall of the first asynchronous save",
        figure="blocked_seconds",
        contenders=(
            *(device.FirstSave, device.FirstSaveWarmed, device.FirstSaveResumed),
            *(device.FirstDefaultStaged, device.PinnedCopy),
        ),
    ),
    "gpu-load": Table(
        title="Load into tensors that exist on the device",
        action="load",
        contenders=(
            *(own.Ckptstore, dcp.Dcp, device.SafetensorsToDevice, device.FastSafetensors),
            *(device.FastSafetensorsDirect, device.RawToDevice),
        ),
    ),
    "ls": Table(
        contenders=(
            *(finding.Latest, finding.Listing, finding.OrbaxFinder, finding.TransformersFinder),
            finding.RawListing,
        )
    ),
}
"""In the order of the tables. Contests that begin with "tier-" or "gpu-" belong to the workload of that name."""

FAMILIES = tuple(
    dict.fromkeys(kind.family for table in TABLES.values() for kind in table.contenders if kind.role == "peer")
)
"""The names for `--peers`."""
