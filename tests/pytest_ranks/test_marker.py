"""``@pytest.mark.ranks``: the body runs on each rank, has an ordinary outcome, and shows what failed on which rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PASSES = [
    "test_world", "test_asynchronous_collectives", "test_warning", "test_raises", "test_method", "test_closest_marker",
    "test_same_folder", "test_once_only", "test_captured", "test_captured_descriptors", "test_groups_come_and_go",
    "test_own_group", "test_leaves_processes", "test_multiplies_in_threads", "test_multiplies_after_that",
    "test_sizes[1]", "test_sizes[2]", "test_sizes[5]", *(f"test_ddp_outlives_its_group[{n}]" for n in range(4)),
]  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_what_is_right_passes(name, bodies):
    assert bodies[name].outcome == "passed", bodies[name].text


def test_parameters_of_any_kind_reach_the_body(bodies):
    outcomes = [result.outcome for name, result in bodies.results.items() if name.startswith("test_parameters[")]
    assert outcomes == ["passed"] * 6


def test_a_failed_assertion_shows_its_values_and_the_rank(bodies):
    result = bodies["test_assert"]
    assert "rank 1 of 2 failed" in result.text
    assert "assert 6 == 5" in result.text
    assert "said on rank 1" in result.text
    assert "rank 0 passed" in result.text
    assert result.message.startswith("rank 1 of 2: AssertionError: said on rank 1")


def test_ranks_that_fail_alike_are_shown_once(bodies):
    text = bodies["test_same_place"].text
    assert text.count('raise ValueError("everywhere")') == 1
    assert "ranks 0–3 of 4 failed" in text


def test_ranks_that_fail_otherwise_are_shown_apart(bodies):
    text = bodies["test_two_places"].text
    assert "ranks 0, 1, 3 of 4 failed" in text
    assert "rank 2 of 4 failed" in text
    assert "KeyError: 'elsewhere'" in text


def test_ranks_that_wait_for_one_that_raised_are_ended_and_say_so(bodies):
    result = bodies["test_one_raises_others_wait"]
    assert "rank 1 of 3 failed" in result.text
    assert "ranks 0, 2 stopped after that failure, waiting in all_reduce" in result.text
    assert result.message.startswith("rank 1 of 3: ValueError: the cause")


def test_a_hang_shows_where_every_rank_was(bodies):
    text = bodies["test_hang"].text
    assert "ranks 0, 2 of 3 had not ended after 4 s, waiting in barrier" in text
    assert "rank 1 of 3 had not ended after 4 s" in text
    stacks = re.findall(r"test_bodies\.py:\d+ in test_hang", text)
    assert len(set(stacks)) >= 2
    assert "harness/plumbline" not in text
    assert bodies["test_hang"].message.startswith("rank 1 of 3 had not ended")


def test_a_rank_that_dies_is_named_and_not_those_that_lose_it(bodies):
    assert "rank 1 of 3 died by signal 9 (SIGKILL)" in bodies["test_killed"].message
    assert "lost the connection to the rank that died" in bodies["test_killed"].text
    assert "rank 1 of 2 exited with code 7" in bodies["test_exit_code"].message


def test_what_each_rank_printed_and_logged_is_shown(bodies):
    section = bodies.stdout.split("___ test_output ___")[1].split("\n____")[0]
    for rank in (0, 1):
        assert f"Captured stdout of rank {rank} call" in section
        for text in (f"printed by {rank}", f"complained by {rank}", f"child of {rank}", f"logged by {rank}"):
            assert section.count(text) == 1


def test_a_warning_of_all_ranks_is_shown_once(bodies):
    assert bodies.stdout.split("warnings summary")[1].count("UserWarning: once only") == 1


def test_one_rank_is_enough_to_skip(bodies):
    assert bodies["test_skip_on_one_rank"].outcome == "skipped"
    assert "not on this one" in bodies["test_skip_on_one_rank"].message
    assert re.search(r"SKIPPED \[1\] test_bodies\.py:\d+: rank 1: not on this one", bodies.stdout)
    assert bodies["test_importorskip"].outcome == "skipped"


def test_a_subtest_that_fails_fails_the_test(bodies):
    assert bodies["test_subtests_fail"].outcome == "failure"
    assert "in the subtest times two number=2" in bodies["test_subtests_fail"].text
    assert bodies["test_subtests_skip"].outcome == "passed"


def test_expected_failures_are_as_anywhere(bodies):
    for name in ("test_xfail_inside", "test_xfail_mark_with_type"):
        assert f"XFAIL test_bodies.py::{name}" in bodies.stdout
    assert bodies["test_xfail_mark_with_another_type"].outcome == "failure"
    assert "XPASS(strict)" in bodies["test_xpass"].message + bodies["test_xpass"].text


def test_an_exception_need_not_be_one_that_can_be_pickled(bodies):
    assert "its message" in bodies["test_cannot_be_pickled"].text
    assert bodies["test_fail_without_traceback"].text.count("in words") == 1


def test_fixtures_that_use_the_rank_live_on_each_rank(bodies):
    section = bodies.stdout.split("___ test_fixture_of_a_rank ___")[1].split("\n____")[0]
    assert "teardown of rank 0" in section
    assert "teardown of rank 1" in section


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_without_marker", "@pytest.mark.ranks(4)"),
        ("test_wrong_number", "@pytest.mark.ranks('two'): the number of ranks must be at least 1"),
        ("test_wrong_name", "@pytest.mark.ranks has no argument 'time': write"),
        ("test_it", "not for unittest.TestCase"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(name, words, bodies):
    assert bodies[name].outcome == "error"
    assert words in bodies[name].text


def test_nothing_is_left_behind(bodies):
    commands = [_command(place) for place in Path("/proc").glob("[0-9]*")]
    assert not [one for one in commands if "# of a body" in one]


def _command(place: Path) -> str:
    try:
        return (place / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
