"""The corpus of training scripts: its tables are consistent, and its page has the results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"
FOLDER = CI / "check_scripts"


@pytest.fixture(scope="module")
def runner(program):
    return program(CI / "check_scripts.py")


@pytest.fixture
def result():
    """Return a function that makes a script's result."""

    def made(answer="right", check=None, cause=None, noise=1.25, losses="the same", mistake=""):
        module = sys.modules["result"]
        bad = (f"{check}: {cause}",) if check else ()
        verdict = sys.modules["verdict"].Verdict(answer, "", check, cause, noise, bad, 0.5)
        return module.Result("plain-loop", mistake, 2.0, 3.0, losses, verdict)

    return made


def test_scripts_of_our_own_declare_the_libraries_that_they_import(runner):
    """Otherwise, an interpreter without them may start them."""
    for script in runner.SCRIPTS.values():
        if script.source == "rewritten":
            name = next(word for word in shlex.split(script.command) if word.endswith(".py"))
            text = (FOLDER / "scripts" / name).read_text()
            imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
            assert imported - sys.stdlib_module_names - {"torch"} <= set(script.needs), name


def test_every_script_of_our_own_is_in_the_table_once_in_each_environment(runner):
    ours = [one for one in runner.SCRIPTS.values() if one.source == "rewritten" and not one.changes]
    named = [(word, str(one.environment)) for one in ours for word in shlex.split(one.command) if word.endswith(".py")]
    assert len(named) == len(set(named))
    assert {word for word, _ in named} == {file.name for file in (FOLDER / "scripts").glob("*.py")}


def test_every_change_of_a_script_of_our_own_fits_it_and_leaves_it_python(runner):
    changed = [one for one in runner.HALF_JUDGED_SCRIPTS if one.changes]
    assert changed
    for script in changed:
        for file, pattern, text in script.changes:
            before = (FOLDER / "scripts" / file).read_text()
            after = runner.changed(before, ((pattern, text),))
            assert after != before
            compile(after, script.name, "exec")


def test_no_wrong_training_may_be_called_right_and_each_says_why_it_is_wrong(runner):
    for script in runner.SCRIPTS.values():
        if script.is_wrong:
            assert "right" not in script.accepted
            assert script.because, script.name
        else:
            assert "wrong" not in script.accepted


def test_each_script_of_our_own_says_how_it_is_started(runner):
    for script in runner.SCRIPTS.values():
        if script.source == "rewritten":
            file = next(word for word in shlex.split(script.command) if word.endswith(".py"))
            assert file in (FOLDER / "scripts" / file).read_text().split('"""')[1], script.name


def test_every_name_is_taken_once_and_every_repository_has_a_commit(runner):
    scripts = (*runner.PUBLISHED, *runner.REWRITTEN_SCRIPTS, *runner.HALF_JUDGED_SCRIPTS)
    assert len({one.name for one in scripts}) == len(scripts)
    commits = sys.modules["published"].COMMITS
    bases = {one.source for one in importlib.import_module("mesh_bases").BASES} - {"rewritten"}
    assert {one.source for one in runner.PUBLISHED} | bases == set(commits)
    assert all(len(commit) == 40 for commit in commits.values())


def test_at_least_twenty_scripts_are_published_and_unmodified(runner):
    assert sum(one.is_unmodified for one in runner.SCRIPTS.values()) >= 20


def test_every_mistake_fits_our_own_scripts_and_leaves_them_python(runner):
    for mistake in runner.MISTAKES:
        for name, changes in mistake.changes.items():
            if runner.SCRIPTS[name].source == "rewritten":
                before = (FOLDER / "scripts" / runner.FILES[name]).read_text()
                after = runner.changed(before, changes)
                assert after != before
                compile(after, name, "exec")


def test_a_change_of_what_is_not_there_is_refused(runner):
    with pytest.raises(ValueError, match="nothing matches 'b'"):
        runner.changed("a", (("b", "c"),))


def test_twelve_mistakes_are_put_into_three_scripts(runner):
    assert sum(len(one.changes) >= 3 for one in runner.MISTAKES if one.causes) >= 12


def test_results_keep_the_order_of_the_tables_however_many_run_at_a_time(runner, monkeypatch):
    monkeypatch.setattr(runner, "outcome", lambda script, mistake, *_: (script.name, mistake and mistake.name))
    scripts = list(runner.SCRIPTS.values())
    mistakes = [(one, runner.SCRIPTS[name]) for one in runner.MISTAKES for name in one.changes]
    plain, wrong = runner.results(scripts, mistakes, argparse.Namespace(jobs=3), {})
    assert plain == [(one, (one.name, None)) for one in scripts]
    assert wrong == [(mistake, one, (one.name, mistake.name)) for mistake, one in mistakes]


def test_a_right_script_that_is_accused_is_not_as_it_should_be(runner, result):
    script = runner.SCRIPTS["plain-loop"]
    assert runner.is_right(result(), script, None)
    assert not runner.is_right(result("wrong", "gradients", "not-synchronised", 4e6), script, None)
    assert not runner.is_right(result("not judged"), script, None)


def test_praise_of_more_than_was_judged_is_false_praise(runner, result):
    scripts, module = runner.SCRIPTS, sys.modules["result"]
    zero, parts, plain = scripts["zero-gradients"], scripts["muon, updates summed"], scripts["plain-loop"]
    assert module.is_false_praise(result("right"), zero, None)
    assert module.is_false_praise(result("right in part"), zero, None)
    assert not module.is_false_praise(result("not judged"), zero, None)
    assert module.is_false_praise(result("right"), parts, None)
    assert not module.is_false_praise(result("right in part"), parts, None)
    assert not module.is_false_praise(result("right"), plain, None)
    assert not module.is_false_praise(result("not judged"), plain, None), "too little praise is no false praise"


