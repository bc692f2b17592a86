"""If a subject cannot be imported, the message shows the user's lines, from wherever it was loaded."""

from __future__ import annotations

import re
import sys
from contextlib import closing

import pytest

from plumbline.cli.main import main
from plumbline.core.errors import SubjectError
from plumbline.launch.pool import Pool
from plumbline.subjects.load import load

HELPER = """
def read():
    try:
        {}['a']
    except KeyError as error:
        raise ValueError('no data') from error
"""

BROKEN = {
    "import": ("import torch\nimport no_such_library\n", 2, "import no_such_library", "ModuleNotFoundError"),
    "syntax": ("import torch\n\ndef train(job)\n    pass\n", 3, "def train(job)", "SyntaxError"),
    "declaration": (
        "from plumbline import subject\n\n@subject(name='x', backends=['dpp'])\ndef train(job): pass\n",
        3,
        "@subject(name='x', backends=['dpp'])",
        "unknown backend 'dpp'",
    ),
    "argument": (
        "from plumbline import subject\n\n@subject(name='x', backend=['ddp'])\ndef train(job): pass\n",
        3,
        "@subject(name='x', backend=['ddp'])",
        "TypeError: subject() got an unexpected keyword argument",
    ),
    "exit": ("import sys\nsys.exit('no GPU')\n", 2, "sys.exit('no GPU')", "SystemExit: no GPU"),
    "library": ("import json\njson.loads('{')\n", 2, "json.loads('{')", "JSONDecodeError"),
}


def lines_of(said):
    """Return the file, line and source of each frame in a traceback."""
    return re.findall(r'^ *File "(.*)", line (\d+).*\n +(.*)$', said, re.MULTILINE)


@pytest.fixture(params=BROKEN)
def broken(request, tmp_path):
    source, *where = BROKEN[request.param]
    file = tmp_path / f"broken_{request.param}.py"
    file.write_text(source)
    return file, *where


def test_a_file_comes_with_the_user_s_line_and_no_frame_of_ours(broken):
    file, number, source, error = broken
    with pytest.raises(SubjectError) as raised:
        load(str(file))
    said = str(raised.value)
    assert error in said.partition("\n")[0]
    assert lines_of(said)[0] == (str(file), str(number), source)
    assert "importlib" not in said
    assert "plumbline/" not in said


def test_a_module_comes_with_the_user_s_line_too(broken, monkeypatch):
    file, number, source, _ = broken
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    with pytest.raises(SubjectError) as raised:
        load(file.stem)
    assert lines_of(str(raised.value))[0] == (str(file), str(number), source)
    assert "importlib" not in str(raised.value)


def test_an_error_in_an_imported_module_keeps_its_chain(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text(HELPER)
    file = tmp_path / "mine.py"
    file.write_text("import helper_of_mine\nDATA = helper_of_mine.read()\n")
    with pytest.raises(SubjectError) as raised:
        load(str(file))
    said = str(raised.value)
    assert "direct cause of the following exception" in said
    assert [(name.rpartition("/")[2], number) for name, number, _ in lines_of(said)] == [
        ("helper_of_mine.py", "4"), ("mine.py", "2"), ("helper_of_mine.py", "6"),
    ]  # fmt: skip


def test_calls_inside_of_libraries_are_cut_to_the_last_ones(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import subprocess\nsubprocess.run(['/no/such/program'])\n")
    with pytest.raises(SubjectError) as raised:
        load(str(file))
    frames = lines_of(str(raised.value))
    assert frames[0] == (str(file), "2", "subprocess.run(['/no/such/program'])")
    assert len(frames) == 3
    assert "No such file or directory: '/no/such/program'" in str(raised.value)


def test_a_very_long_message_does_not_hide_where_it_was_raised(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise ValueError('x' * 1_000_000)\n")
    with pytest.raises(SubjectError) as raised:
        load(str(file))
    assert lines_of(str(raised.value))[0][:2] == (str(file), "1")
    assert len(str(raised.value)) < 20_000


@pytest.mark.parametrize("python", [None, sys.executable], ids=["this", "named"])
def test_it_crosses_to_the_process_that_asked(tmp_path, python):
    file = tmp_path / "mine.py"
    file.write_text("def train(job)\n    pass\n")
    with closing(Pool(str(file), python)) as pool, pytest.raises(SubjectError) as raised:
        pool.subjects  # noqa: B018
    assert str(raised.value) == (
        f"--subject {file}: cannot be imported: SyntaxError: expected ':' (mine.py, line 1)\n"
        f'  File "{file}", line 1\n'
        "    def train(job)\n"
        "                  ^\n"
        "SyntaxError: expected ':'"
    )


def test_smoke_shows_it(tmp_path, one_thread, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import torch\nimport no_such_library\n")
    assert main(["smoke", str(file)]) == 2
    assert f'  File "{file}", line 2, in <module>\n    import no_such_library\n' in capsys.readouterr().out


def test_an_interpreter_without_torch_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    with closing(Pool("torch", str(bare))) as pool, pytest.raises(SubjectError, match=r"cannot import torch \("):
        pool.subjects  # noqa: B018
