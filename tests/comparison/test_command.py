"""``plumbline compare`` as people and CI jobs call it: its output, formats and exit codes."""

from __future__ import annotations

import json
import unicodedata

import pytest

from plumbline.cli.main import main
from plumbline.core.outcome import Outcome

SAMPLES = [1.0, 1.01, 0.99, 1.0, 1.02]


@pytest.fixture
def compare(on_disk, capsys):
    """Compares runs like the command; returns the exit code, the output, and the errors."""

    def call(*runs, **options):
        words = [on_disk(run) for run in runs]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", value]
        try:
            code = main(["compare", *words])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def run_of(build_run, place, measured):
    """Makes a run of one cell: its outcome, and its step time relative to another run."""

    def run(*outcomes, factor=1.0, samples=SAMPLES, **others):
        figures = [measured(place(), "step_p50", [factor * sample for sample in samples])] if factor else []
        return build_run({place(): outcomes or [Outcome.PASSED]}, figures, **others)

    return run


def test_a_run_against_itself_is_the_same_and_success(compare, run_of):
    code, said, _ = compare(run_of(), run_of())
    assert code == 0
    assert said.startswith("B is the same as A: cells: 1 as before; figures: 1 same.\n")


@pytest.mark.parametrize(
    ("now", "code"),
    [
        ({"outcomes": [Outcome.FAILED]}, 1),
        ({"outcomes": [Outcome.FAILED], "factor": 2.0}, 1),
        ({"factor": 2.0}, 3),
        ({"factor": 2.0, "finished": False}, 3),
        ({"outcomes": [Outcome.UNSUPPORTED]}, 5),
        ({"factor": 0.0}, 5),
        ({"samples": [0.5, 1.0, 2.0]}, 0),
        ({"factor": 0.5}, 0),
    ],
)
def test_the_exit_code_says_the_worst(compare, run_of, now, code):
    now = dict(now)
    assert compare(run_of(), run_of(*now.pop("outcomes", ()), **now))[0] == code


def test_only_what_is_named_fails(compare, run_of):
    bad = run_of(Outcome.FAILED, factor=2.0, finished=False)
    assert compare(run_of(), bad, fail_on="regression")[0] == 3
    assert compare(run_of(), bad, fail_on="incomplete,regression")[0] == 3
    assert compare(run_of(), bad, fail_on="incomplete")[0] == 5
    assert compare(run_of(), bad, fail_on="")[0] == 0


def test_no_verdict_fails_where_that_is_asked_for(compare, run_of):
    unclear = run_of(samples=[0.5, 1.0, 2.0])
    assert compare(run_of(), unclear, fail_on="inconclusive")[0] == 6
    assert compare(run_of(), run_of(simulated=True), fail_on="inconclusive")[0] == 6
    assert compare(run_of(), run_of(), fail_on="inconclusive")[0] == 0


def test_the_help_names_every_exit_code(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    said = capsys.readouterr().out
    for line in (
        "0  no condition",
        "1  outcome",
        "2  a run",
        "3  regression",
        "4  invalid",
        "5  incomplete",
        "6  incon",
    ):
        assert f"  {line}" in said


@pytest.mark.parametrize(
    "words", [[], ["a", "b", "--by", "backend"], ["a"], ["a", "--by", "colour"], ["a", "b", "--fail-on", "rain"]]
)
def test_what_makes_no_sense_is_usage(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["compare", *words])
    except SystemExit as exit:
        code = exit.code
    assert code == 4
    assert capsys.readouterr().err.strip()


@pytest.mark.parametrize("percent", ["0", "-5", "100", "many", "nan"])
def test_a_minimum_effect_is_a_percentage(compare, run_of, percent):
    assert compare(run_of(), run_of(), minimum_effect=percent)[0] == 4


def test_the_minimum_effect_is_used(compare, run_of):
    tight = [1.0, 1.001, 0.999, 1.0, 1.0]
    a, b = run_of(samples=tight), run_of(samples=tight, factor=1.03)
    assert compare(a, b)[0] == 0
    assert compare(a, b, minimum_effect="1")[0] == 3


def test_a_run_that_is_not_there_or_is_broken_cannot_be_read(compare, run_of, on_disk, tmp_path, capsys):
    whole = on_disk(run_of())
    assert main(["compare", whole, str(tmp_path / "nowhere")]) == 2
    assert "There is no run at" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "results.jsonl").write_text("no header\n")
    assert main(["compare", whole, str(broken)]) == 2
    assert "header" in capsys.readouterr().err


