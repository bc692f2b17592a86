"""``[tool.plumbline]`` in the current folder's pyproject.toml: what it sets, precedence, and error messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from plumbline.cli import suites
from plumbline.cli.compare import conditions
from plumbline.cli.main import _options, main

TRUE = [sys.executable, "-c", "pass"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "pyproject.toml").write_text(text)


def test_the_file_gives_what_the_command_line_does_not(write):
    write(
        '[tool.plumbline.check]\nsteps = 8\nsample-parameters = 0.5\nstop = true\np = ["json"]\n'
        'html = "a.html"\ncommand = "python \'a b.py\'"\n'
        '[tool.plumbline.compare]\nminimum-effect = 20\nfail-on = "outcome"\n'
    )
    options = _options(["check"])
    assert (options.steps, options.sample_parameters, options.stop, options.modules) == (8, 0.5, True, ["json"])
    assert (str(options.html), options.command) == ("a.html", ["--", "python", "a b.py"])
    assert options.after == 0, "what the file does not set has its default"
    compared = _options(["compare", "A", "B"])
    assert (compared.minimum_effect, compared.fail_on) == (0.2, conditions("outcome"))


def test_the_command_line_wins(write):
    write('[tool.plumbline.check]\nsteps = 8\nafter = 3\np = ["json"]\ncommand = "python a.py"\n')
    options = _options(["check", "--after", "0", "-p", "csv", "--", *TRUE])
    assert (options.after, options.modules, options.command) == (0, ["csv"], ["--", *TRUE])
    assert options.settings == {"steps": 8}, "only what was used is reported"
    ignoring = _options(["check", "--no-settings", "--", *TRUE])
    assert (ignoring.steps, ignoring.settings) == (4, {})


def test_a_flag_of_the_file_may_be_false(write):
    write("[tool.plumbline.check]\nstop = false\n")
    assert _options(["check", "--", *TRUE]).stop is False


def test_a_run_of_the_suites_takes_what_its_words_do_not_give(write):
    write('[tool.plumbline.run]\ngpus = 2\nsubject = ["a.py", "b.py"]\nprofile = true\nkeep-traces = false\n')
    used = suites._settings(["--gpus=4", "-k", "mlp"])
    assert suites.words_of(used) == ["--subject=a.py", "--subject=b.py", "--profile"]


def test_without_a_table_nothing_is_set(write):
    write("[tool.ruff]\nline-length = 100\n")
    assert _options(["check", "--", *TRUE]).settings == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.plumbline.check]\nstep = 1", "[tool.plumbline.check] has no setting 'step'; did you mean steps?"),
        ("[tool.plumbline.check]\nhelp = true", "has no setting 'help'"),
        ('[tool.plumbline.check]\nsteps = "8"', 'steps must be a whole number, not "8"'),
        ("[tool.plumbline.check]\nsteps = true", "steps must be a whole number, not true"),
        ("[tool.plumbline.check]\nsteps = 0", "steps = 0: must be a whole number, 1 or more, not 0"),
        ("[tool.plumbline.check]\nstop = 1", "stop must be true or false, not 1"),
        ("[tool.plumbline.check]\nhtml = 1", "html must be a string, not 1"),
        ('[tool.plumbline.check]\np = "json"', 'p must be a list of strings, not "json"'),
        ("[tool.plumbline.check]\np = [1]", "p must be a list of strings, not [1]"),
        ('[tool.plumbline.check]\ntruth = "exact"', 'truth must be one of float64, float32, not "exact"'),
        ("[tool.plumbline.check]\ntime-limit = -1.5", "time-limit = -1.5: must be a number above 0"),
        ('[tool.plumbline.check]\ncommand = "\'"', 'command = "\'": No closing quotation'),
        ("[tool.plumbline.chekc]\nsteps = 1", "[tool.plumbline] has 'chekc'"),
        ("[tool.plumbline]\nsteps = 1", "has 'steps', which is not a table of settings: put settings in [tool."),
        ("[tool.plumbline]\ncheck = 1", "[tool.plumbline] has 'check', which is not a table of settings"),
        ("[tool]\nplumbline = 3", "[tool.plumbline] is not a table"),
        ("[tool.plumbline.check", "pyproject.toml cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_file(write, capsys, text, said):
    write(text)
    assert main(["check", "--", *TRUE]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plumbline: pyproject.toml")
    assert said in line


def test_options_that_exclude_a_setting_are_told_where_that_comes_from(write, capsys):
    write("[tool.plumbline.check]\nafter = 3\n")
    assert main(["check", "--resplit", "--", *TRUE]) == 4
    assert "settings of pyproject.toml: after = 3; --no-settings ignores them" in capsys.readouterr().err


def test_a_table_of_another_command_is_not_read_for_this_one(write):
    write("[tool.plumbline.run]\nnonsense = 1\n")
    assert _options(["check", "--", *TRUE]).settings == {}


def test_the_example_of_the_documentation_is_taken(write):
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    write(example)
    assert _options(["check"]).settings["steps"] == 8
    assert _options(["compare", "A", "B"]).minimum_effect == 0.1
    assert suites._settings([])["gpus"] == 2
