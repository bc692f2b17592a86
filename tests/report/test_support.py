from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.markdown import support_page
from plumbline.report.tables.support import MARKS, mark_columns, rare_columns, support_columns, support_table
from plumbline.report.terminal import support_for_terminal
from plumbline.results.run import Run

BuildRun = Callable[..., Run]

outcomes = st.lists(st.sampled_from(Outcome), max_size=3)
names = st.sampled_from(["reference", "my-ddp", "a: b, c"])
cells = st.builds(
    Cell,
    subject=names,
    workload=st.sampled_from(["mlp", "lm-tokens"]),
    backend=st.sampled_from(["none", "dp", "ddp", "ddp2", "fsdp", "zero", "mlp-dp"]),
    topology=st.builds(Topology, st.integers(1, 3), st.integers(1, 3)),
    precision=st.sampled_from(["32", "16", "bf16", "64", "fp8"]),
    accelerator=st.sampled_from(["cpu", "cuda"]),
)
runs_of_cells = st.dictionaries(cells, outcomes, max_size=12)


def marks(row: pd.Series) -> set[str]:
    return {row[column] for column in mark_columns() if column in row} - {""}


def counted(row: pd.Series) -> int:
    """Return how many of a row's cells were tried, and how many were not."""
    tried, *others = re.findall(r"/(\d+)|(\d+) [a-z]", row["Cells passed"])
    return int(tried[0]) + sum(int(number) for _, number in others)


def one_row(build_run: BuildRun, ends: list[list[Outcome]], **settings: bool) -> pd.Series:
    """Return the only row of a run whose cells, all of one configuration, have these outcomes."""
    ddp = {
        Cell("reference", f"w{index}", "ddp", Topology(1, 2), "32", "cpu"): found for index, found in enumerate(ends)
    }
    table = support_table(build_run(ddp, **settings))
    assert len(table) == 1
    return table.iloc[0]


@given(st.lists(outcomes, min_size=1, max_size=5))
def test_a_mark_says_what_the_evidence_says(build_run: BuildRun, ends: list[list[Outcome]]) -> None:
    row = one_row(build_run, ends)
    (mark,) = marks(row)
    found = set(itertools.chain.from_iterable(ends))
    no_verdict = {Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMED_OUT}
    if mark == "Y":
        assert [] not in ends
        assert found <= {Outcome.PASSED, Outcome.UNSUPPORTED, Outcome.SKIPPED}
        assert all(Outcome.PASSED in end or Outcome.UNSUPPORTED in end for end in ends)
        assert Outcome.PASSED in found
    elif mark == "C":
        assert [] not in ends
        assert Outcome.DEVIATES in found
        assert not found & {Outcome.FAILED, *no_verdict}
    elif mark == "-":
        assert found <= {Outcome.UNSUPPORTED, Outcome.SKIPPED}
        assert all(Outcome.UNSUPPORTED in end for end in ends)
    elif mark == "?":
        assert Outcome.FAILED not in found
        assert [] in ends or found & {Outcome.SKIPPED, *no_verdict}
    assert (mark == "N") == (Outcome.FAILED in found)
    assert row["Deviates"] <= len(ends)


@pytest.mark.parametrize(
    ("ends", "mark", "share"),
    [
        (["passed", "passed"], "Y", "2/2"),
        (["passed", "deviates"], "C", "1/2"),
        (["deviates"], "C", "0/1"),
        (["passed", "deviates", "failed", "crashed"], "N", "1/4"),
        (["passed", "errored"], "?", "1/2"),
        (["passed", "timed_out"], "?", "1/2"),
        (["passed", "skipped"], "?", "1/1 (1 skipped)"),
        (["passed", None], "?", "1/1 (1 missing)"),
        (["unsupported", "unsupported"], "-", "0/0 (2 unsupported)"),
        (["unsupported", "passed"], "Y", "1/1 (1 unsupported)"),
    ],
)
def test_the_marks_of_the_legend(build_run: BuildRun, ends: list[str | None], mark: str, share: str) -> None:
    row = one_row(build_run, [[Outcome(end)] if end else [] for end in ends])
    assert marks(row) == {mark}
    assert mark in MARKS
    assert row["Cells passed"] == share


