"""The corpus of training scripts: its tables fit together, and its page says what was found."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"
FOLDER = CI / "check_scripts"
OURS = ("check_scripts", *(file.stem for file in FOLDER.glob("*.py")))


@pytest.fixture(scope="module")
def runner():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("check_scripts", CI / "check_scripts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_scripts"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def checked(runner):
    """Return a function that makes what became of one right script under check."""
    page, running, verdict = (sys.modules[name] for name in ("page", "running", "verdict"))

    def made(losses=("1.0",), findings=(), code=0, coverage=1.0):
        plain = running.Ran(0, 2.0, {"0": ("1.0",)}, "")
        again = plain if losses != ("1.0",) else None
        recorded = running.Ran(code, 3.0, {"0": tuple(losses)}, "")
        found = verdict.Verdict(tuple(findings), coverage)
        return page.Checked(runner.SCRIPTS["plain-loop"], plain, again, recorded, found)

    return made


def finding(outcome, cause=None, noise=None):
    return {"check": "gradients", "outcome": outcome, "cause": cause, "error_x_noise": noise}


def test_every_script_of_our_own_is_in_the_table_once(runner):
    ours = [one for one in runner.SCRIPTS.values() if one.source == "rewritten"]
    named = [word for one in ours for word in shlex.split(one.command) if word.endswith(".py")]
    assert sorted(named) == sorted(file.name for file in (FOLDER / "scripts").glob("*.py"))


def test_each_script_of_our_own_says_how_it_is_started(runner):
    for script in runner.SCRIPTS.values():
        if script.source == "rewritten":
            file = next(word for word in shlex.split(script.command) if word.endswith(".py"))
            assert file in (FOLDER / "scripts" / file).read_text().split('"""')[1], script.name


def test_every_name_is_taken_once_and_every_repository_has_a_commit(runner):
    scripts = (*runner.PUBLISHED, *runner.REWRITTEN_SCRIPTS)
    assert len({one.name for one in scripts}) == len(scripts)
    commits = sys.modules["published"].COMMITS
    assert {one.source for one in runner.PUBLISHED} == set(commits)
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
    assert sum(len(one.changes) >= 3 for one in runner.MISTAKES) >= 12


def test_a_right_script_that_is_accused_is_not_as_it_should_be(checked):
    assert checked(findings=[finding("passed", noise=1.1)]).is_as_it_should_be
    accused = checked(findings=[finding("failed", "not-synchronised", 4e6)], code=1)
    assert not accused.is_as_it_should_be
    assert "not-synchronised **(not proven)**" in accused.verdict_text


def test_losses_that_a_check_changes_are_not_as_they_should_be(checked):
    changed = checked(losses=("1.0000001",), findings=[finding("passed")])
    assert changed.losses == "**DIFFER**"
    assert not changed.is_as_it_should_be


def test_a_check_without_a_finding_is_no_verdict(checked):
    assert not checked(findings=[]).is_as_it_should_be


def test_the_page_counts_and_names(runner, checked):
    page = sys.modules["page"]
    one = checked(findings=[finding("passed", noise=1.25)], coverage=0.5)
    text = page.page([one, page.Checked(one.script, why_not="needs a cluster")], [])
    assert "1 scripts, 0 of them published" in text
    assert "| plain-loop | rewritten | 1 |" in text
    assert "| right | 1.25 | 50.0 % | the same | 1.5 |" in text
    assert "- plain-loop: needs a cluster" in text
