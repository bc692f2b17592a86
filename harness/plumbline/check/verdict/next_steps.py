"""Says what to do if a training could not be judged, or only in part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from plumbline.check.judge.script_checks import CheckedTraining

NEXT_STEPS: Final[Mapping[str, str]] = {
    "--stop ended some ranks before others": (
        "leave out `--stop`; if the command still fails, fix the error that it raises without Plumbline"
    ),
    "the command failed": "run the command without Plumbline, and fix the error that it raises",
    "the script failed": "run the command without Plumbline, and fix the error that it raises",
    "creates no torch.optim.Optimizer": "train with an optimizer of `torch.optim`, or a class derived from it",
    "each rank holds its own weights": "if all ranks should train one model, wrap it in `DistributedDataParallel`",
    "FSDP1 shards": "use `fully_shard` (FSDP2)",
    "FSDP1 keeps its parameters in flat tensors": "use `fully_shard` (FSDP2)",
    "the optimizer's step communicates": "average the gradients before the optimizer's step to have them judged",
    "it is not known how the ranks divide the state": (
        "keep the state of a parameter on one rank, whole on every rank, or sharded as the parameter is"
    ),
    "no parameter is in every rank's optimizer": "make each rank's part of the model an `nn.Module`",
    "its forward returned a different result when it was run again": (
        "make the forward depend only on its inputs, its parameters and torch's random generators"
    ),
    "the forward registers hooks on tensors": "remove these hooks for the check",
    "ranks recorded steps": "let every rank step an optimizer of its own",
    "not all ranks reached the same optimizer step": "let all ranks take the same number of optimizer steps",
    "too little memory is free": "check with a smaller batch or model, or on fewer ranks per machine",
    "no memory is left to run it again in ": (
        "check with a smaller batch or model; `--truth float32` also takes less memory"
    ),
    "no memory is left to run it again": "check with a smaller batch or model",
    "It is not known whether the loss was multiplied by it": (
        "compute the loss with one function of `torch.nn.functional`, or set the loss scale to 1 for the check"
    ),
    "the optimizer took no step during the recording": "record later steps with `--after N`",
    "the optimizer took no recorded step": "record more steps with `--steps N`",
    "not in the sample of --sample-parameters": "leave out `--sample-parameters` to have all parameters judged",
    "no backward pass reached the optimizer's parameters": (
        "compute gradients with `loss.backward()`, and give the optimizer the model's parameters or copies of them"
    ),
    "the gradient did not come from a recorded backward pass": "compute gradients with `loss.backward()`",
}
"""Maps a part of a reason to what to do about it. Reasons that already say what to do, and reasons without a remedy,
are left out."""


def next_step(sentence: str, trainings: Sequence[CheckedTraining]) -> str:
    """Return what to do about the reason in ``sentence``, else about what was not judged; "" if nothing is known."""
    for why in (sentence, *_left_out(trainings)):
        for part, step in NEXT_STEPS.items():
            if part in why:
                return step
    return ""


def _left_out(trainings: Sequence[CheckedTraining]) -> Iterator[str]:
    for one in trainings:
        for share in (one.coverage.gradients, one.coverage.updates):
            yield from (group.why for group in share.left_out)
