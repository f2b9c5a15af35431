"""States on devices through a store: the bits that the host would have had, of the moment of the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from kit import accelerator
from kit.accelerator import NAME, Gate

import ckptstore
from ckptstore import open_store

FIRST, SECOND = torch.device(NAME, 0), torch.device(NAME, 1)
HOST = torch.device("cpu")


def bits(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""


def tensors() -> dict[str, torch.Tensor]:
    """One of every kind of memory, small and large, on the host."""
    made = torch.Generator().manual_seed(0)
    base = torch.randn(700, 1000, generator=made)
    phases = torch.randn(300, 400, dtype=torch.complex64, generator=made)
    small = base[:5, :7].clone()
    return {
        "contiguous": base,
        "transposed": base.clone().t(),
        "columns": base.clone()[:, 3:600],
        "channels_last": torch.randn(64, 32, 9, 9, generator=made).to(memory_format=torch.channels_last),
        "expanded": base[:1].clone().expand(500, 1000),
        "conj": phases.conj(),
        "neg": phases.clone().conj().imag,
        "bfloat16": base.bfloat16().t(),
        "fp8": base.to(torch.float8_e4m3fn),
        "bool": base > 0,
        "int64": torch.arange(300_000).reshape(300, 1000).t(),
        "small": small,
        "small-strided": small.clone().t(),
        "small-conj": phases[:3, :3].clone().conj(),
        "0-dim": torch.tensor(3.5),
        "0-dim-bf16": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
    }


def spread(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same on both devices and the host, in turn; views stay views."""
    places = [FIRST, SECOND, HOST]
    return {key: moved(tensor, places[number % 3]) for number, (key, tensor) in enumerate(state.items())}


def moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A tensor elsewhere with the same strides, conjugates and opposites."""
    if tensor.is_neg():
        return moved(torch.view_as_complex(torch.stack([-tensor, -tensor], -1)), place).conj().imag
    if tensor.is_conj():
        return moved(tensor.conj(), place).conj()
    size = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((size if tensor.numel() else 0,), (1,)).to(place)
    return flat.clone().as_strided(tensor.shape, tensor.stride())


PLACES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "one device": lambda state: {key: moved(tensor, FIRST) for key, tensor in state.items()},
    "the second device": lambda state: {key: moved(tensor, SECOND) for key, tensor in state.items()},
    "two devices and the host": spread,
}

SAVES: dict[str, Callable[[Any, int, Any], Any]] = {
    "save": lambda store, step, state: store.save(step, state),
    "save_async": lambda store, step, state: store.save_async(step, state).result(),
}


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("check", ["all", "sample"])
def test_the_bits_are_those_of_the_host(
    how: str, where: str, check: str, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", check)
    wanted = tensors()
    state = PLACES[where](wanted)
    for key, tensor in state.items():
        assert (bits(tensor) == bits(wanted[key]), tensor.stride()) == (True, wanted[key].stride()), key
    with open_store(store_root) as store:
        checkpoint = SAVES[how](store, 1, state)
        assert checkpoint.verify().ok
        found = {
            key: torch.full_like(tensor, 1, memory_format=torch.contiguous_format) for key, tensor in wanted.items()
        }
        store.load(found)
        assert {key: bits(tensor) for key, tensor in found.items()} == {key: bits(one) for key, one in wanted.items()}


@pytest.mark.parametrize("where", PLACES)
def test_a_load_fills_memory_where_it_is(where: str, store_root: Path) -> None:
    wanted = {key: tensor for key, tensor in tensors().items() if key != "expanded"}
    with open_store(store_root) as store:
        store.save(1, wanted)
        state = PLACES[where](wanted)
        for tensor in state.values():
            tensor.zero_()
        places = {key: (tensor.data_ptr(), tensor.device) for key, tensor in state.items()}
        store.load(state)
        assert {key: (tensor.data_ptr(), tensor.device) for key, tensor in state.items()} == places
        assert {key: bits(tensor) for key, tensor in state.items()} == {key: bits(one) for key, one in wanted.items()}


def training(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 300)]
    model = torch.nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    optimizer.zero_grad()
    loss = model(torch.linspace(-1, 1, 216).reshape(2, 3, 6, 6).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("resumed_on", [SECOND, HOST], ids=str)
def test_a_training_goes_on_as_if_it_had_not_stopped(how: str, resumed_on: torch.device, store_root: Path) -> None:
    torch.accelerator.set_device_index(1)
    model, optimizer = training(SECOND)
    for _ in range(3):
        step(model, optimizer, SECOND)
    with open_store(store_root) as store:
        SAVES[how](store, 3, {"model": model, "optimizer": optimizer})
        assert not accelerator.has_context(0), "every thread works on the device of the caller"
        wanted = [step(model, optimizer, SECOND) for _ in range(2)]
        again, other = training(resumed_on)
        torch.nn.init.ones_(again[0].weight)
        store.load({"model": again, "optimizer": other})
        assert [step(again, other, resumed_on) for _ in range(2)] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("how", SAVES)
def test_nothing_is_read_before_its_stream_has_finished(how: str, store_root: Path) -> None:
    """Kernels that have not begun are part of the state: on a stream of the training's own, too."""
    state = {"large": torch.zeros(700, 900, device=FIRST), "small": torch.zeros(3, device=SECOND)}
    with open_store(store_root) as store, torch.Stream(FIRST), Gate(0) as first, Gate(1) as second:
        for tensor in state.values():
            tensor.add_(1)
        openers = [threading.Timer(0.2, first.open), threading.Timer(0.3, second.open)]
        for opener in openers:
            opener.start()
        SAVES[how](store, 1, state)
        for opener in openers:
            opener.join()
        found = {key: torch.zeros(tensor.shape) for key, tensor in state.items()}
        store.load(found)
        assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in found.values())


