"""``plumbline new-subject``: the written file runs at once, and nothing is overwritten."""

from __future__ import annotations

import pytest

from plumbline.cli.main import main
from plumbline.subjects.load import load


def test_what_it_writes_is_right(tmp_path, one_thread, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_trainer.py"
    assert main(["new-subject", str(file)]) == 0
    assert f"plumbline smoke {file}\n" in capsys.readouterr().out
    assert main(["smoke", "--accelerator=cpu", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("my-trainer: mlp, ddp on 1x2 simulated devices, precision 32")
    assert said.endswith(f"plumbline run --subject {file}\n")


def test_a_file_that_is_there_stays_as_it_is(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("mine")
    assert main(["new-subject", str(file)]) == 2
    assert file.read_text() == "mine"
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"), [("nowhere/mine.py", "does not exist"), ("mine", "use the name mine.py"), ("m.txt", "m.py")]
)
def test_it_says_what_cannot_be_written(path, said, tmp_path, capsys):
    assert main(["new-subject", str(tmp_path / path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "name"), [("our new_trainer.py", "our-new-trainer"), ("_.py", "my-trainer"), ("ünser2.py", "nser2")]
)
def test_it_is_called_like_its_file_as_far_as_a_name_may_be(file, name, tmp_path):
    assert main(["new-subject", str(tmp_path / file)]) == 0
    (declared,) = load(str(tmp_path / file))
    assert declared.name == name
