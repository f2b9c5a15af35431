"""The private names of torch: in one file, and only with the versions of torch that were tried."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptstore
from ckptstore.runtime import torch_private

PACKAGE = Path(ckptstore.__file__).parent


def test_the_installed_torch_has_been_tried() -> None:
    version = torch.__version__.partition("+")[0]
    assert version in torch_private.TRIED_VERSIONS, (
        f"torch {version} has not been tried: run the tests with it, then add it to torch_private.TRIED_VERSIONS"
    )


def test_private_names_of_torch_are_in_one_file() -> None:
    private = re.compile(
        r"(?:from|import)\s+torch\S*\._\w+|from\s+torch[\w.]*\s+import\s+[^#\n]*\b_\w+|\b(?:torch|dist)(?:\.\w+)*\._[a-z]\w*"
    )
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path.name != "torch_private.py" and (names := private.findall(path.read_text()))
    }
    assert found == {}


def test_there_is_no_default_store_without_a_process_group() -> None:
    assert not dist.is_initialized()
    assert torch_private.default_store() is None


def test_the_default_store_is_the_one_of_the_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch_private.default_store().set("ckptstore/key", b"value")
        clone = torch_private.cloned(torch_private.default_store())
        assert clone.get("ckptstore/key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_store_that_cannot_be_cloned_is_used_itself() -> None:
    class Plain(dist.Store):
        """What a user wrote: a store without `clone`."""

    store = Plain()
    assert torch_private.cloned(store) is store


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, ckptstore.runtime.torch_private; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["clone", "compare_set", "check", "multi_get", "add", "delete_key", "set"])
def test_what_is_asked_of_a_store_of_torch_is_there(name: str) -> None:
    assert callable(getattr(dist.PrefixStore("p", dist.HashStore()), name))
