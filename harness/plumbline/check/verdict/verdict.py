"""Sums up a checked command: right, wrong or not judged, in one sentence, with what to do next and the exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from plumbline.check.command.checked_command import CheckedCommand, JudgedWindow
from plumbline.check.command.running import EndedBy
from plumbline.check.judge.coverage import ZERO_GRADIENT, Coverage
from plumbline.check.judge.gradients import CHECK as GRADIENTS
from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.judge.objective import CHECK as OBJECTIVE
from plumbline.check.judge.resumption import CHECK as RESUMPTION
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.description import describe
from plumbline.check.verdict.obstacles import incidents, why_nothing_was_recorded
from plumbline.core.errors import TROUBLE
from plumbline.core.finding import Finding, by_themselves, is_unexplained
from plumbline.core.numbers import compact, counted
from plumbline.core.outcome import Outcome
from plumbline.core.titles import title_of
from plumbline.report.text import percent

RIGHT, WRONG = 0, 1

ENOUGH = 0.99
"""The least share of trainable elements whose gradients and updates must be judged to call a training right."""

MOST_MISTAKES = 3
"""The most mistakes that the first line names."""

INTERRUPTED = 130  # 128 + SIGINT, as a shell does


class Answer(str, Enum):
    """Whether a training is right, worst last.

    ``RIGHT_IN_PART``: nothing is wrong, but less than ``ENOUGH`` of its gradients or updates was judged.
    """

    RIGHT = "right"
    RIGHT_IN_PART = "right in part"
    NOT_JUDGED = "not judged"
    WRONG = "wrong"


@dataclass(frozen=True)
class Verdict:
    """The answer, a sentence that gives its reason, other incidents, and the exit code.

    ``next_step``: what to do to have more judged; "" if nothing is known or needed.
    """

    answer: Answer
    sentence: str
    incidents: tuple[str, ...]
    exit_code: int
    next_step: str = ""


def verdict_of(checked: CheckedCommand, *, require_full: bool = False) -> Verdict:
    """Return the verdict on a command, which is that on its worst training. A command that failed is never right.

    ``require_full``: a training that is right in part gets the exit code of one that could not be judged.
    """
    if not checked.trainings:
        answer, sentence = Answer.NOT_JUDGED, why_nothing_was_recorded(checked)
    else:
        answer, sentence = worst(checked.trainings)
        if checked.windows:
            sentence = f"{sentence}{_among_windows(checked.windows)}"
    also = list(incidents(checked))
    if answer in (Answer.RIGHT, Answer.RIGHT_IN_PART) and checked.end.has_failed:
        answer, sentence = Answer.NOT_JUDGED, f"{also.pop(0)}; before that, {sentence}"
    code = _exit_code(answer, checked, require_full=require_full)
    return Verdict(answer, sentence, tuple(also), code, next_step_after(answer, sentence, checked.trainings))


def next_step_after(answer: Answer, sentence: str, trainings: Sequence[CheckedTraining]) -> str:
    """Return what to do after an answer that leaves something open; "" if nothing is known or needed."""
    return next_step(sentence, trainings) if answer in (Answer.NOT_JUDGED, Answer.RIGHT_IN_PART) else ""


def worst(trainings: Sequence[CheckedTraining]) -> tuple[Answer, str]:
    """Return the worst answer for one or more trainings, and its reason."""
    answers = [answer_of(one) for one in trainings]
    answer = max(answers, key=list(Answer).index)
    sentence = sentence_on(trainings[answers.index(answer)])
    return answer, f"{answers.count(answer)} of {len(answers)} trainings: {sentence}" if len(answers) > 1 else sentence


def answer_of(one: CheckedTraining) -> Answer:
    """Return the answer for a training. It is right only if received gradients and parameter updates were judged."""
    coverage = one.coverage
    if any(is_accusation(finding) for finding in one.findings):
        return Answer.WRONG
    if _unanswered(one):
        return Answer.NOT_JUDGED
    has_passed = any(each.check == GRADIENTS and each.outcome is Outcome.PASSED for each in one.findings)
    if not has_passed or not coverage.gradients.entries or coverage.nothing_moved:
        return Answer.NOT_JUDGED
    is_full = min(coverage.gradients.part, coverage.updates.part) >= ENOUGH
    return Answer.RIGHT if is_full else Answer.RIGHT_IN_PART


def _unanswered(one: CheckedTraining) -> str:
    """Return which of the user's questions could not be answered, and why; "" if all could.

    Users ask by declaring an objective, or by having the training interrupted and resumed.
    """
    asked = (RESUMPTION, OBJECTIVE) if one.training.objective else (RESUMPTION,)
    skipped = (each for each in one.findings if each.check in asked and each.outcome is Outcome.SKIPPED)
    return next((f"{each.check}: {each.message.removeprefix('not judged: ')}" for each in skipped), "")


def is_accusation(finding: Finding) -> bool:
    """Return whether a finding says that the training is wrong. A check that reached no verdict does not."""
    return finding.outcome.is_bad and finding.outcome is not Outcome.ERRORED


def accusations(one: CheckedTraining) -> Iterator[Finding]:
    """Yield the findings that say what is wrong. The one that explains the others comes first."""
    return (finding for finding in one.findings if is_accusation(finding))


def mistakes(one: CheckedTraining) -> list[Finding]:
    """Return the mistakes without their consequences. The first accusation comes first."""
    return by_themselves(list(accusations(one)))


def notes_on(one: CheckedTraining) -> list[str]:
    """Return the notes that are shown below the verdict but do not affect it, each in whole sentences."""
    return [finding.message for finding in one.findings if isinstance(finding, HeadlineNote)]


def sentence_on(one: CheckedTraining) -> str:
    """Return the reason for a training's answer, without the answer itself."""
    if wrong := mistakes(one):
        more = f"; and {len(wrong) - MOST_MISTAKES} more" if len(wrong) > MOST_MISTAKES else ""
        return "; ".join(f"{_cause(each)}{_noise(each)}" for each in wrong[:MOST_MISTAKES]) + more
    if why := _unanswered(one):
        return why
    gradients = [finding for finding in one.findings if finding.check == GRADIENTS]
    if not gradients:
        return "no gradient was judged"
    passed = next((finding for finding in gradients if finding.outcome is Outcome.PASSED), None)
    if passed is None:
        return gradients[0].message.removeprefix("not judged: ")
    if one.coverage.nothing_moved:
        return _nothing_moved(one.coverage)
    left_out = one.coverage.gradients.left_out
    if left_out and not one.coverage.gradients.entries:
        return f"no gradient was judged in full: {left_out[0].why}"
    return f"{_judged_shares(one)} judged in {extent(one)}, none wrong{_noise(passed, 'gradients: ')}{_recomputed(one)}"


