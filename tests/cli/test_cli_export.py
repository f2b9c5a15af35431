"""`ckptstore export` and `ckptstore import`, there and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptstore import open_store
from ckptstore.tools.cli.commands.export import parse_size


@pytest.fixture
def state_store(tmp_path: Path) -> Path:
    """Step 7 of a model with its epoch."""
    torch.manual_seed(0)
    with open_store(tmp_path / "state") as store:
        store.save(7, {"model": torch.nn.Linear(4, 3), "epoch": 2})
    return tmp_path / "state"


def test_export_says_what_it_wrote(run: Any, state_store: Path, tmp_path: Path) -> None:
    text = run(
        "export", f"{state_store}@7", tmp_path / "out", "--include", "model.*", "--strip-prefix", "model."
    ).stdout
    assert text.splitlines() == [
        "2 tensors, 60 B, in 1 files:",
        f"  {tmp_path / 'out/model.safetensors'}",
        "note: 1 plain values are left out, safetensors holds tensors only",
    ]
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"weight", "bias"}


def test_export_in_json(run_json: Any, state_store: Path, tmp_path: Path) -> None:
    found = run_json("export", state_store, tmp_path / "out", "--to", "torch")
    assert (found["format"], found["files"], found["num_tensors"], found["size_bytes"]) == (
        "torch",
        ["state.pt"],
        2,
        60,
    )
    assert found["checkpoint"]["step"] == 7
    assert torch.load(tmp_path / "out/state.pt", weights_only=True)["epoch"] == 2


def test_export_has_the_exit_code_of_its_error(run: Any, run_json: Any, state_store: Path, tmp_path: Path) -> None:
    run("export", state_store, tmp_path / "out", "--to", "dcp")
    assert "not empty" in run_json("export", state_store, tmp_path / "out", code=2)["error"]["message"]
    run("export", state_store, tmp_path / "out", "--overwrite", "--shard-size", "50B")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    run("export", state_store, tmp_path / "other", "--shard-size", "much", code=2)
    run("export", state_store, tmp_path / "other", "--shard-size", "5GB", "--to", "torch", code=2)
    run("export", tmp_path / "nothing", tmp_path / "other", code=10)


def test_import_commits_what_was_exported(run: Any, run_json: Any, state_store: Path, tmp_path: Path) -> None:
    run("export", state_store, tmp_path / "out", "--to", "torch")
    command = ["import", tmp_path / "out/state.pt", tmp_path / "new", "--from", "torch", "--step", 3]
    found = run_json(*command, "--metric", "loss=0.5")
    assert found["checkpoint"]["metrics"] == {"loss": 0.5}
    assert found["format"] == "torch"
    run(*command, code=6)
    assert "step 3" in run(*command, "--replace").stdout
    run(*command, "--metric", "loss", code=2)
    with open_store(state_store) as old, open_store(tmp_path / "new") as new:
        first, second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        old.load({"model": first})
        new.load({"model": second})
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("500k", 500_000), ("17", 17), ("2GiB", 2 << 30)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from ckptstore.tools.cli import main\n"
        "for name in ('export', 'import'): main([name, '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_import_of_numbered_parameters_says_what_to_do(run: Any, run_json: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {"model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "last.pt")
    command = ["import", tmp_path / "last.pt", tmp_path / "new", "--from", "torch", "--step", 3]
    error = run_json(*command, code=2)["error"]
    assert "optimizer numbers its parameters" in error["message"]
    assert "state={...}" in error["hint"]
    run(*command, "--include", "model*", "--rename", "model_state_dict=model")
    with open_store(tmp_path / "new") as store:
        other = torch.nn.Linear(4, 3)
        store.load({"model": other})
    assert torch.equal(other.weight, model.weight)
    run(*command, "--rename", "model", code=2)
    assert "mean nothing for" in run(*command, "--storage-option", "key=x", code=2).stderr.replace("means", "mean")


def test_export_with_what_lies_beside(run: Any, state_store: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "base/pytorch_model.bin").write_text("old weights")
    (tmp_path / "base/templates").mkdir()
    (tmp_path / "base/tokenizer.json").symlink_to("gone")
    text = run("export", state_store, tmp_path / "out", "--with", tmp_path / "base").stdout
    assert "config.json" in text
    for name in ("templates", "tokenizer.json"):
        assert f"note: {tmp_path}/base/{name} is left out, it is no file" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