@pytest.mark.parametrize("where", PLACES)
def test_what_happens_after_the_call_is_not_in_it(where: str, store_root: Path) -> None:
    wanted = {key: tensor for key, tensor in tensors().items() if key != "expanded"}
    state = PLACES[where](wanted)
    with accelerator.delayed_copies(0.005), open_store(store_root) as store:
        pending = store.save_async(1, state)
        for tensor in state.values():
            tensor.zero_()
        pending.result()
        found = {
            key: torch.full_like(tensor, 1, memory_format=torch.contiguous_format) for key, tensor in wanted.items()
        }
        store.load(found)
        assert {key: bits(tensor) for key, tensor in found.items()} == {key: bits(one) for key, one in wanted.items()}


def test_an_upload_goes_on_while_the_training_computes(store_root: Path) -> None:
    state = {"weights": torch.ones(700, 900, device=FIRST)}
    with open_store(store_root) as store:
        pending = store.save_async(1, state)
        with Gate():  # a step of the training that takes as long as the upload
            state["weights"].zero_()
            pending.result()


def test_a_save_does_not_wait_for_other_streams(store_root: Path) -> None:
    state, other = {"weights": torch.ones(700, 900, device=FIRST)}, torch.Stream(FIRST)
    with open_store(store_root) as store:
        with other:
            gate = Gate()
        with gate:
            store.save_async(1, state).result()
            store.save(2, state)
        assert {checkpoint.step for checkpoint in store} == {1, 2}


def test_a_save_in_the_middle_of_a_backward_pass(store_root: Path) -> None:
    """A hook of a gradient saves: autograd runs it in a thread of the device, with graphs in flight."""
    model, optimizer = training(SECOND)
    step(model, optimizer, SECOND)
    wanted = {key: bits(tensor) for key, tensor in model.state_dict().items()}
    threads: list[str] = []
    with open_store(store_root) as store:

        def hook(gradient: torch.Tensor) -> None:
            threads.append(threading.current_thread().name)
            store.save_async(len(threads), {"model": model}).result()

        model[0].weight.register_hook(hook)
        model[3].weight.register_hook(hook)
        model.eval()(torch.ones(2, 3, 6, 6, device=SECOND)).square().mean().backward()
        assert len(threads) == 2
        again, _ = training(HOST)
        store.load({"model": again})
        assert {key: bits(tensor) for key, tensor in again.state_dict().items()} == wanted


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("check", ["all", "sample"])
def test_a_device_without_any_room_is_saved_and_loaded(
    how: str, check: str, store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTSTORE_CHECK_COPIES", check)
    plain = [torch.randn(2000, 1000, device=SECOND), torch.randn(500, 700, dtype=torch.complex64, device=SECOND)]
    state = {"weights": plain[0], "moment": plain[0].clone().t(), "phases": plain[1].conj()}
    wanted = {key: bits(tensor) for key, tensor in state.items()}
    with open_store(store_root) as store, accelerator.limited_memory(torch.accelerator.memory_allocated(1), 1):
        SAVES[how](store, 1, state)
        for tensor in plain:
            tensor.zero_()
        store.load(state)
    assert {key: bits(tensor) for key, tensor in state.items()} == wanted


def test_the_default_device_of_torch_changes_nothing(store_root: Path) -> None:
    """What a load makes for itself lies on the host, and frames say so to stock readers."""
    state = {"array": numpy.arange(200_000.0), "bytes": bytes(200_000), "tensor": torch.arange(77.0).reshape(7, 11)}
    with open_store(store_root) as store, SECOND:
        store.save(1, state)
        found: dict[str, Any] = {"array": None, "bytes": None, "tensor": torch.zeros(7, 11)}
        store.load(found)
    assert (found["array"].tolist(), found["bytes"]) == (state["array"].tolist(), state["bytes"])
    assert bits(found["tensor"]) == bits(state["tensor"])
    assert not any(b"standin" in path.read_bytes() for path in store_root.rglob("*") if path.is_file())


def test_a_resumed_run_draws_the_numbers_of_its_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = (torch.nn.Linear(2, 2).to(SECOND) for _ in range(2))
    host = torch.nn.Linear(2, 2)
    with open_store(tmp_path / "store", group="solo") as store:
        store.save(1, ckptstore.all_state(model, host=host))
        drawn = torch.rand(4, device=SECOND).cpu()
        torch.rand(3, device=SECOND)
        store.load(ckptstore.all_state(other, host=host))
        assert torch.equal(torch.rand(4, device=SECOND).cpu(), drawn)
        assert not caplog.records
        state = ckptstore.all_state(host)["rng"]
        state.load_state_dict({**state.state_dict(), "accelerators": {"cuda:0": torch.zeros(16, dtype=torch.uint8)}})
    assert "cuda:0 is not in use here" in caplog.text