@pytest.mark.parametrize("backend", ["balanced", "ddp"])
def test_the_legend_says_into_how_many_micro_batches_a_batch_is_divided(build_run: BuildRun, backend: str) -> None:
    run = build_run({Cell("reference", "mlp", backend, Topology(1, 2), "32", "cpu"): [Outcome.PASSED]})
    sentence = "balanced: each replica splits its batch into 2 micro-batches"
    for shown in (support_for_terminal(run), support_page(run)):
        assert (sentence in shown) is (backend == "balanced")


def test_a_failure_is_not_hidden_by_a_worse_outcome_of_the_same_cell(build_run: BuildRun) -> None:
    assert marks(one_row(build_run, [[Outcome.FAILED, Outcome.ERRORED]])) == {"N"}


def test_the_cell_at_which_a_run_broke_off_has_not_passed(build_run: BuildRun) -> None:
    ends = [[Outcome.PASSED], [Outcome.PASSED]]
    assert marks(one_row(build_run, ends)) == {"Y"}
    row = one_row(build_run, ends, finished=False)
    assert marks(row) == {"?"}
    assert row["Cells passed"] == "1/1 (1 missing)"


@given(runs_of_cells)
def test_every_cell_is_in_exactly_one_row(build_run: BuildRun, ends: dict[Cell, list[Outcome]]) -> None:
    table = support_table(build_run(ends))
    backends = {cell.backend for cell in ends}
    absent = {*rare_columns()} - {BACKENDS[name].column for name in backends if name in BACKENDS}
    assert list(table.columns) == [column for column in support_columns() if column not in absent]
    assert sum(counted(row) for _, row in table.iterrows()) == len(ends)
    passed = sum(int(share.split("/")[0]) for share in table["Cells passed"])
    assert passed == sum(
        Outcome.PASSED in end and set(end) <= {Outcome.PASSED, Outcome.SKIPPED, Outcome.UNSUPPORTED}
        for end in ends.values()
    )
    folded = table["Command"].str.endswith(": not declared")
    for _, row in table[~folded].iterrows():
        assert len(marks(row)) == 1
        assert (row["1 GPU"] == "") != (row["1+ GPUs"] == "")
    assert not (table[~folded][["1 GPU", "1+ GPUs"]] == "-").any(axis=None)
    assert all(marks(row) <= {"-"} for _, row in table[folded].iterrows())


def test_what_a_subject_does_not_declare_is_one_row(build_run: BuildRun) -> None:
    places = [("none", 1), ("dp", 2), ("dp", 3), ("ddp", 2)]
    cells = [
        Cell("mine", "mlp", name, Topology(1, gpus), precision, "cpu")
        for name, gpus in places
        for precision in ("32", "16", "bf16")
    ]
    run = build_run(
        {
            cell: [Outcome.PASSED if cell.backend == "ddp" and cell.precision != "16" else Outcome.UNSUPPORTED]
            for cell in cells
        }
    )
    lacks = {cell.id: "precision 16" if cell.backend == "ddp" else f"backend {cell.backend}" for cell in cells}
    results = tuple(
        one.model_copy(update={"undeclared": (lacks[one.cell],)}) if one.outcome is Outcome.UNSUPPORTED else one
        for one in run.results
    )
    *_, last = support_table(dataclasses.replace(run, results=results)).to_dict("records")
    assert last["Command"] == "mine: not declared: backends none, dp; precision 16"
    assert last["Cells passed"] == "0/0 (10 unsupported)"
    assert {name for name in mark_columns() if last.get(name) == "-"} == {"1 GPU", "DP"}, "it does some 16-bit, and ddp"
    assert len(support_table(run)) == 3
    assert len(support_table(run, every=True)) == 9


def test_the_reference_rows_are_those_of_the_old_documentation(realistic_run: Run) -> None:
    table = support_table(realistic_run).set_index("Command")
    expected = {
        "Trainer(gpus=1)": {"1 GPU"},
        "Trainer(gpus=1, use_amp=True)": {"1 GPU", "16-bit"},
        "Trainer(gpus=k, distributed_backend='dp')": {"1+ GPUs", "DP"},
        "Trainer(gpus=k, distributed_backend='dp', use_amp=True)": {"1+ GPUs", "DP", "16-bit"},
        "Trainer(gpus=k, distributed_backend='ddp')": {"1+ GPUs", "DDP"},
        "Trainer(gpus=k, distributed_backend='ddp', use_amp=True)": {"1+ GPUs", "DDP", "16-bit"},
        "Trainer(gpus=k, num_nodes=n, distributed_backend='ddp')": {"1+ GPUs", "DDP", "Nodes"},
        "Trainer(gpus=k, num_nodes=n, distributed_backend='ddp2', use_amp=True)": {
            "1+ GPUs",
            "DDP2",
            "Nodes",
            "16-bit",
        },
        "Trainer(gpus=1, precision=64)": {"1 GPU"},
        "Trainer(gpus=k, distributed_backend='ddp', precision='bf16')": {"1+ GPUs", "DDP", "16-bit"},
        "my-ddp: ddp, 2 gpus, 32": {"1+ GPUs", "DDP"},
        "my-ddp: not declared: precision 16": {"Nodes", "16-bit"},
    }
    for command, columns in expected.items():
        row = table.loc[command]
        assert {column for column in mark_columns() if row.get(column)} == columns, command


