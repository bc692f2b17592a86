"""Notes the states of the random number generators when a forward begins, and whether it drew from them."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.devices.calls import random_state, started_types
from plumbline.evidence.rank_file import tensor_bytes
from plumbline.recording.observer import Observer


class GeneratorObserver(Observer):
    """Notes, for each backward pass, the generators at each forward before it: ``{"forwards": [...]}``.

    A forward has a digest of each generator's state, and ``drew``: the generators that had moved on when it ended.
    ``between``: those that the script drew from since the previous forward, or since the last optimizer step if that
    came later. Numbers that are drawn before a step may change gradients. ``idle`` of a step: the dropout modules that
    were in evaluation mode in every forward so far, inside of a module in evaluation mode with parameters to train.
    ``noisy`` of a step: those in training mode in modules that are frozen and called without gradients, as teachers.
    """

    name = "generators"

    def __init__(self) -> None:
        self._forwards: list[Facts] = []
        self._open = False
        self._last: dict[str, str] = {}
        self._idle: dict[nn.Module, str] = {}
        self._active: set[nn.Module] = set()
        self._noisy: dict[str, None] = {}

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, one, is_idle in _dropouts(module):
            if is_idle:
                self._idle.setdefault(one, name)
            else:
                self._active.add(one)
        states = generator_states()
        self._close(states)
        self._forwards.append({"states": states, "drew": [], "between": moved_generators(self._last, states)})
        self._last = states
        self._open = True

    def constant_called(self, module: nn.Module) -> None:
        if self.attends and not any(one.requires_grad for one in module.parameters()):
            noisy = [name for name, one, _ in _dropouts(module) if one.training]
            self._noisy |= dict.fromkeys(f"{type(module).__name__}.{name}" for name in noisy)

    def forward_ends(self) -> None:
        if self._open:
            self._close(generator_states())

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Stop following a forward that has not ended: an exception may have ended it."""
        self._open = False

    def backward_ends(self, number: int) -> Facts | None:
        # A pass may run inside of a forward, which goes on after it: what the forward draws then is not known.
        forwards, self._forwards, self._open = self._forwards, [], False
        return {"forwards": forwards} if forwards else None

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Forget what was drawn before the step."""
        self._last = generator_states()
        return {"idle": [name for one, name in self._idle.items() if one not in self._active], "noisy": [*self._noisy]}

    def stop(self) -> None:
        """Forget the forwards that no backward pass followed."""
        super().stop()
        self._forwards, self._open, self._last = [], False, {}
        self._idle, self._active, self._noisy = {}, set(), {}

    def _close(self, now: dict[str, str]) -> None:
        if self._open:
            last = self._forwards[-1]
            last["drew"] = moved_generators(last["states"], now)
            self._last = now
            self._open = False


def _dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each dropout module, its name, and whether a whole module that is trained was set to evaluation mode."""
    for name, one in module.named_modules():
        if isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0:
            yield name, one, not one.training and _is_in_a_trained_one(module, name)


def _is_in_a_trained_one(module: nn.Module, name: str) -> bool:
    """Return whether the outermost module around this one that is in evaluation mode has parameters to train."""
    parts = name.split(".") if name else []
    around = (module.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1))
    outermost = next(one for one in around if not one.training)
    return any(one.requires_grad for one in outermost.parameters())


def generator_states() -> dict[str, str]:
    """Return a digest of the state of each generator that a forward usually draws from, by its name."""
    states = {"torch": _digest(tensor_bytes(torch.get_rng_state())), "python": _digest(repr(random.getstate()))}
    for name in started_types():
        state = random_state(torch.device(name))
        if state is not None:
            states[name] = _digest(tensor_bytes(state))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = _digest(pickle.dumps(numpy.random.get_state()))
    return states


def moved_generators(before: dict[str, str] | None, after: dict[str, str] | None) -> list[str]:
    """Return the names of the generators whose states differ. None: states that could not be read."""
    if before is None or after is None:
        return []
    return [name for name, state in before.items() if after.get(name, state) != state]


def _digest(state: str | bytes) -> str:
    raw = state.encode() if isinstance(state, str) else state
    return hashlib.blake2b(raw, digest_size=8).hexdigest()
