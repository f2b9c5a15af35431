"""The tracker of W&B, with its own client in offline mode: nothing leaves the machine, and its log is read back."""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tracker_contract import Tracked, TrackerContract, save

from ckptstore import InvalidInput, open_store
from ckptstore.integrations.trackers import Reference, follow
from ckptstore.integrations.wandb import LOCAL_NAME, WandbTracker, checkpoint_of, reference_of, references

pytestmark = pytest.mark.slow

if TYPE_CHECKING:  # a second, in each process that collects the tests; see `_offline`
    import wandb

QUIET = {"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True}


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All that W&B keeps lies in a directory of the test, and what would go out is refused at this machine."""
    globals()["wandb"] = import_module("wandb")
    directory = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CACHE_DIR", "DATA_DIR", "CONFIG_DIR", "ARTIFACT_DIR"):
            patch.setenv(f"WANDB_{name}", str(directory / name))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", str(directory / "netrc"))
        yield
        wandb.teardown()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    settings = wandb.Settings(**QUIET)
    with wandb.init(project="digits", dir=str(tmp_path), reinit="create_new", settings=settings) as run:
        yield run


class TestWandb(TrackerContract):
    @pytest.fixture
    def tracked(self, run: Any) -> Tracked:
        return Tracked(WandbTracker(run), partial(references, run), partial(checkpoint_of, run))


def artifacts_told(run: Any) -> list[Any]:
    """The artifacts in the log of a finished run, which `wandb sync` would send. The client writes it when it likes."""
    (path,) = Path(run.dir).parent.glob("run-*.wandb")
    deadline = time.monotonic() + 60
    while not (found := list(records(path.read_bytes()))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]


def records(data: bytes) -> Iterator[Any]:
    """The records in a log of the client, which is one of LevelDB behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):  # not written yet
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def test_what_wandb_was_told(run: Any, store_root: Path) -> None:
    with open_store(store_root) as store, follow(store, WandbTracker(run)):
        save(store, 5, loss=0.5, other=float("nan"))
        save(store, 6, loss=0.25)
        expected = Reference.to(store[5])
    with open_store(store_root) as store:
        WandbTracker(run).log(expected)  # later, as what a tracker that was away has not got
    assert run.summary["ckptstore/step"] == 6
    assert run.step == 0  # the history is the training loop's
    run.finish()
    told = artifacts_told(run)
    assert [(item.type, item.name, sorted(item.aliases)) for item in told] == [
        ("model", f"checkpoints-{run.id}", ["latest", f"step-{step}"]) for step in (5, 6, 5)
    ]
    metadata = json.loads(told[0].metadata)
    assert (metadata["uri"], metadata["step"], metadata["number"]) == (expected.uri, 5, expected.number)
    assert (metadata["manifest_sha256"], metadata["metrics"]) == (expected.manifest_sha256, {"loss": 0.5})
    contents = {item.path: item for item in told[0].manifest.contents}
    assert contents["ckptstore.json"].ref == f"file://{expected.uri}/ckptstore.json"
    assert set(contents) == {"ckptstore.json", "reference.json"}
    assert contents["reference.json"].size < 2000  # no copy of anything
    assert checkpoint_of(Path(run.dir).parent, step=5).verify().ok  # the run is over, its directory leads back


def test_an_artifact_leads_back_to_its_checkpoint(store_root: Path) -> None:
    with open_store(store_root) as store:
        save(store, 5, loss=0.5)
        save(store, 6, loss=0.25)
        text = Reference.to(store[5]).encode()
    artifact = wandb.Artifact("checkpoints-x", type="model", metadata={"ckptstore_reference": text})
    assert checkpoint_of(artifact).step == 5
    assert reference_of(artifact).step == 5
    with pytest.raises(InvalidInput, match="An artifact is one checkpoint"):
        checkpoint_of(artifact, step=6)
    with pytest.raises(InvalidInput, match="is no checkpoint of ckptstore"):
        checkpoint_of(wandb.Artifact("other", type="model"))


