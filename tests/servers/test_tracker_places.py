"""References to a store in a bucket: without secrets, and opened again with them."""

from __future__ import annotations

import pytest

from ckptstore import AccessDenied, open_store
from ckptstore.integrations.trackers import Reference, follow
from ckptstore.testing.s3_server import s3_server

pytestmark = pytest.mark.slow


class Keeper:
    """A tracker that keeps text, as all of them do."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def log(self, reference: Reference) -> None:
        self.texts.append(reference.encode())

    def close(self) -> None:
        """Nothing is open."""


def test_a_reference_has_no_secrets_and_opens_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, secrets = Keeper(), {"key": "AKIAOFTHEJOB", "secret": "nobody-may-see-this"}
    with s3_server(buckets=["test"], access_keys=["AKIAOFTHEJOB"]) as server:
        options = {**server.storage_options, **secrets}
        with open_store("s3://test/tracked", storage_options=options) as store, follow(store, keeper):
            store.save(1, {"weight": 1}, metrics={"loss": 0.5})
        (text,) = keeper.texts
        reference = Reference.decode(text)
        assert reference.target == "s3://test/tracked@1"
        assert not any(secret in text for secret in secrets.values())
        assert reference.open(storage_options=options).verify().ok
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        for wrong in (None, {**options, "key": "AKIAOFSOMEBODY"}):
            with pytest.raises(AccessDenied, match="give storage_options"):
                reference.open(storage_options=wrong)