def _nothing_moved(coverage: Coverage) -> str:
    if not coverage.gradients.entries and all(one.why == ZERO_GRADIENT for one in coverage.gradients.left_out):
        return "every gradient is zero in the recorded steps: check the loss, or record later steps with --after"
    return "the recorded steps should not change any weight: check whether the learning rate is 0"


def _judged_shares(one: CheckedTraining) -> str:
    gradients, updates = percent(one.coverage.gradients.part), percent(one.coverage.updates.part)
    if gradients == updates:
        return f"{gradients} of gradients and updates"
    return f"{gradients} of gradients, {updates} of updates"


def _recomputed(one: CheckedTraining) -> str:
    """Say what share of gradients was recomputed, if it is less than the share that was judged."""
    part = one.coverage.replays.part
    if part >= min(ENOUGH, one.coverage.gradients.part):
        return ""
    return f"; {percent(part)} of gradients recomputed, the others compared with the script's own backward passes"


def extent(one: CheckedTraining) -> str:
    """Return how much of a training was recorded, for example ``4 steps on 2 ranks``."""
    what = describe(one.training)
    return counted(what.steps, "step") + (f" on {what.ranks} ranks" if what.ranks > 1 else "")


def _cause(wrong: Finding) -> str:
    if is_unexplained(wrong):
        return f"{wrong.check}: no known mistake explains the difference"
    return f"{wrong.check}: {title_of(str(wrong.cause))}"


def _noise(finding: Finding, of: str = "") -> str:
    # Without a difference, there is no multiple of noise to state.
    return "" if not finding.error_x_noise else f" ({of}{compact(finding.error_x_noise)} × rounding noise)"


def _among_windows(windows: Sequence[JudgedWindow]) -> str:
    first = next((one for one in windows if one.is_wrong), None)
    if first is None:
        judged = [one.step for one in windows if one.verdict != Answer.NOT_JUDGED.value]
        last = f", the last one at step {judged[-1]}" if judged else ""
        return f"; {len(judged)} of {counted(len(windows), 'recording')} judged while it ran{last}"
    right = [one.step for one in windows if one.step < first.step and one.verdict == Answer.RIGHT.value]
    return f"; first wrong at step {first.step}" + (f", still right at step {right[-1]}" if right else "")


