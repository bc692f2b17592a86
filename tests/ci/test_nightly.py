"""The nightly lane: its pieces run, a failing one stops no other, and a night can be resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lane():
    """The lane's modules from ``ci/``, which are removed afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(ROOT / "ci"))
    import nightly_lane.command
    import nightly_lane.night
    import nightly_lane.piece
    import nightly_lane.reach
    import nightly_lane.stages

    yield nightly_lane
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("nightly_lane", "accelerator_lane"):
            del sys.modules[name]


@pytest.fixture
def piece(lane):
    def make(name, script="true", **options):
        stage, _, part = name.partition(": ")
        return lane.piece.Piece(stage, ("sh", "-c", script), part, **options)

    return make


@pytest.fixture
def night(lane, tmp_path):
    def make(*pieces, commit="abc1234", **options):
        report = tmp_path / "nightly.md"
        machine = {"CPU": "two cores", "memory": "24 GiB"}
        return lane.night.Night(pieces, tmp_path / "nightly", report, tmp_path, commit, machine, **options)

    return make


@pytest.fixture
def git(tmp_path):
    """Return a function that runs git in the test's folder."""

    def run(*words):
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    run("init", "-q")
    return run


def outcomes(results):
    return {name: result.outcome for name, result in results.items()}


def run(night, *names, minutes=60.0, resume=False):
    chosen = [piece for piece in night.pieces if not names or piece.name in names]
    return outcomes(night.run(chosen, minutes, resume=resume))


def test_every_test_of_the_project_is_in_one_piece(lane):
    places = [piece.command[3] for piece in lane.stages.pieces(ROOT, 2) if piece.stage == "tests"]
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert sum((ROOT / place) in (file, *file.parents) for place in places) == 1, file


def test_a_night_has_the_tests_that_are_deselected_by_default(lane):
    for piece in lane.stages.pieces(ROOT, 2):
        if piece.stage == "tests":
            assert list(piece.command[4:6]) == ["-m", ""]


def test_every_trainer_of_the_detection_suite_is_in_one_piece(lane):
    selections = [Expression.compile(selected) for selected in lane.stages.DETECTION.values()]
    for family in ("right", "stages", "virtual_stages", "three_dimensions", "clipping", "right-stages"):
        assert sum(one.evaluate(lambda word, family=family: word in family) for one in selections) == 1, family


def test_every_released_trainer_of_a_night_is_pinned(lane, program):
    released = program(ROOT / "ci" / "released.py")
    for name in lane.stages.RELEASED:
        assert released.pinned(name)[0].isdigit(), name


def test_every_program_of_a_night_says_its_figures_in_a_line(lane):
    for piece in lane.stages.pieces(ROOT, 2):
        program = ROOT / piece.command[1 if len(piece.command) > 1 else 0]
        if program.suffix == ".py" and program.parent.name == "ci" and piece.stage != "released-trainers":
            assert "In all: " in program.read_text(encoding="utf-8"), program


def test_pieces_have_names_and_files_of_their_own(lane):
    every = lane.stages.pieces(ROOT, 2)
    assert len({piece.name for piece in every}) == len({piece.file for piece in every}) == len(every)


def test_a_piece_that_fails_stops_none_of_the_others(night, piece):
    told = night(
        piece("bad", "echo why; exit 2"),
        piece("elsewhere", "exit 3", cannot=3),
        piece("lacking", needs=["no_such_module"]),
        piece("good"),
    )
    assert run(told) == {
        "bad": "failed (2)",
        "elsewhere": "not possible here",
        "lacking": "not begun: no_such_module is not installed",
        "good": "passed",
    }
    assert "why\n" in (told.folder / "bad.log").read_text()


def test_a_resumed_night_runs_what_has_not_passed(night, piece, tmp_path):
    tests = [
        piece("tests: one", "echo x >> one.times"),
        piece("tests: two", "echo x >> two.times; test -e mended"),
        piece("three", "echo x >> three.times"),
    ]
    assert run(night(*tests), "tests: one", "tests: two") == {"tests: one": "passed", "tests: two": "failed (1)"}
    (tmp_path / "mended").touch()
    assert set(run(night(*tests), resume=True).values()) == {"passed"}
    times = {name: (tmp_path / f"{name}.times").read_text().count("x") for name in ("one", "two", "three")}
    assert times == {"one": 1, "two": 2, "three": 1}