def test_a_command_without_cells_of_its_own_is_not_claimed(realistic_run: Run) -> None:
    assert "Trainer(gpus=k)" not in set(support_table(realistic_run)["Command"])


def test_an_unknown_backend_and_precision_have_rows_of_their_own(build_run: BuildRun) -> None:
    ends = {
        Cell("reference", "mlp", backend, Topology(1, 4), precision, "cpu"): [Outcome.PASSED]
        for backend in ("ring", "ddp")
        for precision in ("fp8", "32")
    }
    assert list(support_table(build_run(ends))["Command"]) == [
        "Trainer(gpus=k, distributed_backend='ddp')",
        "Trainer(gpus=k, distributed_backend='ddp', precision='fp8')",
        "Trainer(gpus=k, distributed_backend='ring')",
        "Trainer(gpus=k, distributed_backend='ring', precision='fp8')",
    ]


def test_a_row_says_what_computed_it(build_run: BuildRun) -> None:
    cuda = {Cell("reference", "mlp", "none", Topology(1, 1), "32", "cuda"): [Outcome.PASSED]}
    assert set(support_table(build_run(cuda, simulated=False))["Devices"]) == {"A CPU"}
    assert set(support_table(build_run(cuda, simulated=True))["Devices"]) == {"simulated"}
    cpu = {Cell("reference", "mlp", "none", Topology(1, 1), "32", "cpu"): [Outcome.PASSED]}
    assert set(support_table(build_run(cpu, simulated=False))["Devices"]) == {"simulated"}


def test_the_worst_error_is_the_largest_and_missing_is_not_zero(realistic_run: Run) -> None:
    table = support_table(realistic_run).set_index("Command")["Worst × noise"]
    assert table["Trainer(gpus=1)"] == 0.8
    assert table["Trainer(gpus=k, num_nodes=n, distributed_backend='ddp2', use_amp=True)"] == 4.1e6
    assert math.isnan(table["my-ddp: not declared: precision 16"])


def test_an_error_without_a_verdict_is_no_measurement(build_run: BuildRun) -> None:
    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    run = build_run({cell: [Outcome.PASSED, Outcome.ERRORED]})
    errors = (0.5, 1e9)
    results = tuple(
        result.model_copy(update={"error_x_noise": error}) for result, error in zip(run.results, errors, strict=True)
    )
    table = support_table(dataclasses.replace(run, results=results))
    assert list(table["Worst × noise"]) == [0.5]


def test_a_run_without_cells_has_a_table_without_rows(build_run: BuildRun) -> None:
    assert list(support_table(build_run({})).columns) == [
        name for name in support_columns() if name not in rare_columns()
    ]


def test_a_backend_that_few_have_gets_its_column_where_there_is_a_row_for_it(build_run: BuildRun) -> None:
    ddp, fsdp = (Cell("mine", "mlp", backend, Topology(1, 2), "32", "cpu") for backend in ("ddp", "fsdp"))
    table = support_table(build_run({ddp: [Outcome.PASSED], fsdp: [Outcome.DEVIATES]}))
    assert list(table["FSDP"]) == ["", "C"]
    assert list(table["DDP"]) == ["Y", ""]
    assert "ZeRO" not in table


def test_what_a_trainer_chose_by_itself_stands_as_it_is_typed_and_under_what_it_promises(build_run: BuildRun) -> None:
    ends = {Cell("reference", "mlp", "auto", Topology(1, 2), "32", "cpu"): [Outcome.PASSED]}
    (row,) = support_table(build_run(ends)).to_dict("records")
    assert row["Command"] == "Trainer(gpus=k)"
    assert {column for column in mark_columns() if row.get(column)} == {"1+ GPUs", "DP"}
