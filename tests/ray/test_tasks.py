"""Large jobs as Ray tasks: `cp`, `verify` and `export` on two nodes do what they do in one process."""

from __future__ import annotations

import filecmp
import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from cluster import RayCluster

import ckptstore
from ckptstore import CheckpointDamaged, InvalidInput, RankFailed
from ckptstore.integrations.ray.tasks import RayExecutor, ray_executor
from ckptstore.runtime.beat import beating
from ckptstore.storage.open import open_storage
from ckptstore.testing.s3_server import S3Server
from ckptstore.tools.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A state in the first checkpoint, files in the second."""
    root = tmp_path / "store"
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    for number in range(12):
        (source / f"{number}.bin").write_bytes(os.urandom(1000 * number + 3_000_000 * (number == 5)))
    with ckptstore.open_store(root) as opened:
        opened.save(1, {"model": {f"w{number}": torch.randn(300, 100 + number) for number in range(20)}})
        opened.save_directory(2, source)
    return str(root)


def run(*arguments: str, expect: int = 0) -> Any:
    result = CliRunner().invoke(main, [*arguments, "--engine", "ray", "--json"])
    assert result.exit_code == expect, result.output
    return json.loads(result.stdout)


def node_of(share: Any) -> tuple[str, list[int]]:
    import ray

    return ray.get_runtime_context().get_node_id(), list(share)


def fail(share: Any) -> None:
    if 7 in share:
        raise CheckpointDamaged("seven is bad", step=3, rank=1, file="seven")


def test_each_node_gets_a_share(cluster: RayCluster) -> None:
    beats: list[int] = []
    with ray_executor() as executor, beating(lambda: beats.append(1)):
        found = executor.run(node_of, [1, 9, 4, 6], size_bytes=int)
    assert len({node for node, _ in found}) == len(cluster.nodes) == 2
    assert sorted(sum(share) for _, share in found) == [10, 10]
    assert beats


def test_an_error_comes_back_as_it_was_raised() -> None:
    with pytest.raises(CheckpointDamaged, match="seven is bad") as caught:
        RayExecutor().run(fail, [1, 7, 3], size_bytes=int)
    assert (caught.value.step, caught.value.rank, caught.value.file) == (3, 1, "seven")


def die(_share: Any) -> None:
    os._exit(1)


def test_processes_that_die_again_and_again_are_an_error_of_ours() -> None:
    with pytest.raises(RankFailed, match="in up to 4 tries") as caught:
        RayExecutor().run(die, [1], size_bytes=int)
    assert type(caught.value.__cause__).__name__ in str(caught.value)


def test_verify_finds_what_is_damaged(store: str) -> None:
    report = run("verify", store, "--all")
    assert report["ok"]
    assert [item["num_read"] for item in report["reports"]] == [item["num_files"] for item in report["reports"]]
    with ckptstore.open_store(store) as opened:
        place = Path(opened[2].uri)
    damaged = next(path for path in place.iterdir() if path.stat().st_size > 1_000_000)
    data = bytearray(damaged.read_bytes())
    data[1_234_567] ^= 1
    damaged.chmod(0o644)
    damaged.write_bytes(data)
    (report,) = run("verify", f"{store}@2", expect=CheckpointDamaged.exit_code)["reports"]
    assert [(problem["file"], problem["fault"]) for problem in report["problems"]] == [(damaged.name, "flipped")]


def test_a_store_is_copied_to_a_bucket_and_back(store: str, s3: S3Server, tmp_path: Path) -> None:
    names = ("key", "secret", "endpoint_url")
    flags = [part for name in names for part in ("--target-option", f"{name}={s3.storage_options[name]}")]
    there = run("cp", store, "s3://test/copy", *flags)
    assert there["copied_steps"] == [1, 2]
    again = run("cp", store, "s3://test/copy", *flags)
    assert (again["copied_steps"], again["present_steps"], again["num_copied"]) == ([], [1, 2], 0)
    with ckptstore.open_store("s3://test/copy", storage_options=s3.storage_options) as copied:
        assert all(checkpoint.verify().ok for checkpoint in copied)
        copied[2].to_directory(tmp_path / "back")
    back = filecmp.dircmp(tmp_path / "source", tmp_path / "back")
    assert not back.left_only
    assert not back.diff_files
    assert (tmp_path / "back" / "empty").is_dir()


def test_nodes_write_their_shares_to_a_bucket(store: str, s3: S3Server, tmp_path: Path) -> None:
    names = ("key", "secret", "endpoint_url")
    flags = [part for name in names for part in ("--storage-option", f"{name}={s3.storage_options[name]}")]
    asked = ["--shard-size", "500KB", "--strip-prefix", "model."]
    there = run("export", f"{store}@1", "s3://test/hub", *asked, *flags)
    local = CliRunner().invoke(main, ["export", f"{store}@1", str(tmp_path / "local"), *asked])
    assert local.exit_code == 0
    storage = open_storage("s3://test/hub", storage_options=s3.storage_options)
    found = {file.key: storage.read(file.key) for file in storage.list("")}
    storage.close()
    assert found.keys() == set(there["files"])
    assert found == {name: (tmp_path / "local" / name).read_bytes() for name in os.listdir(tmp_path / "local")}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_one_file_is_not_dealt_to_nodes(store: str, tmp_path: Path, kind: str) -> None:
    found = run("export", f"{store}@1", str(tmp_path / "out"), "--to", kind, expect=InvalidInput.exit_code)
    assert "one file" in found["error"]["message"]
    assert not (tmp_path / "out").exists()


def stay(doomed: str, marker: str, share: Any) -> tuple[str, list[int]]:
    """Work that never ends on one node."""
    node, numbers = node_of(share)
    if node == doomed:
        Path(marker).touch()
        time.sleep(600)
    return node, numbers


def test_the_task_of_a_node_that_dies_runs_on_another(cluster: RayCluster, tmp_path: Path) -> None:
    extra = cluster.add_node()
    marker = tmp_path / "begun"

    def kill() -> None:
        while not marker.exists():
            time.sleep(0.1)
        cluster.remove_node(extra)

    killer = threading.Thread(target=kill)
    killer.start()
    task = partial(stay, extra.node_id, str(marker))
    found = RayExecutor().run(task, [1, 2, 3], size_bytes=int)
    killer.join()
    assert sorted(number for _, share in found for number in share) == [1, 2, 3]
    assert extra.node_id not in {node for node, _ in found}
