"""The checks of a script, the trainings that its processes recorded, and what the checks find in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plumbline.check.evidence.options import FILE, GROUP, read_options
from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.clipping import judge_clipping
from plumbline.check.judge.coverage import Coverage, coverage_of
from plumbline.check.judge.documents import judge_documents
from plumbline.check.judge.estimate import CostEstimate, estimate
from plumbline.check.judge.experts import judge_experts
from plumbline.check.judge.forward_states import judge_buffers, judge_generator_states
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.judged_gradients import without_discarded_passes, without_other_models
from plumbline.check.judge.learning_rate import judge_learning_rate
from plumbline.check.judge.likely_mistakes import (
    judge_gathered_outputs,
    judge_lost_ties,
    judge_rounded_updates,
    judge_unused_losses,
)
from plumbline.check.judge.loss_scales import judge_skipped_steps, with_own_loss_scales
from plumbline.check.judge.noted import not_judged
from plumbline.check.judge.objective import judge_objective
from plumbline.check.judge.optimized_parameters import judge_frozen_weights, judge_optimized_parameters
from plumbline.check.judge.precision_used import judge_precision_used
from plumbline.check.judge.ranks_agree import (
    judge_initial_weights,
    judge_ranks_agree,
    judge_uneven_ranks,
    without_excuse,
)
from plumbline.check.judge.recomputation import judge_recomputation
from plumbline.check.judge.resplit import Rerun, judge_resplit
from plumbline.check.judge.resumption import CHECK as RESUMPTION
from plumbline.check.judge.resumption import judge_resumption
from plumbline.check.judge.rows_used import judge_rows_used
from plumbline.check.judge.update import judge_update
from plumbline.core.errors import TraceError
from plumbline.core.finding import Finding, in_reading_order
from plumbline.evidence.read import read_file
from plumbline.judge.checks import CHECKS
from plumbline.judge.judge import KINDS, SCRIPT_RULES, Kind, judge

CHECKS[RecordedTraining] |= {
    "initial-weights": judge_initial_weights,
    "samples": judge_rows_used,
    "rng": judge_generator_states,
    "recomputation": judge_recomputation,
    "gradients": judge_gradients,
    "clipping": judge_clipping,
    "skipped-steps": judge_skipped_steps,
    "learning-rate": judge_learning_rate,
    "update": judge_update,
    "optimized-parameters": judge_optimized_parameters,
    "frozen-weights": judge_frozen_weights,
    "uneven-ranks": judge_uneven_ranks,
    "ranks-agree": judge_ranks_agree,
    "buffers": judge_buffers,
    "precision": judge_precision_used,
    "objective": judge_objective,
    "unused-losses": judge_unused_losses,
    "gathered-outputs": judge_gathered_outputs,
    "experts": judge_experts,
    "documents": judge_documents,
    "lost-ties": judge_lost_ties,
    "rounded-updates": judge_rounded_updates,
}
KINDS[RecordedTraining] = Kind(SCRIPT_RULES, same_cause=False)


@dataclass(frozen=True)
class CheckedTraining:
    """One training of a command, its findings in reading order, and the cost ``estimate`` of a dry run."""

    training: RecordedTraining
    findings: list[Finding]
    coverage: Coverage
    estimate: CostEstimate | None = None


def judged_trainings(folder: Path) -> list[CheckedTraining]:
    """Return the trainings that were recorded below a folder, each with its findings.

    It raises ``TraceError`` if evidence cannot be read.
    """
    known = (with_own_loss_scales(without_discarded_passes(one)) for one in read_trainings(folder))
    return [_judged(one, folder) for one in known]


def with_resplit(checked: Sequence[CheckedTraining], rerun: Rerun) -> list[CheckedTraining]:
    """Return trainings with the finding about their first step, trained again with a different split of its samples."""
    found = judge_resplit([one.training for one in checked], rerun)
    return [replace(one, findings=[*one.findings, found]) for one in checked]


def with_resumption(
    first: Sequence[RecordedTraining],
    checked: Sequence[CheckedTraining],
    whole: Sequence[RecordedTraining],
    interrupted: int,
    obstacle: str = "",
) -> list[CheckedTraining]:
    """Return resumed trainings with findings on how they differ from the uninterrupted ``whole`` one.

    ``first`` was interrupted after ``interrupted`` steps. ``obstacle`` says why they cannot be compared; "" if nothing
    prevents it.
    """
    resumed = [one.training for one in checked]
    found = [not_judged(RESUMPTION, obstacle)] if obstacle else [*judge_resumption(first, resumed, whole, interrupted)]
    return [replace(one, findings=in_reading_order([*one.findings, *found])) for one in checked]


def _judged(training: RecordedTraining, folder: Path) -> CheckedTraining:
    found = judge(training)
    coverage = coverage_of(training, found)
    findings = without_excuse(found, is_joint=coverage.is_joint)
    return CheckedTraining(training, findings, coverage, estimate(training, folder))


def read_trainings(folder: Path) -> list[RecordedTraining]:
    """Return the trainings recorded in ``folder``: usually one, or none if no optimizer took a step.

    The ranks of a process group make one training. Each process without a group makes a training of its own. A file
    that cannot be read raises ``TraceError``, which names it.
    """
    groups: dict[tuple[int, str], list[RecordedRank]] = defaultdict(list)
    for own in sorted(folder.glob("rank-*-*"), key=lambda path: [int(part) for part in path.name.split("-")[1:]]):
        rank = _read_rank(own)
        if rank is not None:
            group = next((one.name for one in own.glob(f"{GROUP}*")), "") if rank.world_size > 1 else own.name
            groups[rank.world_size, group].append(rank)
    objective = read_options(str(folder)).objective if (folder / FILE).is_file() else ""
    by_rank = (tuple(sorted(ranks, key=lambda one: one.rank)) for ranks in groups.values())
    return [without_other_models(RecordedTraining(ranks, objective)) for ranks in by_rank]


def world_size_of(folder: Path) -> int:
    """Return the number of ranks of the training in ``folder``, or 0 as long as no step is written.

    A file that cannot be read raises ``TraceError``, which names it.
    """
    steps = next(iter(sorted(folder.glob("rank-*-*/step-*.safetensors"))), None)
    return 0 if steps is None else int(_read(steps)[0]["world_size"])


def _read_rank(folder: Path) -> RecordedRank | None:
    steps = sorted(folder.glob("step-*.safetensors"))
    if not steps:
        return None
    recorded = [_read(path) for path in steps]
    end = _read(folder / "end.safetensors")[0] if (folder / "end.safetensors").is_file() else {}
    later = _read(folder / "later.safetensors")[0] if (folder / "later.safetensors").is_file() else {}
    first = recorded[0][0]
    return RecordedRank(
        first["rank"],
        max(values["world_size"] for values, _ in recorded),
        tuple(_step(values, tensors) for values, tensors in recorded),
        {**end.get("facts", {}), **later.get("facts", {})},
        end.get(
            "error",
            "" if end else "its recording is incomplete: the process was killed, or is still recording",
        ),
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return read_file(path)
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise TraceError(
            f"{path} is incomplete or damaged ({type(error).__name__}: {error}); run the command again"
        ) from error


def _step(values: dict[str, Any], tensors: dict[str, Any]) -> RecordedStep:
    return RecordedStep(
        parameters=tuple(Parameter(**{**one, "shape": tuple(one["shape"])}) for one in values["parameters"]),
        passes=_passes("pass", values["passes"], tensors),
        other_passes=_passes("other", values["other_passes"], tensors),
        **{name: values[name] for name in ("optimizer", "number", "skipped", "facts", "norm")},
        **{name: tensors[name] for name in RecordedStep.VECTORS if name in tensors},
    )


def _passes(kind: str, values: list[dict[str, Any]], tensors: dict[str, Any]) -> tuple[BackwardPass, ...]:
    return tuple(
        BackwardPass(
            **one,
            **{name: tensors[key] for name in BackwardPass.VECTORS if (key := f"{kind} {index}/{name}") in tensors},
        )
        for index, one in enumerate(values)
    )