def test_what_passed_at_another_commit_runs_again_and_so_does_all_without_resume(night, piece, tmp_path):
    one = piece("one", "echo x >> one.times")
    run(night(one))
    run(night(one, commit="def5678"), resume=True)
    run(night(one, commit="def5678"))
    assert (tmp_path / "one.times").read_text().count("x") == 3
    run(night(one, commit="def5678"), resume=True)
    assert (tmp_path / "one.times").read_text().count("x") == 3


READ = ["ci/gate.py", "tests/judge/test_margin.py", "harness/plumbline/judge/__init__.py"]


@pytest.mark.parametrize(
    ("file", "due"),
    [
        ("ci/gate.py", True),
        ("ci/history.py", False),
        ("reports/nightly.md", False),
        ("harness/plumbline/judge/opened_next_time.py", True),
        ("harness/plumbline/judge/checks/margin.py", False),
        ("tests/judge/test_other.py", False),
    ],
)
def test_a_piece_that_passed_is_due_again_where_a_file_that_it_reads_has_changed(lane, night, piece, file, due):
    one = piece("one")
    before = night(one)
    passed = lane.piece.Result("passed", "abc1234", read=READ)
    before.results_file.write_text(json.dumps({"one": passed.to_json()}))
    later = night(one, commit="def5678", changes_since=lambda _: lane.reach.Changes([file]))
    assert later.run([one], 60.0, resume=True)["one"].commit == ("def5678" if due else "abc1234")
    assert "1 of 1 pieces ran at this commit, or at one that differs in nothing" in later.report.read_text()


def test_the_page_says_which_results_are_of_an_earlier_commit(lane, night, piece):
    one = piece("one")
    run(night(one))
    later = night(one, commit="def5678", changes_since=lambda _: lane.reach.Changes(["README.md"]))
    later.run([one], 0.0, resume=True)
    page = later.report.read_text()
    assert "0 of 1 pieces ran at this commit, or at one that differs in nothing that they read: 1 due; 0 min" in page
    assert "| one | due, last passed |" in page


def test_a_new_file_counts_for_whoever_read_one_beside_it(lane):
    def reach(file):
        return lane.reach.Changes([file], new=[file]).reach(READ)

    assert reach("tests/judge/test_new.py")
    assert reach("ci/new.py")
    assert not reach("tests/check/test_new.py")


def test_what_passed_without_anybody_seeing_what_it_reads_is_due_after_any_change(lane, night, piece):
    one = piece("one")
    told = night(one, commit="def5678", changes_since=lambda _: lane.reach.Changes(["README.md"]))
    assert not told.holds(lane.piece.Result("passed", "abc1234", read=None))


