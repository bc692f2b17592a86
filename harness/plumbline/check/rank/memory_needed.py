"""Estimates the memory that replays need in addition to the training, and refuses if less is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.devices.calls import free_bytes as free_bytes_of_device
from plumbline.devices.host_memory import free_bytes_of_host
from plumbline.recording.sharding import is_shard, local
from plumbline.replay.precision import ReplayPrecision

_STATES = 6
"""Copies of one parameter in float64 that a replay of its update holds: weights, gradient, state and new values."""

_GIB = float(1 << 30)


class NotEnoughMemoryError(Exception):
    """Replays would take more memory than is free; the message says which option helps."""


def require_memory(
    roots: Sequence[nn.Module], parameters: Sequence[Tensor], sample: ParameterSample, options: RecordingOptions
) -> None:
    """Refuse to replay if this takes more memory than is free on the device of the parameters.

    This counts copies of weights and gradients, for the parameters of called modules and of the optimizer. It does not
    count what a forward saves for its backward pass; ``--dry-run`` measures that.

    Raises:
        NotEnoughMemoryError: too little memory is free.
    """
    every = list({id(one): one for one in (*(p for root in roots for p in root.parameters()), *parameters)}.values())
    if not parameters or any(hasattr(one, "full_tensor") or is_shard(one) for one in every):
        return  # all ranks gather shards together, so one alone must not refuse
    free = free_bytes(parameters[0].device)
    if free is None or needed_bytes(every, parameters, sample, options) <= free:
        return
    raise NotEnoughMemoryError(_sentence(every, parameters, sample, options, free))


def needed_bytes(
    every: Sequence[Tensor], parameters: Sequence[Tensor], sample: ParameterSample, options: RecordingOptions
) -> int:
    """Return the bytes that replays need: for gradients, or for the update after these are freed, if it needs more."""
    truth = ReplayPrecision(options.truth)
    widths = [one.numel() * truth.wide(one.dtype).itemsize for one in every]
    judged = [local(one) for one in parameters if sample.has(one)]
    gradients = sum(widths) + max(widths, default=0)
    update = sum(one.numel() * one.element_size() for one in judged)
    return max(gradients, update + _STATES * 8 * max((one.numel() for one in judged), default=0))


def is_free(size: int, device: torch.device) -> bool:
    """Return whether this many bytes are free, as far as this is known."""
    free = free_bytes(device)
    return free is None or size <= free


def bytes_of_step(parameter: Tensor, others: int) -> int:
    """Return the bytes of a whole parameter, ``others`` more tensors of its shape, and the replay of its step."""
    return parameter.numel() * ((1 + others) * parameter.element_size() + _STATES * 8)


def bytes_of_steps(entries: int) -> int:
    """Return the bytes that the replay of a step needs, if parameters and state have so many entries together."""
    return entries * 4 * 8


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes a process of this machine can still allocate on a device; None if this is unknown."""
    if device.type != "cpu":
        return free_bytes_of_device(device)
    free = free_bytes_of_host()
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return None if free is None else free // ranks


def _sentence(
    every: Sequence[Tensor],
    parameters: Sequence[Tensor],
    sample: ParameterSample,
    options: RecordingOptions,
    free: int,
) -> str:
    now = needed_bytes(every, parameters, sample, options)
    said = (
        f"recomputing gradients and updates needs about {now / _GIB:.3g} GiB of memory beyond the training's own, "
        f"but only {free / _GIB:.3g} GiB are free"
    )
    small = ParameterSample(_SHARE)
    small.add(parameters)
    ways = [
        (f"--sample-parameters {_SHARE:g}", small, options),
        ("--truth float32", sample, replace(options, truth="float32")),
        (f"--truth float32 --sample-parameters {_SHARE:g}", small, replace(options, truth="float32")),
    ]
    costs = [(words, needed_bytes(every, parameters, chosen, given)) for words, chosen, given in ways]
    helping = [(words, cost) for words, cost in costs if cost <= free]
    if not helping:
        words, least = min(costs, key=lambda one: one[1])
        return (
            f"{said}; even with {words} it needs {least / _GIB:.3g} GiB: check a smaller model, or use fewer ranks per "
            "machine"
        )
    words, cost = helping[0]
    return f"{said}; with {words} it needs {cost / _GIB:.3g} GiB"


_SHARE = 0.1
"""The share of parameters that the message proposes to sample."""
