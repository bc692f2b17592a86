"""From a request to cells: the budget is kept, every cell has a name, nothing is dropped silently."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.backend import BACKENDS
from plumbline.core.errors import PlanError
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import EVERY_OTHER, TrainingBehavior
from plumbline.planning.declaration import Declaration
from plumbline.planning.plan import Matrix, check_devices, plan, topologies
from plumbline.subjects.declare import CAPABILITIES
from plumbline.workloads import WORKLOADS

EVERYTHING = Declaration("able", "able.py", tuple(BACKENDS), {EVERY_OTHER: PRECISIONS}, frozenset())

WIDE = [
    name for name, one in BACKENDS.items() if not (one.sampled or one.divides_experts) and one.smallest.devices <= 4
]
"""The backends whose cells are all planned, on four devices, even without being named."""


def declared(name="mine", backends=("none", "ddp"), precisions=("32",), capabilities=()):
    by_accelerator = precisions if isinstance(precisions, dict) else {EVERY_OTHER: precisions}
    return Declaration(name, f"{name}.py", backends, by_accelerator, frozenset(capabilities))


def test_on_more_nodes_than_it_declares_a_subject_is_unsupported():
    mine = replace(declared(backends=("ddp", "ddp2")), behavior=TrainingBehavior(max_nodes=1))
    planned = plan(Matrix(gpus=4, workloads=("mlp",), precisions=("32",)), [mine])
    assert {one.cell.topology.num_nodes for one in planned if one.refusal is None} == {1}
    refused = [one for one in planned if one.cell.backend == "ddp" and one.cell.topology.num_nodes == 2]
    assert {one.refusal for one in refused} == {"mine declares max_nodes=1; this cell has 2 nodes"}


def test_who_knows_no_epoch_is_not_asked_for_one():
    mine = replace(
        declared(backends=("none",), capabilities=("checkpoint",)), behavior=TrainingBehavior(data="iterations")
    )
    planned = plan(Matrix(gpus=1), [mine])
    refused = {one.cell.workload for one in planned if one.refusal and "data='iterations'" in one.refusal}
    assert refused == {"sequential", "uneven"}
    assert all(one.behavior.by_iterations for one in planned)
    assert "mlp" in {one.cell.workload for one in planned if one.refusal is None}


def test_who_computes_its_own_loss_is_asked_for_no_other():
    mine = replace(
        declared(backends=("none",), capabilities=("accumulation",)), behavior=TrainingBehavior(loss="labels")
    )
    planned = plan(Matrix(gpus=1), [mine])
    assert {one.cell.workload for one in planned if one.refusal is None} == {"lm-tokens", "accumulation-tokens"}
    assert "mine declares loss='labels', but mlp has another loss" in {one.refusal for one in planned}


@given(st.integers(1, 200))
def test_no_topology_is_above_the_budget(gpus):
    found = topologies(gpus)
    assert all(topology.devices <= max(gpus, 1) for topology in found)
    assert Topology(1, 1) in found
    assert Topology(1, gpus) in found


@given(st.integers(1, 40), st.integers(1, 40))
def test_no_topology_is_above_the_nodes_and_the_gpus_of_each(nodes, gpus):
    found = topologies(gpus, nodes)
    assert all(topology.num_nodes <= nodes and topology.gpus <= gpus for topology in found)
    assert Topology(nodes, gpus) in found


@given(st.integers(1, 40), st.none() | st.integers(1, 40))
def test_topologies_are_sorted_by_devices_and_unique(gpus, nodes):
    found = topologies(gpus, nodes)
    assert len(set(found)) == len(found)
    assert [t.devices for t in found] == sorted(t.devices for t in found)


def test_a_budget_of_eight_is_tried_whole_and_in_nodes():
    found = {str(topology) for topology in topologies(8)}
    assert {"1x1", "1x2", "1x3", "1x4", "1x8", "2x1", "2x2", "2x4", "4x2"} <= found


@pytest.mark.parametrize(("nodes", "ranks"), [(4, 32), (12, 96)])
def test_nodes_of_eight_reach_all_ranks(nodes, ranks):
    cells = [planned.cell for planned in plan(Matrix(gpus=8, nodes=nodes), [EVERYTHING])]
    assert max(cell.processes for cell in cells) == ranks
    every = {
        one.name for one in BACKENDS.values() if one.dimensions and one.name not in ("auto", "dp", "ep", "balanced")
    }
    assert {cell.backend for cell in cells if cell.topology.devices == ranks} == every


@pytest.mark.parametrize(("gpus", "nodes"), [(0, None), (-3, None), (0, 2), (2, 0), (2, -1)])
def test_a_budget_without_devices_is_refused(gpus, nodes):
    with pytest.raises(PlanError, match="must be 1 or more"):
        topologies(gpus, nodes)


@given(
    st.integers(1, 8),
    st.none() | st.integers(1, 4),
    st.none() | st.lists(st.sampled_from(list(BACKENDS)), min_size=1).map(tuple),
    st.none() | st.lists(st.sampled_from(list(PRECISIONS)), min_size=1).map(tuple),
    st.none() | st.lists(st.sampled_from(list(WORKLOADS)), min_size=1).map(tuple),
)
def test_every_cell_has_an_id_of_its_own_that_can_name_a_file(gpus, nodes, backends, precisions, workloads):
    subjects = [EVERYTHING, declared("mine"), declared("mine-mlp"), declared("mine-mlp-ddp")]
    cells = plan(Matrix(gpus, nodes, backends, precisions, workloads), subjects)
    ids = [planned.cell.id for planned in cells]
    assert len(set(ids)) == len(ids)
    assert not any(set(id) & set("/\\ :[]") for id in ids)
    assert all(BACKENDS[planned.cell.backend].fits(planned.cell.topology) for planned in cells)


def stages_in(planned):
    return {one.cell for one in planned if one.cell.backend == "balanced"}


def test_of_stages_a_few_cells_are_planned_and_all_where_they_are_named():
    few, named = (
        stages_in(plan(Matrix(8), [EVERYTHING])),
        stages_in(plan(Matrix(8, backends=("balanced",)), [EVERYTHING])),
    )
    assert {(str(cell.topology), cell.precision) for cell in few} == {("1x2", "32"), ("2x2", "32")}
    assert few < named
    assert "linear-exact" in {cell.workload for cell in named - few}, "its model has too few blocks"
    assert {str(cell.topology) for cell in named} >= {"1x2", "1x3", "1x8", "2x1", "2x2", "4x2"}
    assert not stages_in(plan(Matrix(8, backends=("ddp",)), [EVERYTHING]))
    assert not stages_in(plan(Matrix(8), [declared(backends=("ddp",))]))


@pytest.mark.parametrize(
    ("workload", "gpus", "refusal"),
    [
        ("linear-exact", 2, "linear-exact has too few blocks for 2 stages: 1"),
        ("mlp", 4, "mlp has too few blocks for 4 stages: 3"),
        ("mlp", 3, None),
        ("cnn-batchnorm", 5, "cnn-batchnorm has a batch of 25 samples, not divisible into 2 micro-batches"),
        ("uneven", 2, "uneven has a batch of 17 samples, not divisible into 2 micro-batches"),
        ("thawed", 2, None),
        ("checkpoint", 2, None),
    ],
)
def test_what_a_pipeline_cannot_train_is_unsupported_with_the_reason(workload, gpus, refusal):
    able = replace(EVERYTHING, capabilities=CAPABILITIES)
    (planned,) = (
        one
        for one in plan(Matrix(gpus, 1, ("balanced",), ("32",), (workload,)), [able])
        if one.cell.topology.gpus == gpus
    )
    assert planned.refusal is None if refusal is None else planned.refusal.startswith(refusal)


def the_cell_of(able, backend, gpus, workload, precision="32", **matrix):
    matrix = Matrix(gpus, 1, (backend,), (precision,), (workload,), **matrix)
    (planned,) = (one for one in plan(matrix, [able]) if one.cell.topology.gpus == gpus)
    return planned


@pytest.mark.parametrize(
    ("workload", "gpus", "refusal"),
    [
        ("mlp", 2, "mlp has too few blocks for 4 stages: 3"),
        ("cnn-batchnorm", 3, "mine declares max_stages=4; this cell has 6 stages"),
        ("cnn-batchnorm", 2, None),
    ],
)
def test_stages_are_counted_where_each_rank_has_several(workload, gpus, refusal):
    mine = replace(declared(backends=("pp",)), behavior=TrainingBehavior(stages_per_rank=2, max_stages=4))
    planned = the_cell_of(mine, "pp", gpus, workload)
    assert planned.refusal == refusal
    assert planned.undeclared == (("6 stages",) if gpus == 3 else ())


def test_a_pipeline_is_tried_first_with_a_model_that_has_enough_blocks():
    for stages_per_rank, workload in ((1, "mlp"), (2, "adamw"), (3, "cnn-batchnorm")):
        mine = replace(declared(backends=("pp",)), behavior=TrainingBehavior(stages_per_rank=stages_per_rank))
        assert {p.cell.workload for p in plan(Matrix(2), [mine]) if p.is_smoke} == {workload}


@pytest.mark.parametrize(
    ("backend", "workload", "gpus", "refusal"),
    [
        ("sp", "mlp", 2, "mlp has no sequences to divide"),
        ("sp", "lm-tokens", 11, "lm-tokens has sequences of 10 tokens, too few for 11 ranks"),
        ("sp", "lm-tokens", 3, None),
        ("cp", "lm-tokens", 2, "lm-tokens has sequences of 10 tokens, not divisible by 4"),
        ("cp", "transformer", 2, None),
    ],
)
def test_a_sequence_is_divided_where_there_is_one(backend, workload, gpus, refusal):
    assert the_cell_of(EVERYTHING, backend, gpus, workload).refusal == refusal


def test_what_is_declared_for_another_accelerator_alone_is_refused_with_its_name():
    mine = declared(backends=("cp",), precisions={"cpu": (), "cuda": ("32",)})
    planned = the_cell_of(mine, "cp", 2, "transformer")
    assert planned.refusal == "mine declares backend 'cp' only on cuda, not on cpu"
    assert the_cell_of(mine, "cp", 2, "transformer", accelerator="cuda").refusal is None


def test_a_trainer_without_a_precision_on_an_accelerator_is_refused_with_a_sentence():
    mine = declared(backends=("cp",), precisions={"cpu": (), "*": ("32",)})
    assert the_cell_of(mine, "cp", 2, "transformer").refusal == "mine declares no precision on cpu"


@pytest.mark.parametrize(
    ("divides", "backend", "gpus", "workload", "refusal"),
    [
        ({"heads"}, "tp", 3, "transformer", "transformer has 2 heads, not divisible by 3 ranks"),
        ({"heads"}, "tp", 2, "transformer", None),
        ({"heads"}, "sp", 3, "transformer", "transformer has 2 heads, not divisible by 3 ranks"),
        ({"heads"}, "fsdp", 3, "transformer", None),
        ({"heads"}, "tp", 3, "mlp", None),
        ({"features"}, "tp", 3, "mlp", "mlp has 8 features, not divisible by 3 ranks"),
        ({"features"}, "tp", 2, "mlp", None),
        ({"experts", "heads"}, "ep", 3, "experts", "experts has 4 experts, not divisible by 3 ranks"),
        ({"experts"}, "ep", 2, "experts", None),
    ],
)
def test_what_a_subject_divides_evenly_is_not_planned_for_other_numbers_of_ranks(
    divides, backend, gpus, workload, refusal
):
    mine = replace(EVERYTHING, behavior=TrainingBehavior(divides=tuple(sorted(divides))))
    found = the_cell_of(mine, backend, gpus, workload).refusal
    assert found == (refusal and f"{refusal}; able declares divides={sorted(divides)}")


def test_the_whole_matrix_is_planned():
    cells = {planned.cell for planned in plan(Matrix(gpus=4), [EVERYTHING])}
    plain = ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")
    every = [name for name, one in PRECISIONS.items() if not one.sampled]
    assert {(c.backend, c.precision, c.workload) for c in cells} >= set(product(WIDE, every, plain))
    assert {c.workload for c in cells} == set(WORKLOADS)


def test_of_a_sampled_precision_few_cells_are_planned_and_all_if_it_is_named():
    def places(**named):
        cells = (one.cell for one in plan(Matrix(gpus=4, backends=("none", "ddp"), **named), [EVERYTHING]))
        return {(c.workload, c.backend, str(c.topology)) for c in cells if c.precision == "bf16-master"}

    assert places() == {(name, "ddp", "1x3") for name in ("adamw", "clipping", "accumulation")}
    assert places(precisions=("bf16-master",)) >= {*places(), ("mlp", "ddp", "1x4"), ("mlp", "none", "1x1")}


@pytest.mark.parametrize(
    ("matrix", "meant"),
    [
        (Matrix(2, backends=("ddpp",)), "ddp"),
        (Matrix(2, backends=("ddp3",)), "ddp"),
        (Matrix(2, precisions=("fp16",)), "16"),
        (Matrix(2, precisions=("bf-16",)), "bf16"),
        (Matrix(2, workloads=("cnn-batchnrom",)), "cnn-batchnorm"),
        (Matrix(2, workloads=("constrastive",)), "contrastive"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(matrix, meant):
    with pytest.raises(PlanError, match=rf"did you mean .*'{meant}'"):
        plan(matrix, [EVERYTHING])


def test_a_name_that_resembles_nothing_is_answered_with_all_there_are():
    with pytest.raises(PlanError, match=r"choose from none, auto, dp, ddp, ddp2"):
        plan(Matrix(2, backends=("zzzzzz",)), [EVERYTHING])


def test_two_subjects_of_one_name_are_refused():
    with pytest.raises(PlanError, match="two subjects are named 'mine'"):
        plan(Matrix(2), [declared("mine"), declared("mine")])


def test_what_a_subject_does_not_declare_is_in_the_plan_refused():
    refusals = {
        p.cell: p.refusal for p in plan(Matrix(gpus=2, precisions=("32", "16"), workloads=("mlp",)), [declared()])
    }
    for cell, refusal in refusals.items():
        assert (refusal is None) == (cell.backend in ("none", "ddp") and cell.precision == "32")
        assert refusal is None or "mine does not declare" in refusal
    assert {cell.backend for cell in refusals} == {"none", "dp", "ddp"}


def test_a_precision_may_be_declared_for_one_accelerator_only():
    subject = declared(precisions={"cpu": ("32",), "cuda": ("32", "16")})
    for accelerator, refused in (("cpu", {"16"}), ("cuda", set())):
        asked = Matrix(1, precisions=("32", "16"), workloads=("mlp",), accelerator=accelerator)
        assert {p.cell.precision for p in plan(asked, [subject]) if p.refusal} == refused


@pytest.mark.parametrize("shared", [1, 2, None])
def test_ranks_share_devices_and_the_replicas_of_one_rank_do_not(shared):
    asked = Matrix(4, workloads=("mlp",), precisions=("32",), accelerator="cuda", shared=shared)
    planned = plan(asked, [declared(backends=("none", "dp", "ddp", "ddp2"))])
    for one in planned:
        replicas = one.cell.topology.gpus if one.cell.backend in ("dp", "ddp2") else 1
        assert (one.refusal is None) == (shared is None or replicas <= shared), one
        assert one.refusal is None or f"{replicas} replicas in one rank" in one.refusal
    simulated = Matrix(4, workloads=("mlp",), precisions=("32",), shared=shared)
    assert not [one for one in plan(simulated, [declared(backends=("dp",))]) if one.refusal and "share" in one.refusal]


def test_a_trainer_whose_ranks_cannot_share_a_device_is_refused_on_shared_ones():
    mine = replace(declared(backends=("none", "ddp")), behavior=TrainingBehavior(devices="own"))
    asked = Matrix(2, workloads=("mlp",), precisions=("32",), accelerator="cuda", shared=1)
    refused = {one.cell.processes: one.refusal for one in plan(asked, [mine]) if one.cell.backend in mine.backends}
    assert refused[1] is None
    assert "each rank needs a CUDA device, so run it without --oversubscribe" in refused[2]
    assert not any(one.refusal for one in plan(replace(asked, shared=None), [mine]) if one.cell.backend == "ddp")


def test_a_smaller_last_batch_is_refused_to_a_trainer_that_needs_equal_ones(monkeypatch):
    mlp = WORKLOADS["mlp"]
    whole = mlp.global_batch_size(2)
    monkeypatch.setattr(type(mlp), "samples", lambda self, devices: whole + whole // 2)
    subjects = [
        declared("any", backends=("pp",)),
        replace(declared("equal", backends=("pp",)), behavior=TrainingBehavior(batches="equal")),
    ]
    asked = Matrix(2, workloads=("mlp",), precisions=("32",))
    refused = {one.cell.subject: one.refusal for one in plan(asked, subjects) if one.cell.backend == "pp"}
    assert refused["any"] is None
    assert f"a last batch of {whole // 2} samples" in refused["equal"]


def test_a_workload_that_needs_a_capability_is_refused_to_those_without(monkeypatch):
    monkeypatch.setattr(type(WORKLOADS["mlp"]), "needs", frozenset({"clipping"}))
    subjects = [declared("plain"), declared("clips", capabilities=["clipping"])]
    refused = {p.cell.subject: p.refusal for p in plan(Matrix(1, workloads=("mlp",), precisions=("32",)), subjects)}
    assert "clipping" in refused["plain"]
    assert refused["clips"] is None


@pytest.mark.parametrize("backend", ["auto", "fsdp", "zero"])
def test_a_backend_that_few_have_is_asked_of_those_alone_unless_the_user_says_so(backend):
    plain, has = declared("plain"), declared("has", backends=("none", "ddp", backend))
    asked = {(p.cell.subject, p.refusal) for p in plan(Matrix(2), [plain, has]) if p.cell.backend == backend}
    assert {subject for subject, _ in asked} == {"has"}
    assert None in {refusal for _, refusal in asked}
    forced = [p for p in plan(Matrix(2, backends=(backend,)), [plain]) if p.cell.backend == backend]
    assert forced
    assert all("does not declare backend" in p.refusal for p in forced)


def test_one_trainer_may_declare_other_backends_otherwise():
    here = [
        declared("mine", backends=("none", "ddp"), capabilities=["clipping"]),
        declared("mine", backends=("fsdp",), precisions=("32", "64")),
    ]
    planned = plan(Matrix(2, precisions=("32", "64"), workloads=("mlp", "clipping")), here)
    assert len({p.cell for p in planned}) == len(planned), "no cell is there twice"
    does = {(p.cell.backend, p.cell.workload, p.cell.precision) for p in planned if p.refusal is None}
    assert does == {
        ("none", "mlp", "32"), ("none", "clipping", "32"), ("ddp", "mlp", "32"), ("ddp", "clipping", "32"),
        ("fsdp", "mlp", "32"), ("fsdp", "mlp", "64"),
    }  # fmt: skip


def test_one_name_for_one_backend_twice_or_from_two_places_is_refused():
    twice = [declared("mine", backends=("none", "ddp")), declared("mine", backends=("ddp",))]
    elsewhere = [declared("mine", backends=("none",)), replace(declared("mine", backends=("ddp",)), locator="other.py")]
    for subjects in (twice, elsewhere):
        with pytest.raises(PlanError, match="two subjects are named 'mine'"):
            plan(Matrix(2), subjects)


def test_smoke_touches_every_backend_once():
    smoke = [p.cell for p in plan(Matrix(gpus=8), [EVERYTHING]) if p.is_smoke]
    assert {cell.backend for cell in smoke} == set(BACKENDS)
    assert len(smoke) <= 27


def test_devices_that_are_there_are_not_refused():
    check_devices(Matrix(4, accelerator="cuda"), 4, oversubscribe=False)
    check_devices(Matrix(4, accelerator="cpu"), 0, oversubscribe=False)
    check_devices(Matrix(4, accelerator="cuda"), 1, oversubscribe=True)


@given(st.integers(1, 8), st.none() | st.integers(1, 4), st.integers(1, 8))
def test_devices_that_are_not_there_are_refused_with_ways_out_that_work(gpus, nodes, present):
    matrix = Matrix(gpus, nodes, accelerator="cuda")
    if gpus * (nodes or 1) <= present:
        return
    with pytest.raises(PlanError) as refused:
        check_devices(matrix, present, oversubscribe=False)
    said = str(refused.value)
    assert "--accelerator cpu" in said
    assert "--oversubscribe" in said
    words = said.replace(",", " ").replace(":", " ").split()
    options = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word in ("--gpus", "--nodes")}
    assert "--nodes" in options or nodes is None
    advised = Matrix(int(options["--gpus"]), nodes and int(options["--nodes"]), accelerator="cuda")
    check_devices(advised, present, oversubscribe=False)


def test_a_trainer_that_chooses_a_backend_is_asked_once():
    chooses = declared(backends=("none", "auto", "dp"))
    asked = {str(p.cell.topology) for p in plan(Matrix(8), [chooses]) if p.cell.backend == "auto"}
    assert asked == {"1x2"}
