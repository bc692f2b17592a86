"""The pages build without warnings, and their statements about the code are true."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

from plumbline.cli.main import main
from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.judge.checks import CHECKS
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.report.tables.support import MARKS
from plumbline.subjects.declare import CAPABILITIES
from plumbline.subjects.load import SHORT_NAMES
from plumbline.worker.job import Job

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "reports" / "example-simulated" / "support.md"


def text(name):
    return (ROOT / name).read_text()


def column(page, heading="", place=0):
    """Return the names in backticks in one column of a page's tables, or of one section's."""
    section = text(page)
    if heading:
        section = re.split(r"\n#+ ", section.split(f"{heading}\n", 1)[1], maxsplit=1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[place])]


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("zensical", reason="zensical builds the pages: install the extra 'docs'")
    (tmp_path / "mkdocs.yml").write_text(text("mkdocs.yml"))
    shutil.copytree(DOCS, tmp_path / "docs")
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build" / "site" / "glossary" / "index.html").is_file()
    assert (tmp_path / "build" / "site" / "llms.txt").is_file()


def test_no_conflict_of_a_merge_is_left():
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "reports").glob("*.md")]
    assert [page.name for page in pages if re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)] == []


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        return [entry] if isinstance(entry, str) else [page for one in entry for page in pages(*one.values())]

    assert sorted(pages(yaml.safe_load(text("mkdocs.yml"))["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_index_has_every_other_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text("docs/index.md")))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"index.md"}


def test_the_first_page_shows_what_check_prints(printed_by_check):
    (script,) = re.findall(r"```python\n(.*?)```", text("docs/index.md"), re.DOTALL)
    wrong, right, _ = re.findall(r"```text\n(.*?)```", text("docs/index.md"), re.DOTALL)
    assert printed_by_check(script).partition(" (")[0] == wrong.splitlines()[0].partition(" (")[0]
    assert printed_by_check(script.replace("model.module(", "model(")) == right.splitlines()[0]


@pytest.fixture
def printed_by_check(tmp_path, monkeypatch, capfd):
    """Return the first line of the verdict on a script."""
    monkeypatch.chdir(tmp_path)

    def printed_by_check(script):
        (tmp_path / "train.py").write_text(script)
        main(["check", "--stop", "--", sys.executable, str(ROOT / "tests" / "forked_ranks.py"), "train.py"])
        said = capfd.readouterr().err
        (first,) = (line for line in said.splitlines() if line.startswith(("RIGHT", "WRONG")))
        return first

    return printed_by_check


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_of_the_pages_outside_of_the_site_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text(page))
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]


def test_files_and_folders_that_pages_name_are_there():
    written = ("latest", "A", "B", "<type>-<machine>.md", "<run>/", "hunt/<subject>/")
    for page in (*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"`((?:harness|suites|tests|reports|ci)/[\w./<>*-]*)", page.read_text())
        missing = [
            name
            for name in named
            if not (ROOT / name).exists() and not re.fullmatch(r"reports/(.*)", name) and "<" not in name
        ]
        reports = [name for name in named if name.startswith("reports/") and name.partition("/")[2] not in written]
        missing += [name for name in reports if not (ROOT / name).exists()]
        assert not missing, page


def test_generated_tables_are_those_of_the_code(program, capsys):
    assert program(ROOT / "ci" / "docs.py").run(["--check"]) == 0, capsys.readouterr().out


def test_the_readme_is_short_and_its_table_is_one_that_was_measured():
    readme = text("README.md").splitlines()
    assert len(readme) < 150
    rows = [line for line in readme if "`Trainer(" in line and line.startswith("|")]
    assert rows
    assert set(rows) <= set(EXAMPLE.read_text().splitlines())
    excerpt = [line for line in text("docs/reading-the-table.md").splitlines() if "`Trainer(" in line]
    assert set(excerpt) <= set(EXAMPLE.read_text().splitlines())


def test_the_readme_s_finding_is_recorded():
    """The sentence is in the report about published scripts, and the entry and its program exist."""
    quoted = re.search(r"^> (gradients at step 1.*?)\n\n", text("README.md"), re.DOTALL | re.MULTILINE)[1]
    assert " ".join(quoted.replace("> ", "").split()) in text("reports/scripts-by-others.md")
    entries = tomllib.loads(text("suites/expectations/accelerate.toml"))["expected"]
    (entry,) = [one for one in entries if "short-window-divided-by-full-length" in one["cause"]]
    assert entry["versions"] == "==1.15.*"
    assert f"suites/expectations/reproductions/{entry['reproduction']}" in text("README.md")


def test_backends_are_those_of_the_code_with_their_processes():
    assert column("docs/backends.md", "# Backends and their contracts") == list(BACKENDS)
    for line in re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", text("docs/backends.md"), re.MULTILINE):
        name, processes, devices = line
        cell = Cell("any", "mlp", name, Topology(2, 4), "32", "cpu")
        assert (cell.processes, Topology(2, 4).devices // cell.processes) == (int(processes), int(devices))


def test_subjects_marks_outcomes_checks_capabilities_and_metrics_are_those_of_the_code():
    assert column("docs/released-trainers.md") == list(SHORT_NAMES)
    assert column("docs/reading-the-table.md", "## Marks") == list(MARKS)
    outcomes = {outcome.value for outcome in Outcome}
    assert set(column("docs/reading-the-table.md", "## Outcomes of a cell")) == outcomes
    assert set(column("docs/glossary.md", "## Outcomes")) == outcomes
    assert set(column("docs/how-the-judge-decides.md", "## Checks")) == {"launch", *CHECKS[TraceAnalysis]}
    capabilities = [name for name in column("docs/subject-interface.md", "## Declaring a subject") if "-" in name]
    assert set(capabilities) <= CAPABILITIES
    assert set(column("docs/subject-interface.md", "## Declaring a subject")) >= CAPABILITIES
    measuring = "".join(path.read_text() for path in (ROOT / "harness" / "plumbline" / "benchmark").glob("*.py"))
    metrics = set(re.findall(r'^ +"(\w+)": Metric\(', measuring, re.MULTILINE))
    assert set(column("docs/benchmarking.md", "## Figures")) == metrics != set()


def test_families_are_those_of_the_detection_suite():
    suite = "".join(path.read_text() for path in (ROOT / "suites" / "detection").glob("*.py"))
    declared = re.findall(r"@known_bad\(([^)]*?)(?:causes|on)=", suite)
    families = {family for arguments in declared for family in re.findall(r'"([\w-]+)"', arguments)}
    assert set(column("docs/how-the-judge-decides.md", "## Causes and families")) == families


def test_members_of_the_job_are_those_that_it_has():
    named = {name.partition("(")[0] for name in column("docs/subject-interface.md", "## Members of `job`")}
    functions = {name for name in vars(Job) if not name.startswith("_")}
    attributes = set(re.findall(r"self\.([a-z]\w*)(?:: \w+)?(?=, self| =|,$)", source_of(Job)))
    assert named <= functions | attributes
    assert functions <= named


def source_of(kind):
    return Path(sys.modules[kind.__module__].__file__).read_text()


def test_fields_of_the_records_are_those_of_the_code():
    page = text("docs/files-of-a-run.md")
    for name in ("Header", "Result", "Measurement", "Footer"):
        missing = [field for field in record(name).model_fields if f"`{field}`" not in page]
        assert set(missing) <= {"type", "schema_version"}, f"{name}: {missing}"


def record(name):
    """Return the class of a line of ``results.jsonl``, wherever it is in its package."""
    for path in (ROOT / "harness" / "plumbline" / "results").glob("*.py"):
        if f"\nclass {name}(" in path.read_text():
            return getattr(importlib.import_module(f"plumbline.results.{path.stem}"), name)
    raise LookupError(name)


def test_architecture_has_the_packages_the_layers_and_the_contracts_that_are_enforced():
    page = text("ARCHITECTURE.md")
    rules = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = [rule["layers"] for rule in rules if rule["type"] == "layers"]
    assert "\n".join(layers) in page
    for rule in rules:
        assert rule["type"] == "layers" or f"- {rule['name']}\n" in page
    packages = {path.parent.name for path in (ROOT / "harness" / "plumbline").glob("*/__init__.py")}
    assert {name.rstrip("/") for name in column("ARCHITECTURE.md", "## Packages")} >= packages
