"""Expected findings: the files that list them, and which findings match."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.software import UNKNOWN, Software
from plumbline.planning.expectation_files import (
    ExpectationsError,
    expected,
    known_of,
    known_of_subject,
    read_expectations,
)
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, Result, ending
from plumbline.subjects.load import SHORT_NAMES

RELEASED = Path(__file__).parents[2] / "suites" / "expectations"

SHORT_WINDOW = """
measured = "simulated 1.0"

[[expected]]
cell = { workload = "accumulation*", backend = ["none", "ddp"], precision = "32" }
check = "gradients"
cause = "short-window"
consequences = ["training"]
reason = "the last window is divided by the full one's length"
link = "https://example.org/1"
"""


@pytest.fixture
def known(tmp_path):
    """Return a function that reads a file with this text, as the expectations of ``simulated``."""

    def read(text):
        (tmp_path / "simulated.toml").write_text(text)
        return read_expectations(tmp_path)["simulated"]

    return read


@pytest.fixture
def end_of(cell_of, known):
    """Return a function from a cell's findings to its outcome, and to those that were expected."""

    def end(findings, place=("accumulation", "ddp", "1x3"), text=SHORT_WINDOW):
        cell = cell_of(*place)
        said = expected(cell, findings, known(text))
        results = [Result.of(cell, found, "", None, about) for found, about in zip(findings, said, strict=True)]
        return ending(results), [result.check for result in results if result.expected]

    return end


def failed(check, cause=None, outcome=Outcome.FAILED):
    return Finding(check, outcome, "told", cause=cause)


def passed(check):
    return Finding(check, Outcome.PASSED, "told")


def test_ignite_s_cells_with_a_window_over_the_epoch_end_are_known_although_their_initial_weights_are_right(cell_of):
    known = known_of_subject("ignite", Software("pytorch-ignite", "0.5.5"), read_expectations(RELEASED))
    findings = [failed(check, "window-over-the-end-of-the-epoch") for check in ("steps", "samples")]
    cell = cell_of("accumulation", "ddp", "1x2", subject="ignite")
    assert [one is not None for one in expected(cell, [*findings, passed("initial-weights")], known)] == [
        True,
        True,
        False,
    ]


WRONG, AFTER = failed("gradients", "short-window"), failed("training")


def test_what_was_expected_is_known_with_its_consequences(end_of):
    assert end_of([passed("steps"), WRONG, AFTER]) == (KNOWN, ["gradients", "training"])


def test_a_consequence_need_not_show(end_of):
    assert end_of([WRONG, passed("training")]) == (KNOWN, ["gradients"])


def test_a_consequence_alone_is_nothing_that_anybody_expected(end_of):
    assert end_of([passed("gradients"), AFTER]) == (Outcome.FAILED, ["gradients"])


def test_something_bad_besides_fails_as_before(end_of):
    assert end_of([failed("samples"), WRONG, AFTER]) == (Outcome.FAILED, ["gradients", "training"])


def test_another_cause_or_another_outcome_is_another_thing(end_of):
    assert end_of([failed("gradients", "sum-not-mean"), AFTER]) == (Outcome.FAILED, [])
    assert end_of([failed("gradients", "short-window", Outcome.ERRORED)]) == (Outcome.ERRORED, [])


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.DEVIATES])
def test_what_should_have_failed_and_did_not_is_an_unexpected_pass(end_of, outcome):
    assert end_of([failed("gradients", outcome=outcome)]) == (UNEXPECTED_PASS, ["gradients"])


def test_what_was_not_asked_or_not_tried_is_no_pass(end_of):
    assert end_of([passed("steps")]) == (Outcome.PASSED, [])
    assert end_of([failed("declared", outcome=Outcome.UNSUPPORTED)]) == (Outcome.UNSUPPORTED, [])


@pytest.mark.parametrize(
    "place", [("mlp", "ddp", "1x3"), ("accumulation", "dp", "1x3"), ("accumulation", "ddp", "1x3", "16")]
)
def test_other_cells_are_judged_as_before(end_of, place):
    assert end_of([WRONG], place) == (Outcome.FAILED, [])


