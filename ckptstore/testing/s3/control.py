"""Control faults, counts and the log over HTTP, for a server that runs in a process of its own.

GET /_control/stats, GET /_control/log, POST /_control/faults (a JSON list of `Fault` fields), POST /_control/reset.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ckptstore.testing.s3.messages import Answer
from ckptstore.testing.s3.objects import S3Error
from ckptstore.testing.s3.rules import Fault
from ckptstore.testing.s3.shared import Shared

PREFIX = "/_control/"


def answer(shared: Shared, path: str, body: memoryview | None) -> Answer:
    """Carry out a control request."""
    command = path.removeprefix(PREFIX)
    if command == "stats":
        return _json(stats(shared))
    if command == "log":
        return _json([asdict(request) for request in shared.log])
    if command == "faults":
        shared.faults.replace(Fault(**fields) for fields in json.loads(bytes(body or b"[]")))
        return _json({})
    if command == "reset":
        shared.service.objects.buckets.clear()
        shared.service.objects.uploads.clear()
        shared.faults.clear()
        shared.log.clear()
        return _json({})
    raise S3Error(404, "NoSuchControl", command)


def stats(shared: Shared) -> dict[str, object]:
    """Return counts of objects, bytes, uploads and requests."""
    buckets = shared.service.objects.buckets
    return {
        "objects": {name: len(objects) for name, objects in buckets.items()},
        "bytes": sum(stored.size_bytes for objects in buckets.values() for stored in objects.values()),
        "uploads": len(shared.service.objects.uploads),
        "requests": len(shared.log),
        "in_flight": shared.in_flight,
        "most_in_flight": shared.most_in_flight,
    }


def _json(value: object) -> Answer:
    return Answer.of(json.dumps(value).encode(), headers={"content-type": "application/json"})
