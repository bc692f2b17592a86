"""``plumbline completion``: the printed script completes commands, options, their values and files."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from plumbline.cli.main import COMMANDS, main

TRY = """
source ./plumbline.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_plumbline
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def completed(tmp_path, capsys):
    pytest.importorskip("shtab", reason="install the extra 'completion'")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "plumbline.bash").write_text(capsys.readouterr().out)
    (tmp_path / "train.py").write_text("")

    def completed(words):
        line = ["bash", "-c", TRY, "bash", *words.split(" ")]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    return completed


def test_bash_completes_commands_options_values_and_files(completed):
    assert set(completed("plumbline ")) >= {*COMMANDS}
    assert completed("plumbline check --ste") == ["--steps"]
    assert completed("plumbline check --truth ") == ["float64", "float32"]
    assert completed("plumbline run --acc") == ["--accelerator"]
    assert completed("plumbline check -- torchrun tr") == ["train.py"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_command(shell, capsys):
    pytest.importorskip("shtab", reason="install the extra 'completion'")
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in printed] == []
    assert "sample-parameters" in printed


def test_without_shtab_it_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 4
    assert capsys.readouterr().err == "plumbline: completion needs shtab: pip install shtab\n"
