"""Converts the Trainer's arguments to a plan, and makes only the chosen devices visible to this process."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plumbline.devices.counting import available
from plumbline.devices.counting import count as count_of
from plumbline.devices.types import accelerators, backend_of, device_type
from plumbline.trainer.environments import ClusterEnvironment, detect_environment
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.precision_plugins import Autocast, Converted, MasterWeights, PrecisionPlugin
from plumbline.trainer.strategies import STRATEGIES, Strategy


def parse_gpus(gpus: int | str | Sequence[int] | None, every_device: int) -> tuple[int, ...]:
    """Return the device indices that ``gpus`` specifies. An empty tuple means one CPU device.

    Args:
        gpus: A number is a count (``3``: devices 0, 1, 2). A list or a string has indices (``"3"``: device 3 only;
            ``"0,"``: device 0; ``"0, 1"``). ``-1`` or ``"-1"``: all devices. ``None``, ``0``, ``[]``: none.
        every_device: The number of all devices.
    """
    if gpus is None:
        return ()
    if isinstance(gpus, str):
        if gpus.strip(" ") == "-1":
            return tuple(range(every_device))
        if not re.fullmatch(r" *[0-9]+ *(, *[0-9]+ *)*,? *", gpus):
            raise MisconfigurationError(
                f"gpus={gpus!r} is not a list of device indices: write '0,' or '0, 1', or '-1' for all."
            )
        gpus = [int(index) for index in re.findall(r"[0-9]+", gpus)]
    if isinstance(gpus, (list, tuple)):
        if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in gpus):
            raise MisconfigurationError(f"gpus={gpus!r} must hold device indices, each 0 or more, as in [0, 1].")
        if len(set(gpus)) < len(gpus):
            raise MisconfigurationError(f"gpus={gpus!r} names a device twice: name each device once.")
        return tuple(gpus)
    if isinstance(gpus, bool) or not isinstance(gpus, int):
        raise MisconfigurationError(
            f"gpus={gpus!r} is a {type(gpus).__name__}: give a count (2), a list ([0, 1]), a string ('0, 1') or None."
        )
    if gpus < -1:
        raise MisconfigurationError(f"gpus={gpus} is negative: give a count, or -1 for all devices.")
    return tuple(range(every_device if gpus == -1 else gpus))


def make_visible(
    accelerator: str, devices: tuple[int, ...], visible: str | None, initialised: bool
) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the environment variables that make only ``devices`` visible, and the devices' indices once they are set.

    ``visible`` is the current value of the variable for this device type. If this process has initialised a device, the
    variables have been read already, so no variables and the same indices are returned.
    """
    own = device_type(accelerator)
    if initialised or own.visible is None:
        return {}, devices
    names = visible.split(",") if visible else None
    shown = ",".join(names[index].strip() if names else str(index) for index in devices)
    return {**own.numbering, own.visible: shown}, tuple(range(len(devices)))


LEVELS: dict[str, type[PrecisionPlugin]] = {"O0": PrecisionPlugin, "O1": Autocast, "O2": MasterWeights, "O3": Converted}
STAGE_TIMEOUT = 1800.0
"""Seconds; the default of torch's process groups."""

