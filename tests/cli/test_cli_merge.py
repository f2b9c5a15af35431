"""`ckptstore merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ckptstore import open_store


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
    run(
        "merge", f"{tmp_path}/s@0", f"{tmp_path}/s@2", tmp_path / "out", "--method", "slerp", "--strip-prefix", "model."
    )
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["bias", "weight"]
    words = [
        "merge",
        f"{tmp_path}/s@1",
        f"{tmp_path}/soup@7",
        f"{tmp_path}/s@1",
        tmp_path / "three",
        "--weights",
        "1,2,5",
    ]
    shares = run(*words, "--include", "model.*").stdout.splitlines()[2]
    assert shares == f"shares: 0.125 of {words[1]}, 0.25 of {words[2]}, 0.625 of {words[3]}"
    for words in (["--overwrite"], ["--with", str(tmp_path)]):
        run("merge", f"{tmp_path}/s@0", f"{tmp_path}/s@2", f"{tmp_path}/soup@8", *words, code=2)
    for bad in ("@{2..0}", "@{0..2..0}"):
        run("merge", f"{tmp_path}/s{bad}", tmp_path / "bad", code=2)
    run("merge", f"{tmp_path}/s@0", f"{tmp_path}/s@2", tmp_path / "bad", "--weights", "1;2", code=2)
    run("merge", f"{tmp_path}/s@0", f"{tmp_path}/s@2", f"{tmp_path}/soup@latest", code=2)
    assert not (tmp_path / "bad").exists()