def test_the_document_holds_everything(compare, run_of):
    code, said, _ = compare(run_of(), run_of(Outcome.FAILED, factor=2.0), format="json")
    found = json.loads(said)
    assert found["exit_code"] == code == 1
    assert found["gates"] == ["outcome", "regression"]
    assert found["outcomes"][0]["kind"] == "newly failing"
    figure = found["figures"][0]
    assert figure["verdict"] == "worse"
    assert figure["change"] == pytest.approx(1.0)
    assert figure["low"] < figure["change"] < figure["high"]
    assert figure["launches"] == [5, 5]
    assert found["verdicts"] == {"worse": 1}


def test_the_document_of_unequal_machines_names_the_difference(compare, run_of):
    found = json.loads(compare(run_of(), run_of(simulated=True), format="json")[1])
    assert found["machine"] == [{"what": "devices", "a": "real", "b": "simulated"}]


def test_what_was_not_there_is_null_in_the_document(compare, build_run, place, measured):
    a, b = (build_run({}, [measured(place(), "memory_allocated_peak", [size] * 3)], cells=[place()]) for size in (0, 8))
    (figure,) = json.loads(compare(a, b, format="json")[1])["figures"]
    assert (figure["verdict"], figure["change"], figure["low"]) == ("worse", None, None)


@pytest.fixture(scope="module")
def crowded(build_run, place, measured):
    """Makes a run with long names, all metrics, ranks and many differences, slower by ``factor``."""
    workloads = [f"a-workload-with-a-long-name-{number}" for number in range(20)]
    cells = [place(f"{workload} ddp2 4x8 bf16") for workload in workloads]

    def run(factor, outcome):
        figures = [
            measured(cell, metric, [factor * sample * scale for sample in SAMPLES])
            for cell in cells
            for metric, scale in (("throughput", 123456.0), ("step_p50", 1e-5), ("data_wait", 0.4))
        ]
        figures += [
            measured(cells[0], "memory_allocated_peak", [factor * sample * 1e10 for sample in SAMPLES], rank=rank)
            for rank in range(32)
        ]
        return build_run({cell: [outcome] for cell in cells}, figures)

    return run


def test_the_table_fits_a_hundred_columns_and_begins_with_the_sentence(compare, crowded):
    _, said, _ = compare(crowded(1.0, Outcome.PASSED), crowded(1.3, Outcome.FAILED))
    lines = said.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("B is ")
    assert "…" not in "".join(line for line in lines if "worse" in line and "↓" in line).replace(" … ", "")
    order = [said.index(word) for word in ("Outcome", "newly failing ", "Verdict")]
    assert order == sorted(order)


def test_ranks_with_one_verdict_share_a_line(compare, crowded):
    _, said, _ = compare(crowded(1.0, Outcome.PASSED), crowded(1.3, Outcome.PASSED), format="md")
    assert said.count("memory\\_allocated\\_peak") == 1
    assert "ranks 0–31" in said


def test_what_a_page_leaves_out_is_said(compare, crowded):
    _, said, _ = compare(crowded(1.0, Outcome.PASSED), crowded(1.3, Outcome.PASSED))
    assert "more lines" in said


def test_a_page_is_markdown_with_both_tables(compare, crowded):
    _, said, _ = compare(crowded(1.0, Outcome.PASSED), crowded(1.3, Outcome.FAILED), format="md")
    assert said.startswith("**B is ")
    assert "| Outcome | Cell | A | B |" in said
    assert "| Cell | Figure | A → B | Change, % | 95 % interval | Verdict |" in said


@pytest.mark.parametrize("form", ["text", "md"])
def test_what_comes_from_a_run_never_acts(compare, build_run, place, measured, form):
    """Names and reasons are untrusted text: no escape sequences, no markup, no second line."""
    nasty = "\x1b[31mred\x1b[0m\u202e<b>|`x`\n[bold]y[/bold]"
    cell = place(subject=nasty)
    other = place(subject="plain")
    figures = [measured(one, "step_p50", SAMPLES, refusal=nasty) for one in (cell, other)]
    runs = [build_run({cell: [end], other: [end]}, figures) for end in (Outcome.PASSED, Outcome.FAILED)]
    _, said, _ = compare(*runs, format=form)
    assert not {unicodedata.category(sign) for sign in said.replace("\n", "")} & {"Cc", "Cf", "Cs"}
    assert "red" in said
    assert ("[bold]y" in said) if form == "text" else ("<b>" not in said)


def test_the_cells_of_one_run_are_compared(compare, build_run, place, measured):
    cells = {place(f"mlp {backend} 1x2 32"): [Outcome.PASSED] for backend in ("dp", "ddp")}
    figures = [
        measured(cell, "step_p50", [factor * sample for sample in SAMPLES])
        for cell, factor in zip(cells, (1.0, 1.5), strict=True)
    ]
    code, said, _ = compare(build_run(cells, figures), by="backend")
    assert code == 3
    assert said.startswith("By backend: ")
    assert "dp → ddp" in said
    assert compare(build_run(cells, figures), by="gpus")[0] == 4