HALF = {"16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """The parsed arguments of a Trainer.

    ``devices`` are the indices of the devices that each node uses. If ranks share devices, ``shared`` is the number of
    real devices. ``micro_batches``, ``device_memory`` (bytes), ``stages`` and ``stage_timeout`` (seconds) apply only to
    balanced.
    """

    backend: Strategy
    accelerator: str
    devices: tuple[int, ...]
    num_nodes: int
    environment: ClusterEnvironment
    precision: type[PrecisionPlugin]
    dtype: torch.dtype
    start_method: str | None
    accumulate: int
    clip_norm: float
    max_epochs: int | None
    max_steps: int | None
    val_every: int | None
    checkpoint_every: int | None
    checkpoint_path: str | None
    seed: int
    shared: int | None = None
    micro_batches: int | None = None
    device_memory: int | tuple[int, ...] | None = None
    stages: int | None = None
    stage_timeout: float = STAGE_TIMEOUT

    @property
    def comm(self) -> str:
        return backend_of(self.accelerator, shared=self.shared is not None) or "gloo"

    @property
    def processes_per_node(self) -> int:
        return len(self.devices) if self.backend.synchronises and not self.backend.splits else 1

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.processes_per_node

    @property
    def data_ranks(self) -> int:
        """The number of ranks among which the samples are divided. With stages it is 1: all get the same samples."""
        return 1 if self.backend.stages else self.world_size

    @property
    def devices_per_process(self) -> int:
        """The number of devices over which a rank splits its batch."""
        return len(self.devices) if self.backend.splits else 1


def connect(
    *,
    gpus: Any,
    num_nodes: Any,
    distributed_backend: Any,
    accelerator: Any,
    precision: Any,
    use_amp: bool,
    amp_level: Any,
    accumulate_grad_batches: Any,
    gradient_clip_val: Any,
    max_epochs: Any,
    max_steps: Any,
    val_check_interval: Any,
    checkpoint_every: Any,
    checkpoint_path: Any,
    seed: Any,
    start_method: Any,
    oversubscribe: Any = False,
    micro_batches: Any = None,
    device_memory: Any = None,
    stages: Any = None,
    stage_timeout: Any = None,
    nb_gpu_nodes: Any = None,
    node_rank: Any = None,
    variables: Mapping[str, str] = os.environ,
    present: tuple[str, int] | None = None,
) -> Plan:
    """Return the plan for the Trainer's arguments.

    ``present`` is the type and number of devices. None: count them, without initialising one.
    """
    if nb_gpu_nodes is not None:
        if num_nodes not in (1, nb_gpu_nodes):
            raise MisconfigurationError(
                f"num_nodes={num_nodes} and its older name nb_gpu_nodes={nb_gpu_nodes} differ: give num_nodes alone."
            )
        num_nodes = nb_gpu_nodes
    if node_rank is not None:
        variables = {**variables, "NODE_RANK": str(node_rank)}
    one_of("accelerator", accelerator, ("auto", "cpu", *accelerators()))
    kind, count = present or devices_for(accelerator)
    label = device_type(kind).label
    one_of("distributed_backend", distributed_backend, (None, "dp", "ddp", "ddp2", "balanced"))
    one_of("start_method", start_method, (None, "fork", "spawn"))
    whole("num_nodes", num_nodes, 1)
    on_device = accelerator not in ("auto", "cpu") or (accelerator == "auto" and count > 0)
    devices = parse_gpus(gpus, count if on_device else os.cpu_count() or 1)
    if accelerator not in ("auto", "cpu") and not devices:
        raise MisconfigurationError(
            f"accelerator={accelerator!r} with gpus={gpus!r} has no device: give gpus=1, or accelerator='cpu'."
        )
    on_device = on_device and bool(devices)
    if oversubscribe and accelerator not in ("auto", "cpu") and not count:
        raise MisconfigurationError(f"oversubscribe=True has no {label} device to share: give accelerator='cpu'.")
    if on_device and max(devices) >= count and not oversubscribe:
        raise MisconfigurationError(
            f"gpus={gpus!r} needs {label} device {max(devices)}, but there are {count}, counted from 0: "
            "use fewer, or simulate them with accelerator='cpu'."
        )
    devices = devices or (0,)
    shared = count if on_device and oversubscribe else None
    name = distributed_backend or ("dp" if len(devices) > 1 else "none")
    if num_nodes > 1 and name in ("none", "dp"):
        warnings.warn(
            f"num_nodes={num_nodes} cannot be trained with distributed_backend={distributed_backend!r}: 'ddp' is used.",
            stacklevel=3,
        )
        name = "ddp"
    whole("micro_batches", micro_batches, 1, optional=True)
    whole("stages", stages, 1, optional=True)
    limits = device_memory if isinstance(device_memory, (list, tuple)) else [device_memory]
    for limit in limits:
        whole("device_memory", limit, 1, optional=True)
    if stage_timeout is not None and (isinstance(stage_timeout, bool) or not isinstance(stage_timeout, (int, float))):
        raise MisconfigurationError(f"stage_timeout={stage_timeout!r} is not a number: give seconds, or None.")
    if stage_timeout is not None and not stage_timeout > 0:
        raise MisconfigurationError(f"stage_timeout={stage_timeout} must be more than 0 seconds.")
    for option, value in (
        ("micro_batches", micro_batches), ("device_memory", device_memory), ("stages", stages),
        ("stage_timeout", stage_timeout),
    ):  # fmt: skip
        if value is not None and name != "balanced":
            raise MisconfigurationError(
                f"{option}={value} works with distributed_backend='balanced' only, not with {name!r}: leave it out."
            )
    member, dtype = _precision(precision, use_amp, amp_level)
    whole("accumulate_grad_batches", accumulate_grad_batches, 1)
    for option, value in (("max_epochs", max_epochs), ("max_steps", max_steps)):
        whole(option, value, 0, optional=True)
    for option, value in (("val_check_interval", val_check_interval), ("checkpoint_every", checkpoint_every)):
        whole(option, value, 1, optional=True)
    whole("seed", seed, 0)
    if isinstance(gradient_clip_val, bool) or not isinstance(gradient_clip_val or 0, (int, float)):
        raise MisconfigurationError(f"gradient_clip_val={gradient_clip_val!r} is not a number: give a 2-norm, or None.")
    if not (gradient_clip_val or 0) >= 0:
        raise MisconfigurationError(f"gradient_clip_val={gradient_clip_val} is not a norm: give 0 or more, or None.")
    if checkpoint_every and not checkpoint_path:
        raise MisconfigurationError("checkpoint_every needs a file to write: give checkpoint_path, as in 'last.ckpt'.")
    environment = detect_environment(variables)
    plan = Plan(
        backend=STRATEGIES[name],
        accelerator=kind if on_device else "cpu",
        devices=devices,
        num_nodes=num_nodes,
        environment=environment,
        precision=member,
        dtype=dtype,
        # A fork takes milliseconds and pickles nothing. But devices do not work after a fork, not even if this process
        # has only run a backward while a device was visible, because autograd keeps a thread for each device.
        start_method=start_method or ("fork" if count == 0 and hasattr(os, "fork") else "spawn"),
        accumulate=accumulate_grad_batches,
        clip_norm=float(gradient_clip_val or 0),
        max_epochs=1 if max_epochs is None and max_steps is None else max_epochs,
        max_steps=max_steps,
        val_every=val_check_interval,
        checkpoint_every=checkpoint_every,
        checkpoint_path=checkpoint_path and str(checkpoint_path),
        seed=seed,
        shared=shared,
        micro_batches=micro_batches,
        device_memory=tuple(device_memory) if isinstance(device_memory, list) else device_memory,
        stages=stages,
        stage_timeout=STAGE_TIMEOUT if stage_timeout is None else float(stage_timeout),
    )
    if stages is not None and plan.world_size % stages:
        raise MisconfigurationError(
            f"stages={stages} does not divide the {plan.world_size} devices: use a divisor of their number, or another "
            "number of gpus."
        )
    if shared is not None and plan.devices_per_process > shared:
        raise MisconfigurationError(
            f"distributed_backend={distributed_backend!r} with gpus={gpus!r} has {plan.devices_per_process} replicas "
            f"in one process, but there are {shared} {label} devices, and only ranks can share a device: use 'ddp'."
        )
    if plan.accelerator not in ("cpu", "cuda") and plan.devices_per_process > 1:
        raise MisconfigurationError(
            f"distributed_backend={distributed_backend!r} splits batches over CUDA devices only, not over "
            f"{label} devices: use 'ddp'."
        )
    environment.check(num_nodes, plan.processes_per_node)
    return plan


def devices_for(accelerator: str) -> tuple[str, int]:
    """Return the device type for ``accelerator`` and the number of visible devices; ``cpu`` is treated as ``auto``."""
    return available() if accelerator in ("auto", "cpu") else (accelerator, count_of(accelerator))


def _precision(precision: Any, use_amp: bool, amp_level: Any) -> tuple[type[PrecisionPlugin], torch.dtype]:
    bits = None if precision is None else str(precision)
    if isinstance(precision, bool) or bits not in (None, "64", "32", "16", "bf16"):
        raise MisconfigurationError(f"precision={precision!r} does not exist: use 64, 32, 16 or 'bf16'.")
    one_of("amp_level", amp_level, (None, *LEVELS))
    if not isinstance(use_amp, bool):
        raise MisconfigurationError(f"use_amp={use_amp!r} is neither True nor False.")
    if bits is None:
        bits = "32" if not use_amp or amp_level == "O0" else "16"
    elif use_amp and bits not in HALF and amp_level != "O0":
        raise MisconfigurationError(f"use_amp=True contradicts precision={precision!r}: leave one of them out.")
    if amp_level is not None and (amp_level == "O0") != (bits == "32"):
        raise MisconfigurationError(
            f"amp_level={amp_level!r} contradicts "
            f"{'precision=' + bits if precision is not None else 'use_amp=False'}: O0 is precision=32; O1, "
            "O2 and O3 go with use_amp=True, precision=16 or precision='bf16'."
        )
    if bits in HALF:
        return LEVELS[amp_level or "O1"], HALF[bits]
    return (Converted, torch.float64) if bits == "64" else (PrecisionPlugin, torch.float32)


def one_of(option: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Raise MisconfigurationError with the nearest choice unless ``value`` is one of ``choices``."""
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return
    spelled = {choice.lower(): choice for choice in choices if choice}
    close = difflib.get_close_matches(str(value).lower(), spelled, n=1)
    hint = f"did you mean {spelled[close[0]]!r}?" if close else f"use {', '.join(map(repr, choices))}."
    raise MisconfigurationError(f"{option}={value!r} does not exist: {hint}")


def whole(option: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise MisconfigurationError unless ``value`` is a whole number of at least ``least``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MisconfigurationError(f"{option}={value!r} must be a whole number, {least} or more.")
