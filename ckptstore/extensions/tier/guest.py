"""The fast tier as a job has it: a guest of the core, which knows it as `job.Tier`."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptstore.errors import InvalidInput
from ckptstore.extensions.peers.channel import NodeKeys
from ckptstore.extensions.tier import finding
from ckptstore.extensions.tier.near_node import NearNode
from ckptstore.extensions.tier.nodes import arrival
from ckptstore.extensions.tier.nodes.fast_place import FastPlace
from ckptstore.extensions.tier.nodes.members import Members
from ckptstore.extensions.tier.tier import FastTier
from ckptstore.job import Job
from ckptstore.loading.newest import Candidates, Near, newest_first
from ckptstore.transfer import Transfer

if TYPE_CHECKING:
    from ckptstore.extensions.tier.saver import FastSaver
    from ckptstore.saving.background import Background


class Guest:
    """See `job.Tier`."""

    def __init__(self, tier: FastTier) -> None:
        """Raise InvalidInput unless a caller has given a FastTier."""
        if not isinstance(tier, FastTier):
            raise InvalidInput(f"fast is {tier!r}, it is a FastTier", hint='Write fast=FastTier("/a/directory")')
        self.tier = tier
        self.place: FastPlace | None = None
        """The fast tier of this process; None until the ranks have met for it."""
        self._near: NearNode | None = None

    @property
    def is_open(self) -> bool:
        return self.place is not None

    def open(self, job: Job, step: int | None = None) -> FastPlace:
        """Return the fast tier of this process. The first call is collective.

        It claims the store if that is not claimed, to save `step` unless that is None. Raises InvalidInput when the
        ranks do not fit together or a directory is not safe to use, StoreFenced, StorageError.
        """
        if self.place is not None:
            return self.place
        tier, keys = self.tier, NodeKeys()

        def agree() -> Any:
            nodes = arrival.agree(offers)
            if job.epoch is None:
                job.claim(None) if step is None else job.claim_to_save(step)
            return {
                **job.claimed(),
                "store_id": job.store_id(),
                "nodes": nodes,
                "is_one_machine": len({offer["machine"] for offer in offers}) == 1,
                "job": secrets.token_hex(16),
                "keys": [offer["key"] for offer in offers],
            }

        with job.group.meeting("fast tier") as meeting:
            offers = meeting.gather(arrival.offer(tier, job.group, keys))
            agreed = meeting.tell(agree)
        job.join_claim(agreed)
        members, config, server = Members(tuple(agreed["nodes"]), job.group.rank), job.config, None
        try:
            with job.group.meeting("node disks") as meeting:
                disk, server = arrival.come(tier, members, config, agreed, keys)
                served = server.addresses if server else []
                arrivals = meeting.gather({"identity": disk.identity(), "addresses": served})
                addresses = meeting.tell(lambda: arrival.join_arrivals(arrivals, members, copies=tier.copies))
        except BaseException:
            if server is not None:
                server.close()
            raise
        claim_number, claim_sha256 = agreed["claim"]
        self.place = FastPlace(
            tier=tier,
            disk=disk,
            transfer=Transfer(disk.storage, config=config.transfer, retry=config.retry, rank=members.rank),
            members=members,
            claim_number=claim_number,
            claim_sha256=claim_sha256,
            epoch=agreed["epoch"],
            server=server,
            clients=arrival.clients_of(addresses, members, config, keys),
        )
        job.at_close(self.place.close)
        return self.place

    def candidates(self, job: Job, order: object, *, is_loaded: bool) -> Candidates | None:
        """See `Tier.candidates`. Without `is_loaded` the caller loads nothing yet, and each comes once."""
        if order is newest_first:
            return finding.look(job, self.open(job), is_loaded=is_loaded)
        if isinstance(order, finding.FastOrder):
            return finding.look(job, self.open(job), order.of_fast, is_loaded=is_loaded)
        return None

    def saver(self, job: Job, background: Background) -> FastSaver:
        from ckptstore.extensions.tier.saver import FastSaver  # loads torch

        return FastSaver(job=job, background=background, open_place=partial(self.open, job))

    def near(self, job: Job) -> list[Near]:
        if self._near is None:
            self._near = NearNode(job, self.tier)
        return self._near.look(self.place)
