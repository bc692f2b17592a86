"""The page about users' own tests: its examples run, and a failure looks as shown."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "test-on-ranks.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def test_examples_do_what_the_page_says(run_pytest, tmp_path):
    assert len(FILES) == PAGE.count("```python")
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "test_with_mesh.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_mesh(mesh, rank):\n    assert mesh.get_rank() == rank\n"
    )
    run = run_pytest(tmp_path)
    assert {name for name, result in run.results.items() if result.outcome != "passed"} == {"test_everybody_counts"}
    assert len(run.results) == 6
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = run.stdout.splitlines()
    places = [printed.index(line) for line in shown.splitlines()]
    assert places == sorted(places)