def test_several_checks_are_all_expected(end_of):
    text = '[[expected]]\ncheck = ["steps", "samples"]\nreason = "windows cross epochs"\ncell.topology = "1x*"'
    assert end_of([failed("steps"), failed("samples")], text=text) == (KNOWN, ["steps", "samples"])
    assert end_of([failed("steps"), passed("samples")], text=text) == (UNEXPECTED_PASS, ["steps", "samples"])


def test_a_crash_can_be_expected(end_of):
    text = '[[expected]]\ncheck = "launch"\noutcome = "crashed"\nreason = "it has always crashed"'
    assert end_of([failed("launch", outcome=Outcome.CRASHED)], text=text) == (KNOWN, ["launch"])


@pytest.mark.parametrize(
    ("versions", "spoken_of", "others"),
    [
        ('"==2.6.*"', ["2.6", "2.6.6", "2.6.7rc1", "2.6.6+cu130"], ["2.5.9", "2.7.0", "2.7.0rc1"]),
        ('["==2.5.5", "==2.6.*"]', ["2.5.5", "2.6.0"], ["2.5.6"]),
        ('">=2.5,<2.7"', ["2.5", "2.6.99"], ["2.7", "2.4.9"]),
    ],
)
def test_an_entry_speaks_of_the_versions_that_it_names(known, versions, spoken_of, others):
    entries = known(SHORT_WINDOW + f"versions = {versions}")
    for version in spoken_of:
        assert known_of(Software("simulated", version), entries) == entries
    for version in others:
        assert known_of(Software("simulated", version), entries) == ()


def test_without_versions_an_entry_speaks_of_all(known):
    entries = known(SHORT_WINDOW)
    assert known_of(Software("simulated", "0.1"), entries) == known_of(UNKNOWN, entries) == entries


@pytest.mark.parametrize("software", [UNKNOWN, Software("simulated"), Software("simulated", "of yesterday")])
def test_versions_of_a_library_that_nobody_knows_cannot_be_meant(known, software):
    entries = known(SHORT_WINDOW + 'versions = "<3"')
    with pytest.raises(
        ExpectationsError, match=r"simulated\.toml, entry 1 names versions.*@subject\(library="
    ) as raised:
        known_of(software, entries)
    assert repr(software.library) in str(raised.value)


OF_LIBRARY = (
    SHORT_WINDOW.replace('measured = "simulated 1.0"', 'library = "simu-lated"')
    + """
versions = "==1.*"
holds_for = "library"

[[expected]]
cell.workload = "mlp"
check = "samples"
cause = "order"
versions = "==1.*"
reason = "the adapter makes an order of its own"
"""
)
USER = Software("Simu_Lated", "1.3")


@pytest.fixture
def end_of_users(cell_of, known):
    """Return a function like ``end_of`` for a user's trainer, of which only the library is known."""

    def end(findings, workload="accumulation", software=USER, name="mine", text=OF_LIBRARY):
        about = known_of_subject(name, software, {"simulated": known(text)})
        said = expected(cell_of(workload, "ddp", "1x3"), findings, about)
        cell = cell_of(workload, "ddp", "1x3")
        results = [Result.of(cell, found, "", None, one) for found, one in zip(findings, said, strict=True)]
        return ending(results), [result.expected for result in results if result.expected]

    return end


def test_what_is_known_of_a_library_is_known_of_who_uses_it(end_of_users):
    ended, (said, consequence) = end_of_users([WRONG, AFTER])
    assert ended == KNOWN
    assert (said.library, said.link) == ("simu-lated 1.3", "https://example.org/1")
    assert consequence.reason == said.reason


@pytest.mark.parametrize("software", [UNKNOWN, Software("other", "1.3"), Software("simu-lated", "2.0")])
def test_another_library_or_version_excuses_nobody(end_of_users, software):
    assert end_of_users([WRONG], software=software) == (Outcome.FAILED, [])


def test_a_library_excuses_the_same_cause_alone(end_of_users):
    assert end_of_users([failed("gradients", "another"), AFTER]) == (Outcome.FAILED, [])


def test_what_an_adapter_does_excuses_nobody_else(end_of_users):
    assert end_of_users([failed("samples", "order")], workload="mlp") == (Outcome.FAILED, [])