def _exit_code(answer: Answer, checked: CheckedCommand, *, require_full: bool) -> int:
    """Return the exit code. A mistake counts more than an interruption, and an interruption more than being right."""
    if answer is Answer.WRONG:
        return WRONG
    if checked.end.by is EndedBy.USER:
        return INTERRUPTED
    if answer is Answer.RIGHT_IN_PART and require_full:
        return TROUBLE
    return TROUBLE if answer is Answer.NOT_JUDGED else RIGHT


WITHOUT_A_LAUNCHER: Final = re.compile(r"(KeyError: '|environment variable )(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)\b")
"""What a script raises if it needs a launcher's variables and was started without one."""

START_WITH_TORCHRUN: Final = "start the script with `torchrun`, which sets `RANK` and the variables beside it"

NEXT_STEPS: Final[Mapping[str, str]] = {
    "loaded the recorder: ": (
        "use Python 3.10 or newer, and pass `PYTHONPATH` and `PLUMBLINE_CHECK` on to every process that trains"
    ),
    "no process of the command imports torch": (
        "put the command that starts the training after `--`, and pass `PYTHONPATH` and `PLUMBLINE_CHECK` on to it"
    ),
    " is too old: ": "run the script with Python 3.10 or newer and torch 2.4 or newer",
    "the command removed the folder for evidence": "set `TMPDIR` to a folder that the command does not remove",
    "there is no space left in ": "free some space, or set `TMPDIR` to another folder",
    "at the time limit of ": "give it more time with `--time-limit S`",
    "leaves none to record": "use a smaller N in `--after N`, or let the script take more steps",
    "which a dry run needs": "let the script take more steps, or use a smaller N in `--after N`",
    "but runs no backward pass": "run the script with arguments that make it train",
    "never calls its optimizer's step": (
        "let the script run until it calls `optimizer.step()`; updates that it makes itself are not judged"
    ),
    "--stop ended some ranks before others": (
        "leave out `--stop`; if the command still fails, fix the error that it raises without Plumbline"
    ),
    "the first optimizer step raised an error": "run the command without Plumbline, and fix the error that it raises",
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
    "each rank steps other parameters of the model": (
        "to train one model, average the gradients, and broadcast each parameter after the step from the rank that "
        "steps it"
    ),
    "no parameter is in every rank's optimizer": "make each rank's part of the model an `nn.Module`",
    "its forward returned a different result when it was run again": (
        "make the forward depend only on its inputs, its parameters and torch's random generators"
    ),
    "the forward registers hooks on tensors": "remove these hooks for the check",
    "not every rank of the training took": "let all ranks take the same number of optimizer steps",
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
    "every step was skipped": "record later steps with `--after N`",
    "the optimizer took no step during the recording": "record later steps with `--after N`",
    "the optimizer took no recorded step": "record more steps with `--steps N`",
    "not in the sample of --sample-parameters": "leave out `--sample-parameters` to have all parameters judged",
    "no backward pass reached the optimizer's parameters": (
        "compute gradients with `loss.backward()`, and give the optimizer the model's parameters or copies of them"
    ),
    "the gradient did not come from a recorded backward pass": (
        "compute gradients with `loss.backward()`, unless the script makes them itself, as for an outer optimizer"
    ),
    "before this change, the gradients are right": (
        "for the check, leave out what the script does to gradients: they are then judged"
    ),
    "the script also changes the weights between optimizer steps": (
        "for the check, leave out what the script changes between steps, unless it averages over ranks: the "
        "optimizer's updates are then judged"
    ),
    "the script also changes the optimizer's state between steps": (
        "for the check, leave out what the script changes between steps, unless it averages over ranks: the "
        "optimizer's updates are then judged"
    ),
}
"""Maps a part of a reason to what to do about it. Reasons that already say what to do, and reasons without a remedy,
are left out."""


def next_step(sentence: str, trainings: Sequence[CheckedTraining]) -> str:
    """Return what to do about the reason in ``sentence``, else about what was not judged; "" if nothing is known."""
    if WITHOUT_A_LAUNCHER.search(sentence):
        return START_WITH_TORCHRUN
    for why in (sentence, *_left_out(trainings)):
        for part, step in NEXT_STEPS.items():
            if part in why:
                return step
    return ""


def _left_out(trainings: Sequence[CheckedTraining]) -> Iterator[str]:
    for one in trainings:
        for share in (one.coverage.gradients, one.coverage.updates):
            yield from (group.why for group in share.left_out)
