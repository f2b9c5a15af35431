"""Exports to a bucket: loaders find the whole model there, or nothing that looks like one."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from export_to_s3 import export_as_rank
from forked_ranks import run_ranks
from safetensors.torch import load

from ckptstore import Checkpoint, CheckpointDamaged, InvalidInput, open_store
from ckptstore.errors import AccessDenied
from ckptstore.interchange import export
from ckptstore.testing.s3_server import Fault, S3Server

pytestmark = pytest.mark.slow

MIB = 1 << 20
WORKER = Path(__file__).with_name("export_to_s3.py")
numbers = itertools.count()
TENSORS = {
    "ends in a new\nline": torch.arange(7),
    "large": torch.randn(9 * MIB + 3),  # more than two parts, and more than the limit of a file
    "none": torch.empty(0, 5),
    "odd: é/\\\"'": torch.randn(3, 5).bfloat16(),
    "scalar": torch.tensor(3.5),
    "tenth of eight": torch.randn(1001).to(torch.float8_e4m3fn),
    "wide": torch.randn(300, 1000).half(),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTSTORE_DURABLE", "false")
    monkeypatch.setenv("CKPTSTORE_RETRY_WAIT_MAX_SECONDS", "0.1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    with open_store(tmp_path_factory.mktemp("source"), durable=False) as store:
        return str(store.save(1, {**TENSORS, "tied": TENSORS["wide"], "epoch": 3}).uri)


@pytest.fixture
def key(fast_s3: S3Server) -> Iterator[str]:
    yield f"hub/{next(numbers)}"
    fast_s3.faults.clear()
    assert fast_s3.objects.uploads == {}, "no upload is left behind"


def send(source: str, server: S3Server, key: str, **asked: Any) -> Any:
    options = {"storage_options": server.storage_options, "shard_size_bytes": 20 * MIB, **asked}
    return export(Checkpoint.from_uri(source), f"s3://test/{key}", to="safetensors", **options)


def client(server: S3Server) -> Any:
    options = server.storage_options
    return boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )


def read(server: S3Server, key: str) -> dict[str, bytes]:
    """What any other client finds below a prefix."""
    s3 = client(server)
    listed = s3.list_objects_v2(Bucket="test", Prefix=f"{key}/").get("Contents", [])
    names = [item["Key"] for item in listed]
    return {name.removeprefix(f"{key}/"): s3.get_object(Bucket="test", Key=name)["Body"].read() for name in names}


def tensors_in(found: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file, data in found.items()
        if file.endswith(".safetensors")
        for name, tensor in load(data).items()
    }


def assert_whole(server: S3Server, key: str) -> None:
    found = read(server, key)
    assert not [name for name in found if name.startswith(".")]
    tensors = tensors_in(found)
    assert tensors.keys() == TENSORS.keys() - {"wide"} | {"tied"}, "one of two names that are one tensor"
    for name, tensor in TENSORS.items():
        other = tensors["tied" if name == "wide" else name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    index = json.loads(found["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == {name for name in found if name.endswith(".safetensors")}


def test_it_is_what_any_client_reads_and_nothing_lies_on_this_machine(
    source: str, fast_s3: S3Server, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "base" / name).write_text("{}")
    report = send(source, fast_s3, key, beside=tmp_path / "base")
    assert len(report.files) == 6
    assert_whole(fast_s3, key)
    assert read(fast_s3, key).keys() == set(report.files)
    written = [item.path.partition(f"/{key}/")[2] for item in fast_s3.log if item.method in ("PUT", "POST")]
    assert [name for name in written if name and not name.startswith(".")][-3:] == [
        "tokenizer.json",
        "model.safetensors.index.json",
        "config.json",
    ]


def test_ranges_are_read_as_loaders_do(source: str, fast_s3: S3Server, key: str) -> None:
    """List by the ending, read the length and the header, then the tensors by their offsets."""
    send(source, fast_s3, key, shard_size_bytes=10**9)
    s3 = client(fast_s3)
    listed = s3.list_objects_v2(Bucket="test", Prefix=f"{key}/")["Contents"]
    (name,) = [item["Key"] for item in listed if item["Key"].endswith(".safetensors")]

    def part(first: int, size_bytes: int) -> bytes:
        found = s3.get_object(Bucket="test", Key=name, Range=f"bytes={first}-{first + size_bytes - 1}")
        return bytes(found["Body"].read())

    (length,) = struct.unpack("<Q", part(0, 8))
    header = json.loads(part(8, length))
    first, last = header["large"]["data_offsets"]
    assert torch.equal(
        torch.frombuffer(bytearray(part(8 + length + first, last - first)), dtype=torch.float32), TENSORS["large"]
    )


FAULTS = {
    "answers are lost": [
        Fault(action="lose_answer", match="^POST .*uploadId", times=1),
        Fault(action="lose_answer", match="^POST .*uploads", times=1),
        Fault(action="lose_answer", match="^PUT .*partNumber=2", times=1),
        Fault(action="lose_answer", match="^PUT .*index.json", times=1),
        Fault(action="lose_answer", match=r"^PUT .*\.ckptstore-export", times=2),
    ],
    "it throttles": [Fault(action="status", match=what, times=3) for what in ("^PUT", "^POST", "^GET", "^HEAD")],
    "connections break": [Fault(action="reset", match="^PUT .*partNumber", after_bytes=MIB, times=4)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_pass_change_nothing(source: str, fast_s3: S3Server, key: str, name: str) -> None:
    fast_s3.faults.replace(FAULTS[name])
    send(source, fast_s3, key)
    assert fast_s3.faults.pending == 0, "they have happened"
    assert_whole(fast_s3, key)


def test_an_export_that_failed_goes_on_where_it_ended(source: str, fast_s3: S3Server, key: str) -> None:
    refused = Fault(action="status", match="^POST .*model-00002.*uploadId", status=403, code="AccessDenied", times=None)
    fast_s3.faults.replace([refused])
    with pytest.raises(AccessDenied):
        send(source, fast_s3, key)
    fast_s3.faults.clear()
    found = read(fast_s3, key)
    assert [name for name in found if name.endswith((".safetensors", "index.json"))] == [
        "model-00001-of-00003.safetensors"
    ]
    with pytest.raises(InvalidInput, match="part of an export of"):
        send(source, fast_s3, key, shard_size_bytes=10**9)
    with pytest.raises(InvalidInput, match="part of an export of"):
        send(source, fast_s3, key, include="scalar")
    assert read(fast_s3, key) == found, "what is refused changes nothing"
    begun = len(fast_s3.log)
    send(source, fast_s3, key)
    assert not [
        item for item in fast_s3.log[begun:] if item.method == "PUT" and "model-00001" in item.path and item.query
    ]
    assert_whole(fast_s3, key)
    with pytest.raises(InvalidInput, match="is not empty"):
        send(source, fast_s3, key)


def test_a_file_that_somebody_replaced_is_written_again(source: str, fast_s3: S3Server, key: str) -> None:
    fast_s3.faults.replace(
        [Fault(action="status", match="^PUT .*index.json", status=403, code="AccessDenied", times=9)]
    )
    with pytest.raises(AccessDenied):
        send(source, fast_s3, key)
    fast_s3.faults.clear()
    first = "model-00001-of-00003.safetensors"
    data = bytearray(read(fast_s3, key)[first])
    data[-1] ^= 1
    left = f"{key}/.part-0123456789abcdef-00001"
    client(fast_s3).put_object(Bucket="test", Key=left, Body=b"as a killed export leaves it on GCS")
    client(fast_s3).put_object(Bucket="test", Key=f"{key}/{first}", Body=bytes(data))
    send(source, fast_s3, key)
    assert_whole(fast_s3, key)


def test_another_export_is_replaced_when_that_is_asked_for(source: str, fast_s3: S3Server, key: str) -> None:
    send(source, fast_s3, key, shard_size_bytes=MIB)
    refused = Fault(
        action="status", match="^PUT .*model-00002.*partNumber", status=403, code="AccessDenied", times=None
    )
    fast_s3.faults.replace([refused])
    with pytest.raises(AccessDenied):
        send(source, fast_s3, key, overwrite=True)
    fast_s3.faults.clear()
    assert "model.safetensors.index.json" not in read(fast_s3, key), "nothing leads to a mixture"
    send(source, fast_s3, key, overwrite=True)
    assert_whole(fast_s3, key)
    client(fast_s3).put_object(Bucket="test", Key=f"{key}/thesis.txt", Body=b"mine")
    with pytest.raises(InvalidInput, match=r"thesis\.txt"):
        send(source, fast_s3, key, overwrite=True)


def test_a_damaged_checkpoint_leaves_nothing(fast_s3: S3Server, key: str, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        uri = store.save(1, {"a": torch.randn(MIB), "b": torch.randn(9 * MIB)}).uri
    largest = max(Path(uri.removeprefix("file://")).iterdir(), key=lambda path: path.stat().st_size)
    largest.chmod(0o644)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size - 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CheckpointDamaged, match=re.escape(largest.name)):
        send(uri, fast_s3, key, shard_size_bytes=5 * MIB)
    assert read(fast_s3, key) == {}


def start(source: str, server: S3Server, key: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), source, f"s3://test/{key}", json.dumps(server.storage_options), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_memory_stays_bounded(fast_s3: S3Server, key: str, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", durable=False) as store:
        uri = store.save(1, {"large": torch.randn(48 * MIB), "small": torch.ones(2)}).uri
    process = start(uri, fast_s3, key, str(10**9), "small")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert 32 * MIB < int(output) < 128 * MIB, "of a state of 192 MiB in one tensor"


MOMENTS = {
    "the record": "^PUT .*plan.json",
    "a file begins": "^POST .*model-00002.*uploads",
    "a part": "^PUT .*model-00002.*partNumber=2",
    "a file ends": "^POST .*model-00002.*uploadId",
    "a mark": "^PUT .*model-00001.*json",
    "the index": "^PUT .*index.json",
    "the end": "^(POST|DELETE) .*(delete|export/)",
}


@pytest.mark.parametrize(
    ("name", "is_done"),
    [
        pytest.param(name, is_done, marks=pytest.mark.slow if (number % 2 == 1) == is_done else pytest.mark.long)
        for number, name in enumerate(MOMENTS)
        for is_done in (False, True)
    ],
)
def test_an_export_that_is_killed_goes_on(source: str, fast_s3: S3Server, key: str, name: str, is_done: bool) -> None:
    """It waits for an answer, of what the server has done or not, and is killed there."""
    faults = [Fault(action="stall", match=MOMENTS[name], seconds=60)]
    fast_s3.faults.replace([Fault(action="lose_answer", match=MOMENTS[name])] * is_done + faults)
    process = start(source, fast_s3, key, str(20 * MIB))
    while fast_s3.faults.pending and process.poll() is None:
        time.sleep(0.05)
    assert fast_s3.faults.pending == 0, "it waits"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    fast_s3.faults.clear()
    send(source, fast_s3, key)
    assert_whole(fast_s3, key)


def test_ranks_share_the_files_and_go_on_without_one(source: str, fast_s3: S3Server, key: str) -> None:
    asked = (source, f"s3://test/{key}", 100_000, fast_s3.storage_options)
    killed = run_ranks(2, export_as_rank, *asked, 1, expect_killed=[1])
    assert killed[0][1] == "RankTimeout"
    assert "model.safetensors.index.json" not in read(fast_s3, key)
    results = run_ranks(2, export_as_rank, *asked, None)
    (first, files), (second, same) = results
    assert files == same
    assert set(first).isdisjoint(second)
    assert {*killed[0][0], *first, *second} < set(files)
    assert_whole(fast_s3, key)


def test_transformers_loads_what_another_client_downloads(fast_s3: S3Server, key: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # not what lies beside
    with open_store(tmp_path / "store", durable=False) as store:
        uri = str(store.save(1, {"model": model}).uri)
    send(uri, fast_s3, key, strip_prefix="model.", beside=tmp_path / "base", shard_size_bytes=3000)
    (tmp_path / "hub").mkdir()
    for name, data in read(fast_s3, key).items():
        (tmp_path / "hub" / name).write_bytes(data)
    assert (tmp_path / "hub/model.safetensors.index.json").exists(), "several files"
    found = LlamaForCausalLM.from_pretrained(tmp_path / "hub").state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
