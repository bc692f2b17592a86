"""Other people's scripts under test: adapters and proofs are short; a smoke test of the injected mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome

CI = Path(__file__).parents[2] / "ci"
FOLDER = CI / "scripts_by_others"


@pytest.fixture(scope="module")
def runner(program):
    return program(CI / "scripts_by_others.py")


def test_adapters_and_proofs_are_short(runner):
    for subject in runner.SCRIPTS:
        assert runner.lines_of_code(runner.adapter(subject)) < 30, subject
    for proof in runner.PROOFS.values():
        text = proof.file.read_text()
        assert len(text.splitlines()) <= 30, proof.file
        assert "plumbline" not in text, proof.file


def test_each_script_names_where_it_comes_from(runner):
    for script in runner.SCRIPTS.values():
        assert "Written anew after " in (FOLDER / f"{script}.py").read_text()


def test_every_mistake_of_the_issue_is_there(runner):
    assert {one.name for one in runner.MISTAKES} >= {
        "no-set-epoch", "inner-module", "no-distributed-sampler", "no-zero-grad", "loss-not-divided",
        "clipped-before-unscaled", "not-set-up", "own-weights", "no-accumulate", "synchronised-first",
    }  # fmt: skip
    assert len({one.id for one in runner.MISTAKES}) == len(runner.MISTAKES)


def test_a_change_of_what_is_not_there_is_refused(program):
    changes = program(FOLDER / "changes.py")
    with pytest.raises(ValueError, match="the script has no 'b'"):
        changes.changed("a", (("b", "c"),))


def bad(check, cause, consequence_of=None):
    return Finding(check, Outcome.FAILED, "", cause=cause, consequence_of=consequence_of)


def test_a_mistake_counts_as_named_if_nothing_else_is_accused(runner):
    mistake = next(one for one in runner.MISTAKES if one.name == "not-set-up")
    named, other = bad("gradients", "not-synchronised"), bad("update", "other")
    after = bad("training", None, consequence_of="gradients")

    def is_right(*findings):
        return runner.Tried(mistake, mistake.cells[0], findings).is_right

    assert is_right(named, after)
    assert not is_right(named, other, after)
    assert not is_right(other, named)
    assert not is_right()


@pytest.mark.parametrize("name", ["pytorch-tutorial-no-set-epoch", "nanogpt-clipped-before-unscaled"])
def test_a_mistake_is_named(name, runner, warm_pool, one_thread):
    mistake = next(one for one in runner.MISTAKES if one.id == name)
    tried = runner.tried_on(warm_pool(FOLDER / "changed.py"), mistake, mistake.cells[0], 300)
    assert tried.is_right, tried.bad


@pytest.mark.parametrize("subject", ["pytorch-tutorial", "nanogpt"])
def test_repaired_they_are_right(subject, runner, warm_pool, cell_of, tmp_path, one_thread):
    cell = cell_of("mlp", "ddp", "1x2", subject=f"{subject}-repaired")
    findings = runner.examine(warm_pool(FOLDER / "changed.py"), cell, tmp_path, runner.Settings(300)).findings
    assert not [one for one in findings if one.outcome.is_bad]
