"""The state that all connections of one server share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ckptstore.testing.s3.link import Link
from ckptstore.testing.s3.objects import LoggedRequest
from ckptstore.testing.s3.rules import Faults
from ckptstore.testing.s3.service import Service


@dataclass(slots=True, kw_only=True)
class Shared:
    """The server's state and switches."""

    service: Service
    faults: Faults
    log: list[LoggedRequest]
    verify: bool
    keep_bodies: bool
    md5_etags: bool
    link: Link
    in_flight: int = 0
    most_in_flight: int = 0
    transports: set[asyncio.Transport] = field(default_factory=set)
    """The open connections."""
