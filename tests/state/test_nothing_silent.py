"""A load that would load nothing of what was asked for is an error which names what is there."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckptstore
from ckptstore import InvalidInput, InvalidState, StateMismatch, StoreMissing, open_store
from ckptstore.interchange import export, import_state
from ckptstore.state.index.part import Tensor
from ckptstore.state.live.matching import Matching, Saved


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one checkpoint."""
    with open_store(tmp_path / "store") as store:
        store.save(1, {"model": nn.Linear(2, 2), "epoch": 1, "train": {"step": 3}})
    return tmp_path / "store"


@pytest.mark.parametrize("strict", [True, False])
def test_a_pattern_that_fits_nothing_is_refused_and_the_near_one_named(root: Path, strict: bool) -> None:
    state = {"model": nn.Linear(2, 2), "epoch": 0}
    with open_store(root) as store:
        with pytest.raises(InvalidInput, match=r"'modle\.\*' fits no .* mean 'model\.\*'.*has epoch, model"):
            store.load(state, include=["epoch", "modle.*"], strict=strict)
        with pytest.raises(InvalidInput, match=r"did you mean 'model\.weight'"):
            store.load(state, include="model.wieght", strict=strict)
        with pytest.raises(InvalidInput, match=r"'train\.\*' fits no key .* The state names epoch, model;"):
            store.load(state, include="train.*", strict=strict)  # the checkpoint has it, the state has not
        with pytest.raises(InvalidInput, match="'zzz' fits no key"):
            store.resume(state, include="zzz", strict=strict)
        assert state["epoch"] == 0
        inside: dict[str, Any] = {"train": {"step": 0, "more": 1}}
        store.load(inside, include="train.step", strict=strict)
        assert inside == {"train": {"step": 3, "more": 1}}


@pytest.mark.parametrize("include", [[], (), "", [""], ["epoch", ""], [1]], ids=repr)
def test_no_pattern_at_all_is_refused_before_anything_is_read(root: Path, include: Any, tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "epoch": 0}
    words = f"include is {re.escape(repr(include))}, it must be one or several patterns"
    with open_store(root) as store:
        checkpoint = store[1]
        for file in Path(checkpoint.uri).iterdir():
            file.unlink()
        loads: list[Callable[..., Any]] = [
            *(partial(load, state, strict=False) for load in (store.load, store.resume, checkpoint.load)),
            *(partial(checkpoint.check_load, state), checkpoint.to_dict),
            partial(import_state, tmp_path / "no", store, 2, kind="torch"),
        ]
        for load in loads:
            with pytest.raises(InvalidInput, match=words):
                load(include=include)
    assert state["epoch"] == 0


def test_nothing_is_exported_without_a_pattern(root: Path, tmp_path: Path) -> None:
    with open_store(root) as store:
        for to in ("safetensors", "torch", "dcp"):
            with pytest.raises(InvalidInput, match=r"include is \[\], it must be one or several patterns"):
                export(store[1], tmp_path / "out", to=to, include=[])
        with pytest.raises(InvalidInput, match=r"drop is \[\], it must be one or several patterns"):
            store.thin(1, [])
    assert not (tmp_path / "out").exists()


def test_patterns_may_come_one_by_one(root: Path) -> None:
    """They are asked for more than once."""
    state = {"model": nn.Linear(2, 2), "epoch": 0}
    with open_store(root) as store:
        store.load(state, include=(name for name in ("epoch", "model.*")))  # type: ignore[arg-type]
    assert state["epoch"] == 1


@pytest.mark.parametrize("include", [None, "model.*", "model.weight"])
def test_a_load_that_finds_no_place_for_anything_is_refused(root: Path, include: str | None) -> None:
    with open_store(root) as store:
        with pytest.raises(StateMismatch, match=r"without a place in the state: .*model\.weight") as caught:
            store.load({"model": nn.Identity()}, include=include, strict=False)
        assert "strict" not in str(caught.value)
        assert store[1].check_load({"model": nn.Identity()}, include=include, strict=False).problem
        more = {"model": nn.Identity(), "epoch": 0}
        store.load(more, strict=False)
        assert more["epoch"] == 1


def test_a_name_that_matches_nothing_is_named_with_what_is_there(root: Path) -> None:
    with open_store(root) as store:
        for strict in (True, False):
            with pytest.raises(StateMismatch, match="'modle', but epoch, model, train; did you mean 'model'") as caught:
                store.load({"modle": nn.Linear(2, 2)}, strict=strict)
            assert "strict" not in str(caught.value)


