"""The result of a checked command: verdict, reason and exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checked_commands import BROKEN, FOLLOWS, NOT_JUDGED, RIGHT, WRONG, checked, training

from plumbline.check.command.checked_command import PythonProcess
from plumbline.check.command.running import EndedBy
from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.verdict.verdict import Answer, verdict_of


def process(**facts):
    return PythonProcess(7, "3.11.7", ("python", "train.py"), **{"rank": None, "ended": True, **facts})


@pytest.mark.parametrize(
    ("trainings", "code", "by", "answer", "expected"),
    [
        ([[RIGHT]], 0, EndedBy.ITSELF, Answer.RIGHT, 0),
        ([[WRONG, FOLLOWS]], 0, EndedBy.ITSELF, Answer.WRONG, 1),
        ([[WRONG]], 3, EndedBy.ITSELF, Answer.WRONG, 1),
        ([[RIGHT]], 3, EndedBy.ITSELF, Answer.NOT_JUDGED, 2),
        ([[RIGHT]], -9, EndedBy.ITSELF, Answer.NOT_JUDGED, 2),
        ([[RIGHT]], -15, EndedBy.TIME_LIMIT, Answer.RIGHT, 0),
        ([[RIGHT]], -2, EndedBy.USER, Answer.RIGHT, 130),
        ([[WRONG]], -2, EndedBy.USER, Answer.WRONG, 1),
        ([[NOT_JUDGED]], 0, EndedBy.ITSELF, Answer.NOT_JUDGED, 2),
        ([], 0, EndedBy.ITSELF, Answer.NOT_JUDGED, 2),
        ([[RIGHT, BROKEN]], 0, EndedBy.ITSELF, Answer.RIGHT, 0),
        ([[RIGHT], [NOT_JUDGED]], 0, EndedBy.ITSELF, Answer.NOT_JUDGED, 2),
        ([[RIGHT], [NOT_JUDGED], [WRONG]], 0, EndedBy.ITSELF, Answer.WRONG, 1),
    ],
)
def test_a_mistake_counts_more_than_the_script_s_failure_and_that_more_than_being_right(
    trainings, code, by, answer, expected
):
    verdict = verdict_of(checked(*(training(*one) for one in trainings), code=code, by=by, time_limit=60))
    assert (verdict.answer, verdict.exit_code) == (answer, expected)


def test_a_question_that_could_not_be_judged_accuses_nobody():
    assert verdict_of(checked(training(RIGHT, BROKEN))).answer is Answer.RIGHT
    assert verdict_of(checked(training(BROKEN))).answer is Answer.NOT_JUDGED


def test_the_headline_has_the_share_that_was_judged():
    whole = verdict_of(checked(training(RIGHT)))
    part = verdict_of(checked(training(RIGHT, moved=(0,))))
    assert whole.sentence.startswith("100 % of gradients and updates judged in 4 steps on 2 ranks, none wrong")
    assert part.sentence.startswith("100 % of gradients, 75 % of updates judged in 4 steps on 2 ranks, none wrong")
    assert "none wrong (gradients: 1.0 × rounding noise)" in whole.sentence
    assert (whole.answer, part.answer) == (Answer.RIGHT, Answer.RIGHT_IN_PART)


def test_what_is_right_in_part_fails_only_where_all_of_it_is_required():
    command = checked(training(RIGHT, moved=(0,)))
    assert verdict_of(command).exit_code == 0
    assert verdict_of(command, require_full=True).exit_code == 2
    assert verdict_of(checked(training(RIGHT)), require_full=True).exit_code == 0


def test_a_training_in_which_nothing_was_due_to_move_is_not_judged():
    verdict = verdict_of(checked(training(RIGHT, moved=())))
    assert (verdict.answer, verdict.exit_code) == (Answer.NOT_JUDGED, 2)
    assert "check whether the learning rate is 0" in verdict.sentence


def test_gradients_without_an_answer_are_no_part_of_the_share_that_was_judged():
    assert training(NOT_JUDGED).coverage.gradients.entries == 0
    assert training(RIGHT).coverage.gradients.part == 1


def test_the_sentence_has_the_cause_and_the_noise_in_plain_words():
    sentence = verdict_of(checked(training(FOLLOWS, WRONG))).sentence
    assert sentence == "gradients: not synchronised (3.9e6 × rounding noise)"


def test_the_sentence_has_no_noise_where_nothing_differs():
    sentence = verdict_of(checked(training(replace(RIGHT, error_x_noise=0.0)))).sentence
    assert sentence.endswith(
        "; 75 % of gradients recomputed, the others compared with the script's own backward passes"
    )


def test_a_script_that_failed_is_said_first():
    failed = process(rank=1, torch="2.13.0", raised="ValueError: no more data")
    sentence = verdict_of(checked(training(RIGHT), code=1, processes=[failed])).sentence
    assert sentence.startswith("the command failed: exit code 1 (on rank 1: ValueError: no more data); before that, ")


@pytest.mark.parametrize(
    ("processes", "more", "sentence"),
    [
        ([], {}, "-I, -E or -S may keep it out"),
        ([], {"code": 3}, "failed before a Python process loaded the recorder: exit code 3"),
        ([], {"has_lost_folder": True}, "the command removed the folder for evidence while it ran"),
        ([process()], {}, "no process of the command imports torch"),
        ([process(raised="NameError: x")], {"code": 1}, "failed before it imported torch: exit code 1 (NameError: x)"),
        ([process(torch="2.3.0", obstacle="torch 2.3.0 is too old: 2.4 is needed")], {}, "torch 2.3.0 is too old"),
        ([process(torch="2.13.0")], {}, "no torch.optim.Optimizer"),
        ([process(torch="2.13.0", optimizers=1)], {}, "no backward pass"),
        ([process(torch="2.13.0", optimizers=1, passes=9)], {}, "never calls its optimizer's step"),
        (
            [process(torch="2.13.0", optimizers=1, passes=9, begun=1)],
            {},
            "the first optimizer step raised an error, and no step was completed",
        ),
        (
            [process(torch="2.13.0", optimizers=1, passes=9, begun=1, raised="RuntimeError: no memory")],
            {"code": 1},
            "failed in its first optimizer step: exit code 1 (RuntimeError: no memory)",
        ),
        (
            [process(torch="2.13.0", optimizers=1, passes=9, steps=9)],
            {"options": RecordingOptions(after=10)},
            "no optimizer took more than 10 steps, so --after 10 leaves none",
        ),
        (
            [process(torch="2.13.0", rank=0, raised="RuntimeError: no data"), process(torch="2.13.0")],
            {"code": 1},
            "failed before its first optimizer step: exit code 1 (on rank 0: RuntimeError: no data)",
        ),
        (
            [process(torch="2.13.0", rank=3, ended=False)],
            {"code": -9},
            "signal SIGKILL (on rank 3: process 7 was killed, or called os._exit)",
        ),
        ([process(torch="2.13.0")], {"by": EndedBy.TIME_LIMIT, "time_limit": 5.0}, "at the time limit of 5 s"),
        ([process(torch="2.13.0")], {"full_folder": Path("/t")}, "no space left in /t"),
    ],
)
def test_each_reason_for_recording_nothing_has_a_sentence(processes, more, sentence):
    verdict = verdict_of(checked(processes=processes, **more))
    assert verdict.answer is Answer.NOT_JUDGED
    assert sentence in verdict.sentence
    assert verdict.next_step


@pytest.mark.parametrize(
    ("one", "more", "incident"),
    [
        (training(RIGHT, steps=2), {}, "the script took only 2 of the 4 requested steps"),
        (training(RIGHT, error="MemoryError: out"), {}, "rank 0: MemoryError: out"),
        (training(RIGHT), {"out_of_memory": 1}, "out of memory"),
        (training(RIGHT), {"by": EndedBy.TIME_LIMIT, "time_limit": 9.0}, "ended at the time limit of 9 s"),
        (training(WRONG), {"code": 137}, "the command failed: exit code 137 (SIGKILL)"),
    ],
)
def test_what_went_wrong_beside_the_training_is_said(one, more, incident):
    assert any(incident in said for said in verdict_of(checked(one, **more)).incidents)


def test_ranks_with_different_numbers_of_steps_are_named():
    ranks = [training(RIGHT, steps=steps).training.ranks[rank] for rank, steps in ((0, 4), (1, 2))]
    one = training(RIGHT)
    uneven = type(one)(type(one.training)(tuple(ranks)), one.findings, one.coverage)
    verdict = verdict_of(checked(uneven))
    assert "judged in 2 steps on 2 ranks" in verdict.sentence
    (said,) = verdict.incidents
    assert said == (
        "ranks took different numbers of steps: rank 1 recorded 2, rank 0 4; only the steps that all ranks took are "
        "judged"
    )


def test_a_failure_after_some_ranks_stopped_is_perhaps_not_the_scripts():
    ranks = [training(RIGHT, steps=steps).training.ranks[rank] for rank, steps in ((0, 4), (1, 3))]
    one = training(RIGHT)
    uneven = type(one)(type(one.training)(tuple(ranks)), one.findings, one.coverage)
    verdict = verdict_of(checked(uneven, code=1, options=RecordingOptions(4, stop=True)))
    assert verdict.answer is Answer.NOT_JUDGED
    assert verdict.sentence.startswith("--stop ended some ranks before others took as many steps, and the command")
    assert verdict.next_step.startswith("leave out `--stop`")


def test_ranks_that_left_nothing_are_named():
    one = training(RIGHT)
    alone = type(one)(type(one.training)(one.training.ranks[:1]), one.findings, one.coverage)
    assert "rank 1 of 2 recorded no step" in verdict_of(checked(alone)).incidents[0]
