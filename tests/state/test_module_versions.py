"""Versions of modules, and the hooks that go by them: what modules noted at a save is there at a load."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from independent_reader import read_modules
from kit.states import StateCase, run
from kit.states.upgraded_makers import UPGRADED
from safetensors.torch import load_file
from saving import copied, index_of
from thread_ranks import run_threads
from torch import nn

import ckptstore
from ckptstore import Checkpoint, InvalidState, KeepAll, KeepWeights, StateMismatch
from ckptstore.interchange import export, import_state
from ckptstore.state import per_rank
from ckptstore.state.read.stored import StoredState
from ckptstore.testing.oracle import difference


class Scaled(nn.Module):
    """Version 1 kept the logarithm of the scale."""

    _version = 2

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), scale))
        self.seen: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = dict(metadata)
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Old(Scaled):
    _version = 1


class Noting(Scaled):
    """Has notes of several kinds beside the version."""

    note: Any = ("log", 2)

    def _save_to_state_dict(self, state: Any, prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep)
        state._metadata[prefix[:-1]].update(form=self.note, table=torch.tensor([0.5, 2.0]).bfloat16())


class Bare(nn.Module):
    """Has extra state alone."""

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"a": 1}


class Split(nn.Module):
    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3))
        self.old = nn.Linear(3, 3)
        self.add_module("gone", nn.BatchNorm1d(3))


class Fused(nn.Module):
    """Takes what `Split` saved: two entries in one, and another name; one entry is no longer needed."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3))
        self.new = nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: Any, state: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace(f"{prefix}old.", f"{prefix}new.")] = state.pop(name)
        for name in [name for name in state if name.startswith(f"{prefix}gone.")]:
            del state[name]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}q" in state:
            state[f"{prefix}qk"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")])
        super()._load_from_state_dict(state, prefix, *rest)


def by_torch(saved: nn.Module, target: nn.Module, *, metadata: bool = True) -> nn.Module:
    data = io.BytesIO()
    torch.save(saved.state_dict() if metadata else dict(saved.state_dict()), data)
    data.seek(0)
    target.load_state_dict(torch.load(data, weights_only=False))
    return target


def held(module: nn.Module) -> dict[str, Any]:
    return {name: item.tolist() for name, item in module.state_dict().items()}


@pytest.mark.parametrize("name", UPGRADED)
def test_an_upgrade_is_that_of_torch(name: str) -> None:
    case = StateCase(1, modules=(name,), change="upgraded")
    cases = [case, replace(case, strict=False), replace(case, bare=True), replace(case, wrapper="compile")]
    assert {run(case).kind for case in cases} == {"same"}


def versioned(kind: Any = Scaled) -> nn.Module:
    newer = Noting if kind is Old else kind
    return nn.Sequential(kind(2.0), newer(3.0), nn.ModuleDict({"act": nn.ReLU(), "old": kind(1.0), "new": newer(4.0)}))


def check_file(given: Any, saved: nn.Module, target: nn.Module) -> None:
    """What was read is what `torch.save` writes of the `state_dict()` that was saved, and loads as that does."""
    assert difference(given, saved.state_dict()) is None
    expected = held(by_torch(saved, copy.deepcopy(target)))
    target.load_state_dict(given)
    assert held(target) == expected != held(by_torch(saved, target, metadata=False))


def test_an_upgrade_on_the_meta_device_and_in_a_list_is_that_of_torch(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(3, 3), Old(5.0))
    expected = held(by_torch(saved, nn.Sequential(nn.Linear(3, 3), Scaled())))
    with ckptstore.open_store(tmp_path, durable=False) as store:
        store.save(1, {"model": saved, "nets": [{"m": saved}]})
        nested = nn.Sequential(nn.Linear(3, 3), Scaled())
        with torch.device("meta"):
            on_meta = nn.Sequential(nn.Linear(3, 3), Scaled())
        assert store.latest().check_load({"model": on_meta}).fits
        store.load({"model": on_meta, "nets": [{"m": nested}]}, device="cpu")
    assert held(on_meta) == held(nested) == expected


def test_a_dict_of_a_module_keeps_its_versions(tmp_path: Path) -> None:
    saved = nn.Sequential(Old(2.0), Noting(3.0))
    with ckptstore.open_store(tmp_path, durable=False) as store:
        store.save(1, {"model": saved.state_dict(), "nets": [saved], "epoch": 3})
        target = nn.Sequential(Scaled(), Scaled())
        store.load({"model": target})
        assert held(target) == held(by_torch(saved, nn.Sequential(Scaled(), Scaled())))
        state: dict[str, Any] = {"model": nn.Sequential(Scaled(), Scaled()).state_dict()}
        store.load(state)
        assert type(state["model"]) is OrderedDict
        other: dict[str, Any] = {"nets": [nn.Sequential(Scaled(), Scaled()).state_dict()]}
        store.load(other)
        whole = store.latest().to_dict()
        for given in (state["model"], other["nets"][0], whole["model"], whole["nets"][0]):
            assert given._metadata["0"] == {"version": 1}
            assert given._metadata["1"].keys() == {"version", "form", "table"}
            assert given._metadata["1"]["form"] == ("log", 2)
            assert torch.equal(given._metadata["1"]["table"], torch.tensor([0.5, 2.0]).bfloat16())
            target = nn.Sequential(Scaled(), Scaled())
            target.load_state_dict(given)
            assert target[0].scale.tolist() == Scaled(2.0).scale.exp().tolist()  # type: ignore[union-attr,operator]


def test_all_notes_of_modules_come_back_and_count_as_changed(tmp_path: Path) -> None:
    saved = Noting()
    with ckptstore.open_store(tmp_path, durable=False) as store:
        for step, note in enumerate([1, None, "text", {"a": [1.5]}, torch.float16, list(range(2000))]):
            saved.note = note
            store.save(step, {"model": saved})
            target = Scaled()
            store.load({"model": target})
            assert (target.seen["version"], target.seen["form"]) == (2, note)
        saved.note = object()
        with pytest.raises(InvalidState, match=r"metadata of the module '' at model\.form is a builtins\.object"):
            store.save(9, {"model": saved})
        saved.note = Path("x")
        store.save(9, {"model": saved, "epoch": 1}, allow_pickle=True)
        store.load({"epoch": 0})
        with pytest.raises(InvalidState, match="pickle"):
            store.load({"model": Scaled()})
        store.load({"model": target}, allow_pickle=True)
        assert target.seen["form"] == Path("x")


def test_an_export_for_torch_has_the_versions_also_of_a_copy_and_of_a_thinned_checkpoint(tmp_path: Path) -> None:
    saved = versioned(Old)
    state = {"model": saved, "nets": [{"act": nn.ReLU()}], "dict": saved.state_dict(), "w": torch.ones(1)}
    policy = KeepAll() | KeepWeights(KeepAll(), "w")
    with ckptstore.open_store(tmp_path / "s", retention=policy, durable=False) as store:
        checkpoints = [Checkpoint.from_uri(store.save(1, state).uri)]
        copied(f"{tmp_path / 's'}@1", tmp_path / "copy")
        store.save(2, {"epoch": 1})
        store.thin(1, ["w"])
        checkpoints += [store[1], Checkpoint.from_directory(tmp_path / "copy")]
        for number, checkpoint in enumerate(checkpoints):
            directory = tmp_path / str(number)
            assert not export(checkpoint, directory / "all", to="torch").notices
            given = torch.load(directory / "all/state.pt", weights_only=True)
            check_file(given["model"], saved, versioned())
            check_file(given["dict"], saved, versioned())
            assert difference(given["nets"], [{"act": nn.ReLU().state_dict()}]) is None
            for prefix, part, target in (("model.", saved, versioned()), ("model.2.", saved[2], versioned()[2])):
                export(checkpoint, directory / prefix, to="torch", include=f"{prefix}*", strip_prefix=prefix)
                check_file(torch.load(directory / prefix / "state.pt", weights_only=True), part, target)


def test_an_export_leaves_out_notes_that_torch_load_refuses(tmp_path: Path) -> None:
    saved = nn.Sequential(Noting(3.0))
    with ckptstore.open_store(tmp_path / "s", durable=False) as store:
        saved[0].note = np.arange(2)
        store.save(1, {"model": saved})
        saved[0].note = Path("x")
        store.save(2, {"model": saved}, allow_pickle=True)
        (one,), (other,) = (export(store[n], tmp_path / f"{n}", to="torch").notices for n in (1, 2))
    assert one.startswith("form in the metadata of model is left out")
    assert other.startswith("the metadata of model is left out")
    found = [torch.load(tmp_path / f"{n}/state.pt", weights_only=True)["model"]._metadata for n in (1, 2)]
    assert [{name: notes.keys() for name, notes in each.items()} for each in found] == [
        {"": {"version"}, "0": {"version", "table"}},
        {},
    ]


def test_exports_to_other_formats_have_no_versions(tmp_path: Path) -> None:
    """What safetensors gives is of the oldest version, and what DCP loads into keeps its own."""
    saved = nn.Sequential(Scaled(2.0))
    with ckptstore.open_store(tmp_path / "s", durable=False) as store:
        checkpoint = store.save(1, {"model": saved})
        export(checkpoint, tmp_path / "hub", to="safetensors", strip_prefix="model.")
        export(checkpoint, tmp_path / "dcp", to="dcp", include="model.*")
    target = nn.Sequential(Scaled())
    target.load_state_dict(load_file(tmp_path / "hub/model.safetensors"))
    assert held(target) == held(by_torch(saved, nn.Sequential(Scaled()), metadata=False))
    into = nn.Sequential(Old()).state_dict()
    dcp.load({"model": into}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert into._metadata["0"] == {"version": 1}
    assert into["0.scale"].tolist() == saved[0].scale.tolist()


RENAMES: dict[str, tuple[Any, Any]] = {
    "as it is": (lambda saved: {"model": saved.state_dict(), "epoch": 3}, None),
    "renamed": (lambda saved: {"model_state_dict": saved.state_dict()}, {"model_state_dict": "model"}),
    "whole": (lambda saved: saved.state_dict(), {"": "model"}),
    "by a function": (lambda saved: saved.state_dict(), lambda key: f"model.{key}"),
    "DDP": (lambda saved: nn.ModuleDict({"module": saved}).state_dict(), {"module": "model"}),
    "DDP inside": (lambda saved: {"model": nn.ModuleDict({"module": saved}).state_dict()}, {"model.module": "model"}),
}


@pytest.mark.parametrize("name", RENAMES)
def test_an_import_takes_the_versions_under_new_names(tmp_path: Path, name: str) -> None:
    saved, target = versioned(Old), versioned()
    make, rename = RENAMES[name]
    torch.save(make(saved), tmp_path / "file.pt")
    with ckptstore.open_store(tmp_path / "s", durable=False) as store:
        import_state(tmp_path / "file.pt", store, 1, kind="torch", rename=rename)
        store.load({"model": target})
        assert held(target) == held(by_torch(saved, versioned()))
        assert {**target[1].seen, "table": 0} == {"version": 2, "form": ("log", 2), "table": 0}
        import_state(tmp_path / "file.pt", store, 2, kind="torch", rename=rename, include="*old.*")
        target = versioned()
        store.load({"model": target}, include="*old.*")
        assert target[2]["old"].scale.tolist() == Scaled(1.0).scale.exp().tolist()


def test_stock_dcp_has_no_versions(tmp_path: Path) -> None:
    saved = nn.Sequential(Scaled(2.0), nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(saved.state_dict())}, checkpoint_id=tmp_path / "stock", no_dist=True)
    target = nn.Sequential(Scaled(), nn.BatchNorm1d(3))
    Checkpoint.from_directory(tmp_path / "stock").load({"model": target})
    assert target[0].seen == {}
    assert held(target) == held(by_torch(saved, nn.Sequential(Scaled(), nn.BatchNorm1d(3)), metadata=False))


def test_what_no_code_takes_is_listed_and_the_module_stays_as_it_is(tmp_path: Path) -> None:
    class Failing(Fused):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            if state[f"{prefix}q"].sum() > 0:  # needs numbers
                super()._load_from_state_dict(state, prefix, *rest)

    with ckptstore.open_store(tmp_path, durable=False) as store:
        store.save(1, {"model": nn.ModuleDict({"fused": Split(), "rest": nn.Linear(3, 3)})})
        target = nn.ModuleDict({"fused": Fused(), "other": nn.Linear(3, 3)})
        before = held(target)
        with pytest.raises(StateMismatch, match=r"2 missing.*model\.other\.bias.*2 without a place.*model\.rest\.bias"):
            store.load({"model": target})
        assert held(target) == before
        report = store.latest().load({"model": target}, strict=False)
        assert report.missing == ("model.other.bias", "model.other.weight")
        assert report.unexpected == ("model.rest.bias", "model.rest.weight")
        assert held(target["other"]) == {key[6:]: item for key, item in before.items() if key.startswith("other.")}
        assert held(target["fused"]) != {key[6:]: item for key, item in before.items() if key.startswith("fused.")}
        with pytest.raises(StateMismatch, match=r"has code that loads its entries\. It was tried .* failed"):
            store.load({"model": nn.ModuleDict({"fused": Failing()})})


def test_ranks_with_other_modules_under_one_key(tmp_path: Path) -> None:
    """Rank 0 has the first stage of a pipeline, rank 1 the second; both have a root, and of a last part versions."""

    def stage(rank: int, kind: Any) -> nn.Module:
        return nn.ModuleDict({f"stage{rank}": kind(2.0 + rank), "last": (Scaled if rank else kind)(7.0)})

    def save(store: Any, rank: int) -> None:
        store.save(1, {"model": stage(rank, Old), "own": per_rank((Old, Noting)[rank](3.0))})

    def load(store: Any, rank: int) -> Any:
        mine, theirs = stage(rank, Scaled), stage(1 - rank, Scaled)
        own = Scaled()
        store.load({"model": mine, "own": per_rank(own)})
        store.load({"model": theirs}, include=f"model.stage{1 - rank}*")
        return [held(mine), mine["last"].seen, held(theirs[f"stage{1 - rank}"]), own.seen["version"], held(own)]

    run_threads(2, str(tmp_path), save)
    upgraded = [held(by_torch(Old(2.0 + rank), Scaled())) for rank in (0, 1)]
    for rank, (mine, last, theirs, version, own) in enumerate(run_threads(2, str(tmp_path), load)):
        assert mine[f"stage{rank}.scale"] == upgraded[rank]["scale"]
        assert last == {"version": 1 + rank}
        assert theirs == upgraded[1 - rank]
        assert (version, own) == ((1, held(by_torch(Old(3.0), Scaled()))), (2, held(Scaled(3.0))))[rank]
    whole = nn.ModuleDict({"stage0": Scaled(), "stage1": Scaled(), "last": Scaled()})
    with ckptstore.open_store(tmp_path) as store:
        store.load({"model": whole}, per_rank="first")
    assert [held(whole[name]) for name in ("stage0", "stage1")] == upgraded
    assert whole["last"].seen == {"version": 1}


def test_a_thinned_checkpoint_keeps_the_versions_of_what_it_keeps(tmp_path: Path) -> None:
    nets = [{"bare": Bare(), "act": nn.ReLU()}]  # without tensors, and without anything
    with ckptstore.open_store(tmp_path, retention=KeepAll() | KeepWeights(KeepAll(), "other*"), durable=False) as store:
        store.save(1, {"model": Old(2.0), "other": Old(1.0), "nets": nets})
        store.save(2, {"model": Old(3.0), "other": Old(1.0)})
        store.thin(1, ["other.*"])
        target = Scaled()
        store[1].load({"model": target}, strict=False)
        assert held(target) == held(by_torch(Old(2.0), Scaled()))
        assert difference(store[1].to_dict()["nets"], [{key: net.state_dict() for key, net in nets[0].items()}]) is None


def test_the_golden_modules() -> None:
    data = (Path(__file__).parents[1] / "golden" / "state-v1" / "modules.index").read_bytes()
    saved = StoredState(index_of(data), lambda _: None, "", rank=0, world_size=1).saved()
    table = {"form": ("log", 2), "scale": [0.5, 2.0]}
    for found in (saved.modules["model"](), saved.values["weights"]._metadata):
        notes = {name: {**note} for name, note in found.items()}
        notes["0"]["scale"] = notes["0"]["scale"].tolist()
        assert notes == {"": {"version": 1}, "0": {"version": 1, **table}, "1": {"version": 1}, "1.0": {"version": 2}}
    assert read_modules(data)["model", "1.0"] == {"version": 2}
