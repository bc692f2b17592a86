"""Why nothing could be judged, and what else went wrong while a command ran, with what to do about it where known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.check.command.checked_command import CheckedCommand, PythonProcess
from plumbline.check.command.running import EndedBy
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.core.numbers import counted
from plumbline.report.text import in_words, shortened

MEMORY = (
    "the machine, or a control group, ran out of memory while the command ran: the kernel killed a process, perhaps "
    "one of another command"
)

_STOPPED_EARLY = "--stop ended some ranks before others took as many steps"

KEPT_OUT = "a container, a cleared environment, or Python's -I, -E or -S may keep it out"


def why_nothing_was_recorded(checked: CheckedCommand) -> str:
    if checked.has_lost_folder:
        return "the command removed the folder for evidence while it ran"
    if checked.full_folder is not None:
        return f"there is no space left in {checked.full_folder}"
    if not checked.processes and checked.end.has_failed:
        return (
            f"the command failed before a Python process loaded the recorder: {checked.end.in_words}; if it did start "
            f"Python, {KEPT_OUT}"
        )
    if not checked.processes:
        return f"no Python process of the command loaded the recorder: {KEPT_OUT}"
    trained = [one for one in checked.processes if one.torch]
    early = [one for one in checked.processes if one.raised or not one.ended]
    if not trained:
        return _before_torch(checked, early)
    if obstacle := next((one.obstacle for one in trained if one.obstacle), ""):
        return obstacle
    if checked.end.by is not EndedBy.ITSELF:
        return f"the command was ended {_by(checked)} before it completed an optimizer step"
    if checked.end.has_failed:
        when = "in" if any(one.begun for one in trained) else "before"
        return f"the script failed {when} its first optimizer step: {checked.end.in_words}{_reason(early)}"
    return _without_a_step(checked, trained)


def why_no_estimate(checked: CheckedCommand) -> str | None:
    """Return why a dry run measured no training, or None if it measured one."""
    if any(one.estimate for one in checked.trainings):
        return None
    if checked.trainings:
        return f"not every rank of the training took {counted(checked.options.after + 1, 'step')}"
    return why_nothing_was_recorded(checked)


def incidents(checked: CheckedCommand) -> Iterator[str]:
    """Yield what else went wrong, the command's own failure first."""
    if checked.trainings and (early := early_end(checked)):
        yield early
    if checked.end.out_of_memory:
        yield MEMORY
    for one in checked.trainings:
        yield from _of_training(checked, one)
    if checked.trainings and checked.full_folder is not None:
        yield f"there is no space left in {checked.full_folder}: evidence may be missing"


def early_end(checked: CheckedCommand) -> str:
    """Return how the command failed or who ended it; "" if it succeeded."""
    if checked.end.by is not EndedBy.ITSELF:
        return f"the command was ended {_by(checked)}, after {in_words(checked.end.seconds, 's')}"
    if checked.end.has_failed:
        early = [one for one in checked.processes if one.raised or (one.torch and not one.ended)]
        failed = f"the command failed: {checked.end.in_words}{_reason(early)}"
        return f"{_STOPPED_EARLY}, and {failed}" if _left_ranks_behind(checked) else failed
    return ""


def _left_ranks_behind(checked: CheckedCommand) -> bool:
    """Return whether ranks that had recorded all steps may have ended while others still needed them."""
    counts = {len(rank.steps) for one in checked.trainings for rank in one.training.ranks}
    return checked.options.stop and len(counts) > 1 and max(counts) >= checked.options.steps


def _before_torch(checked: CheckedCommand, early: Sequence[PythonProcess]) -> str:
    if checked.end.by is not EndedBy.ITSELF:
        return f"the command was ended {_by(checked)} before a process imported torch"
    if checked.end.has_failed:
        return f"the script failed before it imported torch: {checked.end.in_words}{_reason(early)}"
    return "no process of the command imports torch"


def _without_a_step(checked: CheckedCommand, trained: Sequence[PythonProcess]) -> str:
    after = checked.options.after
    steps = any(one.steps for one in trained)
    if steps and checked.options.dry_run:
        return f"no optimizer took {counted(after + 1, 'step')}, which a dry run needs"
    if steps:
        most = counted(after, "step")
        return f"no optimizer took more than {most}, so --after {after} leaves none to record"
    if not any(one.optimizers for one in trained):
        return "the script creates no torch.optim.Optimizer: Plumbline judges what an optimizer receives and does"
    if not any(one.passes for one in trained):
        return "the script creates an optimizer, but runs no backward pass"
    if any(one.begun for one in trained):
        return "the first optimizer step raised an error, and no step was completed"
    return "the script runs backward passes, but never calls its optimizer's step"


def _of_training(checked: CheckedCommand, one: CheckedTraining) -> Iterator[str]:
    training, options = one.training, checked.options
    counts = {rank.rank: len(rank.steps) for rank in training.ranks}
    if len(training.ranks) < training.world_size:
        missing = sorted(set(range(training.world_size)) - set(counts))
        who = "rank" if len(missing) == 1 else "ranks"
        yield (
            f"{who} {_listed(missing)} of {training.world_size} recorded no step; if ranks run on several machines, "
            "set TMPDIR to a folder that all machines share"
        )
    if len(set(counts.values())) > 1:
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        yield (
            f"ranks took different numbers of steps: rank {least} recorded {counts[least]}, rank {most} "
            f"{counts[most]}; only the steps that all ranks took are judged"
        )
    elif (steps := describe(training).steps) < options.steps and not checked.shows_later_window:
        optimizers = len({step.optimizer for rank in training.ranks for step in rank.steps})
        took = "the script took only" if optimizers == 1 else f"none of {optimizers} optimizers took more than"
        yield f"{took} {steps} of the {options.steps} requested steps"
    for rank in training.ranks:
        if rank.error:
            yield f"rank {rank.rank}: {shortened(rank.error, 300)}"


def _by(checked: CheckedCommand) -> str:
    if checked.end.by is EndedBy.USER:
        return "by Ctrl-C or a signal"
    if checked.end.by is EndedBy.VERDICT:
        return "because a recorded step is wrong (--stop-when-wrong)"
    return f"at the time limit of {checked.time_limit:g} s"


def _reason(processes: Sequence[PythonProcess]) -> str:
    """Return what ended the first of these processes. Processes that have a rank and loaded torch come first."""
    ranked = [one for one in processes if one.rank is not None and one.torch]
    one = next(iter(ranked or processes), None)
    if one is None:
        return ""
    who = "" if one.rank is None else f"on rank {one.rank}: "
    if one.raised:
        return f" ({who}{shortened(one.raised, 200)})"
    return f" ({who}process {one.pid} was killed, or called os._exit)"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