class StoredRun:
    """What `references` uses of a run that the server has: an iterable of artifacts."""

    def __init__(self, *artifacts: Any) -> None:
        self.artifacts = artifacts

    def logged_artifacts(self) -> Iterator[Any]:
        return iter(self.artifacts)


def test_artifacts_of_somebody_else_are_passed_over(store_root: Path) -> None:
    with open_store(store_root) as store:
        save(store, 5)
        metadata = {"ckptstore_reference": Reference.to(store[5]).encode()}
    ours = wandb.Artifact("checkpoints-x", type="model", metadata=metadata)
    others = [wandb.Artifact("own", type="model", metadata={"step": 1}), wandb.Artifact("data", type="dataset")]
    stored: Any = StoredRun(*others, ours, ours)
    assert [item.step for item in references(stored)] == [5]
    assert checkpoint_of(stored, step=5).step == 5


def test_an_object_store_is_referred_to_without_being_asked(run: Any) -> None:
    fields: dict[str, Any] = {"attempt": "step-0000000001-e0001-0123abcd", "manifest_sha256": "ab" * 32}
    fields |= {"step": 1, "number": 2, "size_bytes": 3, "world_size": 1, "created_at": 1.0}
    reference = Reference(store="s3://bucket/run", **fields)
    tracker = WandbTracker(run)
    tracker.log(reference)
    tracker.log(Reference(**{**vars(reference), "store": "az://container/run"}))
    run.finish()
    first, second = artifacts_told(run)
    assert f"{reference.uri}/ckptstore.json" in {item.ref for item in first.manifest.contents}
    assert [item.path for item in second.manifest.contents] == ["reference.json"]
    assert json.loads(second.metadata)["uri"].startswith("az://container/run/checkpoints/")


def test_the_present_run_is_taken_or_one_that_is_found_out_later(run: Any, store_root: Path) -> None:
    tracker = WandbTracker(lambda: run)
    with open_store(store_root) as store, follow(store, tracker):
        save(store, 1)
    assert str(tracker) == f"W&B run {run.id}"
    assert [item.step for item in references(run)] == [1]
    assert (Path(run.dir).parent / LOCAL_NAME).read_text().count("\n") == 1


def test_a_run_that_is_disabled_is_left_alone(tmp_path: Path, store_root: Path) -> None:
    with wandb.init(mode="disabled", dir=str(tmp_path), reinit="create_new") as disabled:
        with open_store(store_root) as store, follow(store, WandbTracker(disabled)) as following:
            save(store, 1)
        assert following.unsent == ()


@pytest.mark.parametrize(("given", "reason"), [(None, "no run when the tracker was made"), (5, "run is a int")])
def test_without_a_run_the_checkpoint_is_saved_and_the_log_says_so(
    store_root: Path, given: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb, "run", None)
    with open_store(store_root) as store:
        with follow(store, WandbTracker(given)) as following:
            save(store, 1)
        assert store.latest() == store[1]
    assert [item.step for item in following.unsent] == [1]
    assert reason in caplog.text


def test_a_run_that_is_finished_fails_no_save(run: Any, store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.finish()
    with open_store(store_root) as store:
        with follow(store, WandbTracker(run)) as following:
            for step in (1, 2):
                save(store, step)
        assert len(store) == 2
    assert [item.step for item in following.unsent] == [1, 2]
    warned = [item.getMessage() for item in caplog.records if item.levelno == logging.WARNING]
    assert "W&B refuses it: Run" in warned[0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not the directory of an offline run"):
        references(tmp_path)
    for given in (5, "a b", "a/b/c/d", None):
        with pytest.raises(InvalidInput, match="run is "):
            references(given)
    with pytest.raises(InvalidInput, match="W&B refuses it"):
        references("entity/project/run")  # nobody is logged in
