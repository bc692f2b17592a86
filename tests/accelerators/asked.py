"""Queries the harness about a custom device type, in a process whose torch has it. Fails on a wrong answer."""

from __future__ import annotations

import torch

from plumbline.check.rank.memory_needed import free_bytes
from plumbline.check.rank.observers.generators import generator_states
from plumbline.devices import calls, counting, types
from plumbline.devices.types import backend_of, device_of
from plumbline.engine.cells_in_flight import number_of_judges
from plumbline.machine.fingerprint import take_fingerprint
from plumbline.planning.devices import resolve_accelerator
from plumbline.trainer.connector import devices_for
from plumbline.worker.timing.devices import WaitingClock, clock_of, memory_of

own = torch.device("own", 0)

# None of this initialises the device.
assert resolve_accelerator("auto") == resolve_accelerator("own") == devices_for("auto") == ("own", 1)
assert "own" in types.accelerators()
assert types.device_type("own").one == "an OWN device"
assert counting.counts()["own"] == 1
assert (backend_of("own"), backend_of("own", shared=True), device_of("ownccl")) == ("ownccl", "ownccl", "own")
key = take_fingerprint("own").key
assert (key.device, key.device_count, key.cuda, key.driver) == ("Own Device 1", 1, None, None)
assert number_of_judges() == 0, "autograd has a thread for the device, which a fork would not have"
assert calls.why_no_fork() is None
assert "own" not in generator_states()

data = torch.ones(256, device="own")
assert (data * 2).sum().item() == 512
assert calls.why_no_fork() == "OWN"
assert calls.started_types() == ("own",)
assert "own" in generator_states()

calls.seed_all("own", 5)
first = torch.rand(3, device="own")
calls.seed(own, 5)
with calls.forked([own]):
    assert torch.equal(torch.rand(3, device="own"), first)
assert torch.equal(torch.rand(3, device="own"), first)

assert memory_of([own])["memory_allocated_peak"] >= data.numel() * 4
free = free_bytes(own)
assert free is not None
assert 0 < free < 1 << 30
assert not calls.counts_peak(own)
assert calls.mark(own) is None
clock = clock_of([own])
assert isinstance(clock, WaitingClock)
clock.rest()
begun, ended = clock.times([clock.mark(), clock.mark()])
assert begun <= ended
assert calls.profiled("own") == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