def test_without_strict_a_name_without_contents_is_warned_of_and_reported(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    before = ema.weight.detach().clone()
    with open_store(root) as store:
        with caplog.at_level(logging.WARNING, "ckptstore"):
            loaded = store.load({"model": model, "ema": ema}, strict=False)
        assert "'ema'" in caplog.text
        assert torch.equal(ema.weight, before)
        assert loaded is not None
        assert loaded.load_report is not None
        assert loaded.load_report.missing == ("ema.bias", "ema.weight")
        resumed = store.resume({"model": model})
        assert resumed is not None
        assert resumed.load_report is not None
        assert resumed.load_report.missing == ()
        assert store.latest().load_report is None  # type: ignore[union-attr]


def test_a_module_without_parameters_has_nothing_to_miss(root: Path) -> None:
    state = {"model": nn.Linear(2, 2), "loss": nn.MSELoss()}
    assert ckptstore.Checkpoint.from_uri(open_store(root)[1].uri).load(state).missing == ()


class Odd:
    """An object that needs a pickle."""


def test_a_load_does_not_ask_for_a_pickle_that_it_leaves_out(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        saved = store.save(1, {"model": nn.Linear(2, 2), "odd": {"one": Odd()}}, allow_pickle=True)
        model = nn.Linear(2, 2)
        saved.load({"model": model, "odd": {"one": Odd()}}, include="model.*")
        assert torch.equal(model.weight, saved.to_dict(include="model.*")["model"]["weight"])
        assert saved.load({"model": model}).left_out == ("odd",)
        assert not saved.check_load({"model": model, "odd": {"one": Odd()}}, include="model.*").problem
        for include in (None, "odd*", ["model.*", "odd"]):
            with pytest.raises(InvalidState, match="odd is a pickle"):
                saved.load({"model": model, "odd": {"one": Odd()}}, include=include)


def test_a_bare_module_is_refused_everywhere_with_the_words_of_a_save(root: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with open_store(root) as store:
        newest = store.latest()
        assert newest is not None
        for call in (partial(store.save, 2), store.load, store.resume, store.warm_up, newest.load, newest.check_load):
            with pytest.raises(InvalidState, match=r'a state is a dict, not a Linear.*\{"model": model\}'):
                call(model)


def test_a_store_is_not_sent_to_another_process_and_a_checkpoint_is(root: Path) -> None:
    with open_store(root) as store:
        with pytest.raises(InvalidInput, match="send a Checkpoint"):
            pickle.dumps(store)
        assert pickle.loads(pickle.dumps(store.latest())).to_dict()["epoch"] == 1


def test_a_store_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with open_store(tmp_path / "typo") as store:
        with pytest.raises(StoreMissing, match="typo"):
            store.load({"epoch": 0})
        assert not (tmp_path / "typo").exists()
        assert store.resume({"epoch": 0}) is None  # which makes it
        assert store.load({"epoch": 0}) is None


_KEYS = st.sets(st.text("ab.-", min_size=1, max_size=4), max_size=8)


@given(stored=_KEYS, asked=_KEYS, names=_KEYS)
def test_what_belongs_to_a_name_is_its_own_key_and_all_below_it(
    stored: set[str], asked: set[str], names: set[str]
) -> None:
    matching, lacking = Matching(Saved({key: Tensor(key, "float32", ()) for key in stored}, {})), asked - stored
    for key in lacking:
        matching.miss(key, "a tensor")
    matching.close(names)
    held = {name: {key for key in stored if key == name or key.startswith(f"{name}.")} for name in names}
    assert matching.mismatch.unexpected == set().union(*held.values())
    assert matching.mismatch.absent == {
        name
        for name, keys in held.items()
        if not keys and any(key == name or key.startswith(f"{name}.") for key in lacking)
    }


@pytest.mark.parametrize("left_bytes", [0, 400])
@pytest.mark.parametrize("kind", ["dense", "strided", "parameter"])
def test_a_tensor_whose_memory_was_taken_away_in_part_is_refused(tmp_path: Path, kind: str, left_bytes: int) -> None:
    """`resize_` of a storage leaves the sizes of its tensors: what lies behind its end belongs to somebody else."""
    tensor = torch.zeros(400, 2)[:, 0] if kind == "strided" else torch.zeros(400)
    state: dict[str, Any] = {"small": tensor, "other": torch.ones(3)}
    if kind == "parameter":
        state = {"model": nn.ParameterDict({"small": nn.Parameter(tensor)})}
    tensor.untyped_storage().resize_(left_bytes)
    with open_store(tmp_path / "store", durable=False) as store:
        with pytest.raises(ckptstore.InvalidState, match=r"memory of .*small has been given back"):
            store.save(1, state)
        with pytest.raises(ckptstore.InvalidState, match=r"memory of .*small has been given back"):
            store.save_async(2, state).result()
        assert not list(store)