def test_a_check_that_an_exception_of_ours_ended_is_not_as_it_should_be(runner, tmp_path):
    broken = {
        "check": "gradients", "outcome": "errored", "cause": None, "error_x_noise": None,
        "message": "the check raised an error, so it has no verdict: RuntimeError: split_with_sizes",
    }  # fmt: skip
    training = {"verdict": "not judged", "findings": [broken], "coverage": {"replayed": 0.0}}
    file = tmp_path / "verdict.json"
    file.write_text(json.dumps({"verdict": "not judged", "sentence": "", "trainings": [training]}))
    verdict = sys.modules["verdict"].read_verdict(file)
    result = sys.modules["result"].Result("pipeline-stages", verdict=verdict)
    assert verdict.broken == ("gradients",)
    assert not runner.is_right(result, runner.SCRIPTS["pipeline-stages"], None)


def test_a_mistake_that_is_praised_is_false_praise_unless_it_may_be_meant(runner, result):
    module, script = sys.modules["result"], runner.SCRIPTS["ddp"]
    real = next(one for one in runner.MISTAKES if one.causes)
    meant = next(one for one in runner.MISTAKES if not one.causes)
    assert module.is_false_praise(result("right"), script, real)
    assert not module.is_false_praise(result("right"), script, meant)
    assert module.is_false_accusation(result("wrong", "gradients", "zero"), script, meant)
    assert not module.is_false_accusation(result("wrong", "gradients", "zero"), script, real)


def test_losses_that_a_check_changes_are_not_as_they_should_be(runner, result):
    ran = sys.modules["running"].Ran
    plain, other = ran(0, 1.0, {"0": ("1.0",)}, ""), ran(0, 1.0, {"0": ("1.0000001",)}, "")
    assert runner.losses_of(plain, plain, None) == "the same"
    assert runner.losses_of(plain, other, other) == "differ without it too"
    changed = runner.losses_of(plain, other, plain)
    assert not runner.is_right(result(losses=changed), runner.SCRIPTS["plain-loop"], None)
    assert runner.first_difference(plain, other) == "rank 0, loss 0: 1.0 without check, 1.0000001 under it"
    assert not runner.first_difference(plain, plain)


def test_a_mistake_is_found_only_under_its_name(runner, result):
    mistake = next(one for one in runner.MISTAKES if one.causes == ("summed-over-ranks",))
    script = runner.SCRIPTS["ddp"]
    assert runner.is_right(result("wrong", "gradients", "summed-over-ranks"), script, mistake)
    assert not runner.is_right(result("wrong", "gradients", "averaged-twice"), script, mistake)
    assert not runner.is_right(result("right"), script, mistake)


def test_results_are_read_as_they_were_written(runner, result, tmp_path):
    one, two = result(), result("wrong", "gradients", "zero", mistake="zeroed")
    for each in (one, two):
        runner.write(tmp_path / "kept", each)
    assert runner.read(tmp_path / "kept") == {"plain-loop": one, "zeroed in plain-loop": two}
    assert runner.read(tmp_path / "none") == {}


def test_the_verdict_is_read_from_what_check_writes(runner, tmp_path):
    file = tmp_path / "verdict.json"
    right = {"check": "gradients", "outcome": "passed", "cause": None, "error_x_noise": 0.5}
    wrong = {"check": "update", "outcome": "failed", "cause": None, "error_x_noise": 9e6}
    trainings = [
        {"verdict": "right", "findings": [right], "coverage": {"replayed": 1.0}},
        {"verdict": "wrong", "findings": [right, wrong], "coverage": {"replayed": 0.25}},
    ]
    file.write_text(json.dumps({"verdict": "wrong", "sentence": "why", "trainings": trainings}))
    read = sys.modules["verdict"].read_verdict(file)
    assert (read.answer, read.check, read.cause, read.noise) == ("wrong", "update", "unexplained", 9e6)
    assert read.coverage == 0.25


def test_the_page_counts_and_names(runner, result):
    script = runner.SCRIPTS["plain-loop"]
    left = sys.modules["result"].Result("srun-ddp", why_not="needs a cluster")
    text = runner.page([(script, result()), (runner.SCRIPTS["srun-ddp"], left)], [])
    assert "1 script, 0 of them published" in text
    assert "| plain-loop | rewritten | 1 |" in text
    assert "| right | 1.25 | 50.0 % | the same | 1.5 | yes |" in text
    assert "- srun-ddp: needs a cluster" in text


def test_the_page_counts_false_praise_beside_false_accusations(runner, result):
    rows = [
        ("plain-loop", result()),
        ("ddp", result("wrong", "gradients", "zero")),
        ("rate-zero", result("right")),
        ("optimizer-of-a-copy", result("wrong", "update", "nothing-moved")),
        ("muon, updates summed", result("right in part")),
    ]
    text = runner.page([(runner.SCRIPTS[name], one) for name, one in rows], [])
    assert "False praise: 1 of 5 verdicts (" in text
    assert "False accusations: 1 of 5 verdicts (" in text
    assert "3 scripts, 2 of them wrong. As expected: 2. Verdicts on the wrong ones: 1 wrong, 1 right in part." in text


def test_workers_with_sessions_of_their_own_are_ended_with_their_run(runner, tmp_path):
    words = [sys.executable, "-c", "input()"]
    ours, other = (
        subprocess.Popen(
            words, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "CHECK_SCRIPTS_LOSSES": folder}
        )
        for folder in (str(tmp_path), f"{tmp_path}-other")
    )
    sys.modules["running"].end_all(str(tmp_path))
    assert ours.wait(60) == -signal.SIGKILL
    other.communicate(b"\n", 60)
    assert other.returncode == 0
