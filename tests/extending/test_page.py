"""The examples of docs/extending.md do what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from plumbline.cli.main import main
from plumbline.core.invocation import suites
from plumbline.judge.causes import HYPOTHESES, GradientCase, Hypothesis, register
from plumbline.report import formats

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that loaded all files of the page, with a trainer that halves the last micro-batch."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    trainer = Path(__file__).parent / "outside" / "halved_last.py"
    command = [sys.executable, "-m", "pytest", str(suites() / "conformance"), "-q", "-p", "no:cacheprovider"]
    command += [word for name in FILES for word in ("-p", Path(name).stem)]
    command += ["--gpus", "1", "--workloads", "accumulation", "--precisions", "32", "--subject", str(trainer)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, "--report-dir", "reports"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return folder / "reports" / "latest"


@pytest.fixture(scope="module")
def results(run):
    records = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    return {one["check"]: one for one in records if one["type"] == "result"}


def test_the_page_has_a_check_a_cause_and_a_report_format():
    assert list(FILES) == ["my_check.py", "my_cause.py", "my_format.py"]


def test_its_check_is_asked(results):
    assert results["bounded-gradients"]["outcome"] == "passed"


def test_its_cause_explains(results):
    assert (results["gradients"]["cause"], results["gradients"]["family"]) == ("last-halved", "accumulation")
    assert "divide each micro-batch" in results["gradients"]["message"]


def test_its_report_format_is_written(run):
    assert re.fullmatch(r"1\.\.1\nnot ok 1 - \S+\n", (run / "report.tap").read_text())


def test_an_installed_package_adds_its_format_by_the_entry_point(run, monkeypatch, capsys):
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (group,) = tomllib.loads(toml)["project"]["entry-points"].items()
    installed = run.parents[1] / "my_format-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-format\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in group[1].items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{group[0]}]", *lines]))
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))
    assert main(["report", str(run), "--format", "tap"]) == 0
    assert capsys.readouterr().out.startswith("1..1\n")


@pytest.mark.parametrize("wrong", ["without a kind", "without a hypothesis"])
def test_what_would_register_nothing_is_refused(wrong):
    before = {kind: list(known) for kind, known in HYPOTHESES.items()}
    cause = Hypothesis("mine", "data", lambda case: (), "…", "…", specificity=600)
    with pytest.raises(TypeError, match=r"register\(GradientCase, Hypothesis\(…\)\)"):
        register(*((cause,) if wrong == "without a kind" else (GradientCase,)))
    assert before == HYPOTHESES
