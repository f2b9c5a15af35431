"""torch's own distributed checkpoints in the background, from a thread and from a process."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from ckptstore.tools.bench.case import Case
from ckptstore.tools.bench.peers.base import Wait
from ckptstore.tools.bench.peers.dcp import Dcp, DcpFsspec, DcpS3
from ckptstore.tools.bench.shapes import empty_like


class AsyncDcp(Dcp):
    """`dcp.async_save` from a thread. Its staging memory and its plans are reused from save to save.

    Without an accelerator nothing is pinned. It stages before the call returns: DefaultStager can go on afterwards, and
    then the next change of the state waits for it.
    """

    name = "dcp.async_save, thread"
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    @classmethod
    def unfit(cls, case: Case) -> str | None:
        return None

    def __init__(self, case: Case, **settings: Any) -> None:
        super().__init__(case, **settings)
        self._stager = self._stager_of(settings.get("stager", "DefaultStager"))

    def _stager_of(self, name: str) -> AsyncStager:
        if name == "BlockingAsyncStager":
            found = BlockingAsyncStager(cache_staged_state_dict=True)
            found.state_dict_cache = dict(empty_like(self.case.local))  # it would pin it, which takes an accelerator
            return found
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory="shared" in name,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    @classmethod
    def sweep(cls, case: Case, action: str) -> list[dict[str, Any]]:
        stagers = ["DefaultStager", "DefaultStager, shared memory"]
        if case.alone:  # it knows no other memory for parts of DTensors than pinned one
            stagers.append("BlockingAsyncStager")
        found: list[dict[str, Any]] = [{"stager": name, "thread_count": 2, "cached_plans": True} for name in stagers]
        return [*found, {"stager": "DefaultStager", "thread_count": 4, "cached_plans": True}]

    def writer(self, place: str) -> Any:
        if self.case.place.is_local:
            return super().writer(place)
        other = DcpS3 if self.case.place.is_s3 and DcpS3.objection(self.case) is None else DcpFsspec
        return other(self.case, **self.settings).writer(place)

    def save(self, place: str) -> Wait | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = async_save(
                dict(self.case.state),
                storage_writer=self.writer(place),
                planner=self.planner,
                async_stager=self._stager,
                async_checkpointer_type=self.kind,
                no_dist=self.case.alone,
            )
        return future.result  # type: ignore[union-attr]

    def close(self) -> None:
        self._stager.close()


class AsyncDcpProcess(AsyncDcp):
    """`dcp.async_save` from a process of its own, which lives as long as the rank."""

    name = "dcp.async_save, process"
    kind = AsyncCheckpointerType.PROCESS
