"""A command that cannot be checked is refused before it starts, with a way out."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from plumbline.check.command.running import command_in
from plumbline.cli.check import _form
from plumbline.cli.main import main
from plumbline.core.errors import PlanError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "not_executable").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ([], "write `--` and then the command"),
        (["python", "train.py"], "plumbline check -- python train.py"),
        (["--"], "no command after `--`"),
        (["--", ""], "the first word after `--` is empty"),
        (["--", "no-such-command"], "install it"),
        (["--", "./no/such/command"], "check the path"),
        (["--", "train.py"], "write python train.py"),
        (["--", "./not_executable"], "chmod \\+x"),
        (["--", "/"], "is a folder"),
        (["--", sys.executable, "nothing.py"], "there is no file nothing.py"),
        (["--", sys.executable, "-I", "train.py"], "leave out -I"),
        (["--", sys.executable, "-uE", "-m", "train"], "leave out -E"),
        (["--", sys.executable, "-W", "ignore", "-S", "train.py"], "leave out -S"),
    ],
)
def test_it_says_the_way_out(words, way_out):
    with pytest.raises(PlanError, match=way_out):
        command_in(words)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "-I", "-S"],
        ["-u", "train.py"],
        ["-X", "importtime", "-W", "error", "train.py"],
        ["-WEIS", "train.py"],
        ["-m", "torch.distributed.run", "-E"],
        ["-c", "nothing", "-I"],
        ["-"],
    ],
)
def test_what_can_be_checked_is_let_through(words):
    assert command_in(["--", sys.executable, *words]) == [sys.executable, *words]


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number, 1 or more, not "),
        (["--steps", "-3"], "argument --steps: must be a whole number, 1 or more, not "),
        (["--steps", "many"], "must be a whole number, 1 or more, not many"),
        (["--after", "-1"], "must be a whole number, 0 or more, not -1"),
        (["--time-limit", "0"], "must be a number above 0"),
        (["--time-limit", "long"], "must be a number above 0, not long"),
        (["--sample-parameters", "some"], "must be a fraction between 0 and 1, or a whole number, not some"),
        (["--stpes", "3"], "unrecognized arguments: --stpes; did you mean --steps?"),
        (["--jsn=x"], "unrecognized arguments: --jsn=x; did you mean --json?"),
        (["--dry-run", "--require-full"], "cannot be combined with --require-full"),
        (["--html="], "argument --html: is empty: give a path"),
        (["--report-dir="], "argument --report-dir: is empty: give a path"),
        (["--time-limit", "nan"], "must be a number above 0"),
        (["--json", "no/folder/file.json"], "create it first"),
        (["--html", "/"], "--html: / is a folder: name a file"),
        (["--html", "train.py/x.html"], "--html: train.py is a file, not a folder: name a folder"),
        (["--report-dir", "train.py"], "--report-dir: train.py is a file, not a folder: name a folder"),
        (["--json", "/proc/x.json"], "--json: cannot create x.json in /proc: "),
    ],
)
def test_an_option_that_cannot_be_meant_is_a_usage_error(options, way_out, capsys):
    try:
        code = main(["check", *options, "--", sys.executable, "train.py"])
    except SystemExit as ended:
        code = ended.code
    assert code == 4
    assert way_out in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_screen_is_coloured_on_a_terminal_unless_the_user_objects(monkeypatch, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    assert _form()["colour"] is coloured


@pytest.mark.parametrize("module", ["torch", "importlib.metadata"])
def test_the_command_begins_before_what_takes_long_is_imported(module):
    code = (
        "import sys; from plumbline.cli.main import main; "
        "assert main(['check', '--html', '/nowhere/page.html', '--', 'python']) == 4; "
        f"sys.exit('{module}' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
