"""The stand-in is as hard on a program as an accelerator is: what the other checks rest on."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import accelerator
from kit.accelerator import DEVICE_COUNT, NAME, Gate

FIRST, SECOND = (torch.device(NAME, index) for index in range(DEVICE_COUNT))


def test_torch_knows_it_as_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    assert torch.accelerator.device_count() == DEVICE_COUNT
    assert torch.ones(2, device=NAME).device == FIRST


@pytest.mark.parametrize("touch", [lambda at: ctypes.string_at(at, 4), lambda at: ctypes.memset(at, 0, 4)])
def test_the_host_dies_of_touching_its_memory(touch: Callable[[int], Any]) -> None:
    there, here = torch.ones(4, device=NAME), torch.ones(4)
    torch.accelerator.synchronize()
    assert _end_of(lambda: touch(here.data_ptr())) == 0
    assert _end_of(lambda: touch(there.data_ptr())) == -signal.SIGSEGV


def _end_of(work: Callable[[], Any]) -> int:
    """How a forked process ends that does this."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0)[1::2],
        torch.tensor(3, dtype=torch.uint8),
        torch.arange(9.0).bfloat16(),
        torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj(),
        torch.view_as_complex(torch.arange(8.0).reshape(4, 2)).conj().imag,
        torch.empty(0, 3),
    ],
)
def test_copies_there_across_and_back_are_exact(tensor: torch.Tensor) -> None:
    there = tensor.to(FIRST)
    assert there.stride() == tensor.stride() or not tensor.is_contiguous()
    assert torch.equal(there.to(SECOND).cpu(), tensor)
    assert torch.equal(there.clone().cpu(), tensor)


def test_a_copy_ends_late_and_its_call_does_not() -> None:
    source, target = torch.arange(4.0).to(FIRST), torch.zeros(4, pin_memory=True)
    done = torch.Event(FIRST)
    with Gate() as gate:
        target.copy_(source, non_blocking=True)
        done.record(torch.accelerator.current_stream())
        assert not done.query()
        assert target.tolist() == [0, 0, 0, 0]
        gate.open()
        done.synchronize()
    assert target.tolist() == [0, 1, 2, 3]


def test_pageable_memory_is_read_at_once_and_pinned_memory_late() -> None:
    pageable, pinned = torch.ones(3), torch.ones(3, pin_memory=True)
    assert (pageable.is_pinned(), pinned.is_pinned()) == (False, True)
    with Gate():
        there = [host.to(FIRST, non_blocking=True) for host in (pageable, pinned)]
        pageable.zero_()
        pinned.zero_()
    assert [tensor.sum().item() for tensor in there] == [3, 0]


def test_a_stream_waits_for_an_event_and_for_nothing_later() -> None:
    tensor, side, made = torch.zeros(4, device=FIRST), torch.Stream(FIRST), torch.Event(FIRST)
    tensor.add_(1)
    made.record(torch.accelerator.current_stream())
    with Gate(), side:
        side.wait_event(made)
        assert tensor.tolist() == [1, 1, 1, 1]
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() != side


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    tensor, side = torch.zeros(4, device=FIRST), torch.Stream(FIRST)
    side.synchronize()
    torch.accelerator.synchronize()
    with Gate():
        tensor.add_(1)
        with side:
            assert tensor.tolist() == [0, 0, 0, 0]
    assert tensor.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_still_reads_is_lost_unless_it_was_recorded(recorded: bool) -> None:
    tensor, side, target = torch.ones(4, device=FIRST), torch.Stream(FIRST), torch.zeros(4, pin_memory=True)
    torch.accelerator.synchronize()
    with side, Gate() as gate:
        target.copy_(tensor, non_blocking=True)
        if recorded:
            tensor.record_stream(side)
        del tensor
        if not recorded:
            _settle_default_stream()
        gate.open()
        side.synchronize()
    assert (target.tolist() == [1, 1, 1, 1]) == recorded


def _settle_default_stream() -> None:
    """Wait for the default stream, from a thread of its own, which is on it."""
    thread = threading.Thread(target=lambda: torch.accelerator.current_stream().synchronize())
    thread.start()
    thread.join()


def test_a_thread_begins_on_the_first_device() -> None:
    torch.accelerator.set_device_index(1)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert (seen, torch.accelerator.current_device_index()) == ([0], 1)
    torch.ones(2, device=NAME)
    assert (accelerator.has_context(0), accelerator.has_context(1)) == (False, True)


def test_a_full_device_says_so_and_counts() -> None:
    before = torch.accelerator.memory_allocated(1)
    with accelerator.limited_memory(before + (1 << 20), 1):
        kept = torch.empty(1 << 19, dtype=torch.uint8, device=SECOND)
        assert torch.accelerator.memory_allocated(1) - before == 1 << 19
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(1 << 20, dtype=torch.uint8, device=SECOND)
        del kept
        torch.empty(1 << 20, dtype=torch.uint8, device=SECOND)


def test_training_there_is_training_here() -> None:
    def losses(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 2)]
        model = torch.nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, step, 216).reshape(2, 3, 6, 6).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert losses(SECOND) == pytest.approx(losses(torch.device("cpu")), rel=1e-4)
    assert not accelerator.has_context(0)


def test_its_random_numbers_are_its_own() -> None:
    torch.manual_seed(5)
    state, host = torch.standin.get_rng_state(), torch.get_rng_state()
    first = torch.rand(3, device=FIRST)
    assert torch.equal(torch.get_rng_state(), host)
    torch.standin.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=FIRST).cpu(), first.cpu())


def test_a_kernel_that_fails_is_reported_by_whoever_waits() -> None:
    tensor = torch.ones(3, device=FIRST)
    tensor.add_(torch.ones(2, device=FIRST))
    with pytest.raises(RuntimeError, match="a kernel of the stand-in accelerator failed"):
        torch.accelerator.synchronize()


def test_a_forked_process_is_told() -> None:
    torch.ones(2, device=FIRST)
    pid = os.fork()
    if not pid:
        try:
            torch.ones(2, device=FIRST)
        except RuntimeError as error:
            os._exit(7 if "forked process" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_memory_is_reached_by_no_view_of_the_host() -> None:
    tensor = torch.ones(4, device=FIRST)
    with pytest.raises(TypeError):
        tensor.numpy()
    assert ctypes.c_void_p(tensor.data_ptr()).value
