"""`ckptstore export` and `ckptstore import`, there and back, and `ckptstore merge`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptstore import open_store


@pytest.fixture
def state_store(tmp_path: Path) -> Path:
    """Step 7 of a model with its epoch."""
    torch.manual_seed(0)
    with open_store(tmp_path / "state") as store:
        store.save(7, {"model": torch.nn.Linear(4, 3), "epoch": 2})
    return tmp_path / "state"


def test_export_says_what_it_wrote(run: Any, state_store: Path, tmp_path: Path) -> None:
    words = ("--include", "model.*", "--strip-prefix", "model.")
    assert run("export", f"{state_store}@7", tmp_path / "out", *words).stdout.splitlines() == [
        "2 tensors, 60 B, in 1 files:",
        f"  {tmp_path / 'out/model.safetensors'}",
        "note: 1 plain values are left out, safetensors holds tensors only",
    ]
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"weight", "bias"}


def test_export_in_json(run_json: Any, state_store: Path, tmp_path: Path) -> None:
    found = run_json("export", state_store, tmp_path / "out", "--to", "torch")
    assert found.items() >= {"format": "torch", "files": ["state.pt"], "num_tensors": 2, "size_bytes": 60}.items()
    assert found["checkpoint"]["step"] == 7
    assert torch.load(tmp_path / "out/state.pt", weights_only=True)["epoch"] == 2


def test_export_has_the_exit_code_of_its_error(run: Any, run_json: Any, state_store: Path, tmp_path: Path) -> None:
    run("export", state_store, tmp_path / "out", "--to", "dcp")
    assert "not empty" in run_json("export", state_store, tmp_path / "out", code=2)["error"]["message"]
    run("export", state_store, tmp_path / "out", "--overwrite", "--shard-size", "50B")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    for size in ("much", "-1", "5Gb", "17", "0B"):
        run("export", state_store, tmp_path / "other", "--shard-size", size, code=2)
    for size in ("1.5 MiB", "500kB", "2GiB"):
        run("export", state_store, tmp_path / "other", "--overwrite", "--shard-size", size)
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


def test_a_merge_makes_files_or_a_checkpoint_that_a_model_resumes_from(run: Any, tmp_path: Path) -> None:
    models = [torch.nn.Linear(4, 3) for _ in range(3)]
    with open_store(tmp_path / "s") as store:
        for step, model in enumerate(models):
            store.save(step, {"model": model, "epoch": step})
    text = run("merge", f"{tmp_path}/s@{{0..2}}", f"{tmp_path}/soup@7", "--include", "model.*").stdout
    assert text.splitlines()[0].startswith(f"2 tensors, 60 B, in step 7, {tmp_path}/soup/checkpoints/")
    assert text.splitlines()[1] == "shares: 0.3333 of step 0, 0.3333 of step 1, 0.3333 of step 2"
    model = torch.nn.Linear(4, 3)
    with open_store(tmp_path / "soup") as store:
        store[7].load({"model": model})
        assert store[7].metadata["merged_steps"] == [0, 1, 2]
    assert torch.allclose(model.weight, torch.stack([one.weight for one in models]).mean(0))
    two = ("merge", f"{tmp_path}/s@0", f"{tmp_path}/s@2")
    run(*two, tmp_path / "out", "--method", "slerp", "--strip-prefix", "model.")
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["bias", "weight"]
    a, b = f"{tmp_path}/s@1", f"{tmp_path}/soup@7"
    weighted = run("merge", a, b, a, tmp_path / "three", "--weights", "1,2,5", "--include", "model.*").stdout
    assert weighted.splitlines()[2] == f"shares: 0.125 of {a}, 0.25 of {b}, 0.625 of {a}"
    for words in (["--overwrite"], ["--with", str(tmp_path)]):
        run(*two, f"{tmp_path}/soup@8", *words, code=2)
    for bad in ("@{2..0}", "@{0..2..0}"):
        run("merge", f"{tmp_path}/s{bad}", tmp_path / "bad", code=2)
    run(*two, tmp_path / "bad", "--weights", "1;2", code=2)
    run(*two, f"{tmp_path}/soup@latest", code=2)
    assert not (tmp_path / "bad").exists()