def test_who_does_not_fail_as_the_library_does_passes(end_of_users):
    assert end_of_users([passed("gradients")]) == (Outcome.PASSED, [])
    assert end_of_users([passed("gradients")], name="simulated")[0] == UNEXPECTED_PASS


def test_a_subject_with_a_file_of_its_own_is_held_to_that(known):
    files = {"simulated": known(OF_LIBRARY), "mine": ()}
    assert known_of_subject("mine", USER, files) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OF_LIBRARY.replace('library = "simu-lated"\n', ""), "the file does not name it"),
        (OF_LIBRARY.replace('cause = "short-window"\n', ""), "must name cause and versions"),
        (OF_LIBRARY.replace('versions = "==1.*"\nholds', "holds"), "must name cause and versions"),
        (OF_LIBRARY.replace('holds_for = "library"', 'holds_for = "all"'), "holds_for"),
    ],
)
def test_what_excuses_everybody_must_say_exactly_what(known, text, said):
    with pytest.raises(ExpectationsError, match=said):
        known(text)


def test_a_finding_is_told_what_its_entry_says(known, cell_of):
    (said,) = expected(cell_of("accumulation", "ddp", "1x3"), [WRONG], known(SHORT_WINDOW))
    assert said.reason == "the last window is divided by the full one's length"
    assert (said.link, said.reproduction) == ("https://example.org/1", None)
    assert (said.entry, said.measured) == ("simulated.toml, entry 1", "simulated 1.0")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('check = "gradient"', "unknown check 'gradient'"),
        ('check = ["gradients", "trainings"]', "unknown check 'trainings'"),
        ("check = []", "check"),
        ('cell.workload = "mlq"', "unknown workload 'mlq'"),
        ('cell.backend = ["ddp", "ddp3"]', "unknown backend 'ddp3'"),
        ('cell.precision = "fp*"', "unknown precision 'fp[*]'"),
        ('cell.world = "3"', "world: unknown key"),
        ('measured = "2.6"', "measured: unknown key"),
        ('versions = "2.6"', "'2.6' is not a version specifier"),
        ("versions = []", "versions"),
        ('outcome = "passed"', "'passed' is not a failure"),
        ('outcome = "wrong"', "outcome"),
        ('reason = " "', "reason"),
        ('reproduction = "nowhere.py"', "reproductions/nowhere.py does not exist"),
    ],
)
def test_what_cannot_be_meant_is_said_with_file_and_entry(known, line, said):
    lines = {"check": 'check = "gradients"', "reason": 'reason = "so it is"'}
    lines[line.partition(" ")[0]] = line
    with pytest.raises(ExpectationsError, match=rf"simulated\.toml, entry 2.*{said}"):
        known(SHORT_WINDOW + "[[expected]]\n" + "\n".join(lines.values()))


@pytest.mark.parametrize("text", ["[[expected]", "expected = 3", "measurd = 'x'"])
def test_a_file_that_is_none_is_named(known, text):
    with pytest.raises(ExpectationsError, match=r"simulated\.toml"):
        known(text)


def test_without_a_folder_nothing_is_expected(tmp_path):
    assert read_expectations(tmp_path / "nowhere") == {}


def test_the_files_of_the_suite_can_be_meant_and_name_their_subjects():
    files = read_expectations(RELEASED)
    assert set(files) <= set(SHORT_NAMES)
    assert all(files.values())
    assert all(one.record.measured for entries in files.values() for one in entries)


def test_reproductions_are_short_programs_that_need_no_plumbline():
    programs = sorted((RELEASED / "reproductions").glob("*.py"))
    assert programs
    for program in programs:
        source = program.read_text()
        assert len(source.splitlines()) <= 60, program.name
        assert "plumbline" not in source, program.name
        compile(source, program.name, "exec")


def test_a_misspelt_file_of_the_suite_would_be_noticed(tmp_path):
    shutil.copytree(RELEASED, tmp_path / "expectations")
    file = tmp_path / "expectations" / "ignite.toml"
    file.write_text(file.read_text().replace("accumulation-tokens", "accumulation-token"))
    with pytest.raises(ExpectationsError, match=r"ignite\.toml, entry 1, cell"):
        read_expectations(tmp_path / "expectations")