@pytest.fixture
def checkout(git, tmp_path):
    for file in ("kept/__init__.py", "kept/used.py", "alone.py", "read.txt", "unread.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    git("add", "-A")
    git("commit", "-qm", "all")
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is opened")
@pytest.mark.parametrize("times", [1, 2], ids=["sources", "bytecode"])
def test_the_files_that_a_piece_and_its_children_open_are_seen(lane, checkout, times, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    script = f"cat read.txt; {sys.executable} -c 'import kept.used, alone'"
    one = lane.piece.Piece("one", ("sh", "-c", script))
    for _ in range(times):
        told = lane.piece.run(one, checkout, checkout, "abc1234")
    assert told.outcome == "passed"
    assert told.read == ["alone.py", "kept/__init__.py", "read.txt"]
    assert (checkout / "kept" / "__pycache__").exists()


def test_which_files_have_changed_is_told_by_git(lane, git, tmp_path):
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x")
        git("add", "-A")
        git("commit", "-qm", name)
    (tmp_path / "one.py").write_text("y")
    git("commit", "-qam", "one.py again")
    since = lane.reach.changes_until(tmp_path, "HEAD")
    assert since("HEAD~2") == lane.reach.Changes(["one.py", "two.py"], new=["two.py"])
    assert since("no-such-commit") is None


def test_another_machine_continues_a_night_from_what_was_committed(lane, night, piece, tmp_path):
    one = piece("one", "echo x >> one.times")
    told = night(one)
    run(told)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in (told.report, told.results_file):
        file.rename(elsewhere / file.name)
    there = lane.night.Night([one], elsewhere / "nightly", elsewhere / "nightly.md", tmp_path, "abc1234", {})
    assert outcomes(there.run([one], 60.0, resume=True)) == {"one": "passed"}
    assert (tmp_path / "one.times").read_text().count("x") == 1


def test_a_commit_of_reports_alone_is_not_another_commit(lane, git, monkeypatch, tmp_path):
    def commit(name, text="x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", "-A")
        git("commit", "-qm", name)
        return lane.command._commit()

    monkeypatch.setattr(lane.command, "ROOT", tmp_path)
    first = commit("code.py")
    assert commit("reports/nightly.md") == first
    assert not first[1]
    assert commit("code.py", "y") != first
    (tmp_path / "code.py").write_text("z")
    assert lane.command._commit()[1]


def test_the_scripts_of_a_night_are_told_where_the_checkouts_are(lane, capsys):
    arguments = ["--list", "--only", "check-scripts", "--checkouts", "/somewhere", "--python", "/other/bin/python"]
    assert lane.command.main(arguments) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    assert all(line.endswith("--checkouts=/somewhere --python=/other/bin/python") for line in listed)


def test_what_passed_with_changes_that_are_not_committed_counts_for_no_commit(night, piece, tmp_path):
    one = piece("one", "echo x >> one.times")
    run(night(one, changed=True))
    run(night(one, changed=True), resume=True)
    run(night(one), resume=True)
    assert (tmp_path / "one.times").read_text().count("x") == 3


def test_when_the_time_is_over_no_piece_begins_and_the_exit_code_says_that_some_are_due(lane, night, piece):
    stages = [piece("one"), piece("two")]
    told = night(*stages)
    assert lane.command.run(told, stages, 0.0, resume=False) == 4
    assert told.results() == {}
    assert lane.command.run(told, stages[:1], 60.0, resume=True) == 0
    assert lane.command.run(told, stages, 0.0, resume=True) == 4
    assert lane.command.run(told, stages, 60.0, resume=True) == 0
    assert lane.command.run(told, [piece("one", "exit 1")], 60.0, resume=False) == 1


def test_the_page_has_the_commit_the_machine_and_the_figures_of_each_piece(night, piece):
    summary = "echo 'FAILED tests/a.py::test_b - assert 1 == 2'"
    closing = "echo '= 1 failed, 31 passed in 61.00s (0:01:01) ='"
    bad = piece("tests: a", f"{summary}; {closing}; exit 1")
    hunted = piece("hunt", "echo 'In all: 3 right ones | 0 accused'")
    told = night(bad, piece("main", "echo '3 passed, 1 deviates in 2.0s'"), hunted, piece("due"))
    run(told, "tests: a", "main", "hunt")
    page = told.report.read_text()
    assert (
        "commit abc1234. 3 of 4 pieces ran at this commit, or at one that differs in nothing that they read: " in page
    )
    assert "read: 1 failed (1), 2 passed, 1 due; " in page
    assert "| CPU | two cores |" in page
    assert re.search(r"\| tests: a \| \*\*failed \(1\)\*\* \| 1 failed, 31 passed \| \d+\.\d \| abc1234 \|", page)
    assert re.search(r"\| main \| passed \| 3 passed, 1 deviates \| \d+\.\d \| abc1234 \|", page)
    assert re.search(r"\| hunt \| passed \| 3 right ones / 0 accused \| \d+\.\d \| abc1234 \|", page)
    assert "| due | due | – | – | – |" in page
    assert "## tests: a\n\n- `FAILED tests/a.py::test_b`\n" in page


def test_the_page_is_there_before_the_next_piece_begins(night, piece):
    assert run(night(piece("one"), piece("two", "grep '| one | passed' nightly.md")))["two"] == "passed"


def test_a_stage_that_there_is_not_is_refused_with_those_that_there_are(lane, capsys):
    with pytest.raises(SystemExit, match="2"):
        lane.command.main(["--only", "detectoin"])
    assert "detection: meshes" in capsys.readouterr().err


def test_a_stage_stands_for_all_of_its_pieces(lane, capsys):
    assert lane.command.main(["--list", "--only", "detection", "--only", "main: README's job"]) == 0
    names = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert names == [*(f"detection: {part}" for part in lane.stages.DETECTION), "main: README's job"]


def test_whatever_runs_at_night_only_is_there():
    """A renamed test would run by default again, without anybody noticing why that is slower."""
    tests = ROOT / "tests"
    lines = (tests / "nightly.txt").read_text().splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        file, _, name = line.removeprefix("!").partition("::")
        assert (tests / file).exists(), line
        assert not name or f"def {name.partition('[')[0]}(" in (tests / file).read_text(), line
        assert f"!{line}" not in lines, f"{line} is also said to run by default"
