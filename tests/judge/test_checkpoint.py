"""An interrupted training is compared with an uninterrupted one: each lost part is found and named.

Most tests judge evidence made in memory; at the end, some real ranks stop, save and resume.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from plumbline.core.finding import Finding, diagnosis
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.evidence.trace import Exit, MicroBatch, RankTrace, Step, Trace
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings
from plumbline.workloads import WORKLOADS

DETECTION = Path(__file__).parents[2] / "suites" / "detection" / "everybody.py"


class Simulated:
    """A right trainer without processes: ranks are shares of a batch, and gradients are averaged by hand."""

    def __init__(self, workload, cell, factor=1.0):
        self.workload, self.cell, self.factor = workload, cell, factor
        self.model, self.data = workload.model(), workload.dataset(cell.topology.devices)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = workload.optimizer(self.model.parameters())
        self.scheduler = workload.scheduler(self.optimizer)

    def weights(self):
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def buffers(self):
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def run(self, plan):
        """Train a list of steps, each a list of micro-batches of sample ids; return the launch's evidence."""
        steps = [self.step(window) for window in plan]
        ranks = range(self.cell.processes)
        return Trace(
            tuple(
                RankTrace(
                    rank,
                    self.cell.processes,
                    tuple(step[rank] for step in steps),
                    final=self.weights(),
                    final_buffers=self.buffers(),
                )
                for rank in ranks
            )
        )

    def step(self, window):
        before, begun = self.weights(), self.buffers()
        micro_batches = [[] for _ in range(self.cell.processes)]
        self.model.zero_grad()
        for batch in window:
            remembered = self.buffers()
            for rank, share in enumerate(torch.tensor(batch).chunk(self.cell.processes)):
                for name, value in self.model.named_buffers():
                    value.copy_(remembered[name])
                loss = self.workload.loss(self.model(self.data.batch(share)), self.data.batch(share))
                (loss * self.factor / len(window) / self.cell.processes).backward()
                ids = tuple(share.tolist())
                micro_batches[rank].append(MicroBatch((ids,), ids))
        gradients = {name: value.grad.clone() for name, value in self.parameters.items()}
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        after = self.weights()
        return [Step(tuple(own), before, gradients, after, rates, buffers=begun) for own in micro_batches]


def plan_of(workload, epochs=(0, 1), seed=5):
    """The steps of the epochs: an order for each, cut into batches and windows."""
    steps = []
    for epoch in epochs:
        count = workload.samples(1)
        order = random.Random(seed + epoch).sample(range(count), count)
        batches = [order[first : first + workload.batch_size] for first in range(0, count, workload.batch_size)]
        steps += [batches[first : first + workload.accumulate] for first in range(0, len(batches), workload.accumulate)]
    return steps


def interrupted(workload, cell, *, lose=lambda simulated: None, go_on=None, origin=None, factor=1.0):
    """The evidence of three launches; ``lose`` changes the checkpoint, and ``go_on`` the remaining steps."""
    plan, after = plan_of(workload), workload.interrupt_after
    whole = uninterrupted(workload, cell, factor, type(workload).optimizer, type(workload).scheduler)
    before = Simulated(workload, origin or cell, factor)
    saved = before.run(plan[:after])
    if origin is None:
        resumed = before
    else:
        resumed = Simulated(workload, cell, factor)
        resumed.optimizer.load_state_dict(loaded(before, resumed))
    lose(resumed)
    return replace(whole, saved=saved, resumed=resumed.run(go_on(plan) if go_on else plan[after:]))


@cache
def uninterrupted(workload, cell, factor, *_made_by):
    """The evidence of the whole training, once for each optimizer that a test makes the workload use."""
    return Simulated(workload, cell, factor).run(plan_of(workload))


def loaded(before, resumed):
    resumed.model.load_state_dict(before.model.state_dict())
    return before.optimizer.state_dict()


@pytest.fixture
def told(one_thread):
    """Return the checkpoint check's finding; nothing else may be bad unless expected."""

    def told(trace, cell, *, others=()):
        findings = {finding.check: finding for finding in judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))}
        bad = {name for name, finding in findings.items() if finding.outcome.is_bad}
        assert bad - {"checkpoint"} == set(others), findings
        return findings["checkpoint"]

    return told


PLACES = [
    ("checkpoint", "none", "1x1"), ("checkpoint", "ddp", "1x3"),
    ("checkpoint-windows", "ddp", "1x2"), ("checkpoint-elastic", "ddp", "1x2"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_training_that_goes_on_where_it_stopped_passes(told, cell_of, place):
    cell = cell_of(*place)
    workload = WORKLOADS[cell.workload]
    found = told(interrupted(workload, cell, origin=cell.resized if workload.elastic else None), cell)
    assert found.outcome is Outcome.PASSED, found
    assert found.cause is found.family is None
    assert f"after step {workload.interrupt_after} of" in found.message
    assert found.error_x_noise < 3


def test_where_no_interruption_is_asked_for_there_is_nothing_to_say(simulation, cell_of):
    cell = cell_of("mlp", "ddp", "1x2")
    assert "checkpoint" not in simulation.judge(simulation.right_trace(WORKLOADS["mlp"], cell), WORKLOADS["mlp"], cell)


def forget_optimizer(simulated):
    simulated.optimizer.state.clear()


def forget_one(simulated):
    simulated.optimizer.state.pop(next(iter(simulated.parameters.values())))


def forget_group(simulated):
    for parameter in simulated.optimizer.param_groups[1]["params"]:
        simulated.optimizer.state.pop(parameter)


def forget_counts(simulated):
    for state in simulated.optimizer.state.values():
        state["step"].zero_()


def forget_moments(simulated):
    for state in simulated.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def round_moments(simulated):
    for state in simulated.optimizer.state.values():
        state["momentum_buffer"].copy_(state["momentum_buffer"].half())


def change(simulated, function, part="named_parameters"):
    with torch.no_grad():
        for name, value in getattr(simulated.model, part)():
            value.copy_(function(name, value))


def forget_weights(simulated):
    start = dict(simulated.workload.model().named_parameters())
    change(simulated, lambda name, value: start[name])


def forget_some_weights(simulated):
    start = dict(simulated.workload.model().named_parameters())
    change(simulated, lambda name, value: start[name] if name == "last.weight" else value)


def round_weights(simulated):
    change(simulated, lambda name, value: value.bfloat16())


def shift_weights(simulated):
    change(simulated, lambda name, value: value + 0.001)


def forget_buffers(simulated):
    change(simulated, lambda name, value: torch.zeros_like(value), "named_buffers")


def forget_average(simulated):
    change(simulated, lambda name, value: value if name == "updates" else value * 0, "named_buffers")


def forget_schedule(simulated):
    simulated.scheduler = simulated.workload.scheduler(simulated.workload.optimizer(simulated.model.parameters()))
    simulated.scheduler.optimizer = simulated.optimizer


def step_schedule(simulated):
    simulated.scheduler.step()


def stop_schedule(simulated):
    simulated.scheduler = None


def forget_rate(simulated):
    simulated.optimizer.param_groups[0]["lr"] = simulated.optimizer.param_groups[0]["initial_lr"] / 4


LOST = [
    ("checkpoint", forget_optimizer, "optimizer-state-dropped"),
    ("checkpoint", forget_one, "optimizer-state-in-part"),
    ("checkpoint", round_moments, "optimizer-state-rounded"),
    ("adamw", forget_optimizer, "optimizer-state-dropped"),
    ("adamw", forget_group, "optimizer-state-in-part"),
    ("adamw", forget_counts, "optimizer-count-lost"),
    ("adamw", forget_moments, "optimizer-moments-lost"),
    ("checkpoint", forget_weights, "weights-not-loaded"),
    ("checkpoint", forget_some_weights, "weights-partly-loaded"),
    ("checkpoint", round_weights, "rounded-when-saved"),
    ("checkpoint", shift_weights, "weights-not-restored"),
    ("checkpoint", forget_buffers, "buffers-not-restored"),
    ("checkpoint", forget_average, "buffers-partly-restored"),
    ("checkpoint", forget_schedule, "scheduler-not-restored"),
    ("checkpoint", step_schedule, "scheduler-stepped-once-too-often"),
    ("checkpoint", stop_schedule, "scheduler-stands-still"),
    ("checkpoint", forget_rate, "rate-not-restored"),
]


@pytest.mark.parametrize(("workload", "lose", "cause"), LOST, ids=lambda value: getattr(value, "__name__", value))
def test_what_was_lost_is_named(told, cell_of, workload, lose, cause):
    cell = cell_of("checkpoint-elastic" if workload == "adamw" else workload, "ddp", "1x2")
    workload = WORKLOADS[cell.workload]
    found = told(interrupted(workload, cell, lose=lose, origin=cell.resized if workload.elastic else None), cell)
    assert (found.outcome, found.family, found.cause) == (Outcome.FAILED, "checkpoint", cause), found
    assert found.step >= workload.interrupt_after


AFTER, LENGTH = 8, 6
"""Where ``checkpoint`` is interrupted, and how many steps its epochs have."""

WRONG_PLACES = {
    "position-not-restored": lambda plan: plan[LENGTH:],
    "epoch-not-restored": lambda plan: plan[AFTER - LENGTH :],
    "trained-all-over-again": lambda plan: plan,
    "batch-again-after-resuming": lambda plan: plan[AFTER - 1 :],
    "batch-left-out-after-resuming": lambda plan: plan[AFTER + 1 :],
    "resumed-elsewhere": lambda plan: plan[AFTER + 2 :],
    "nothing-resumed": lambda plan: [],
    "too-few-steps-left": lambda plan: plan[AFTER:-1],
    "too-many-steps-left": lambda plan: plan[AFTER:] + plan[:LENGTH],
    "order-drawn-anew": lambda plan: plan_of(WORKLOADS["checkpoint"], seed=99)[AFTER:],
    "order-lost-later": lambda plan: [plan[AFTER], *plan[AFTER + 2 :], plan[0]],
    "position-in-other-units": lambda plan: [
        [plan[AFTER][0][:12] + plan[AFTER + 1][0][:12]], *plan[AFTER + 1 :]
    ],
}  # fmt: skip


@pytest.mark.parametrize("cause", WRONG_PLACES)
def test_where_it_goes_on_is_named(told, cell_of, cause):
    cell = cell_of("checkpoint", "ddp", "1x2")
    found = told(interrupted(WORKLOADS["checkpoint"], cell, go_on=WRONG_PLACES[cause]), cell)
    assert (found.outcome, found.family, found.cause) == (Outcome.FAILED, "checkpoint", cause), found


@pytest.mark.parametrize("first", [
    lambda plan: plan[AFTER + 2],
    lambda plan: [plan[AFTER][0][:12] + plan[AFTER + 1][0][:12]],
])  # fmt: skip
def test_a_first_step_that_an_order_drawn_anew_has_by_chance_names_no_place(told, cell_of, first):
    cell, drawn_anew = cell_of("checkpoint", "ddp", "1x2"), plan_of(WORKLOADS["checkpoint"], seed=99)
    found = told(
        interrupted(WORKLOADS["checkpoint"], cell, go_on=lambda plan: [first(plan), *drawn_anew[AFTER + 1 :]]), cell
    )
    assert found.cause == "order-drawn-anew", found


def test_the_first_epochs_order_from_the_place_in_the_second(told, cell_of):
    cell = cell_of("checkpoint", "none", "1x1")
    found = told(interrupted(WORKLOADS["checkpoint"], cell, go_on=lambda plan: plan[2:LENGTH]), cell)
    assert found.cause == "epoch-not-restored"


@pytest.fixture
def right(cell_of):
    """Right evidence of two ranks, for tests to change, and its cell."""
    cell = cell_of("checkpoint", "ddp", "1x2")
    return interrupted(WORKLOADS["checkpoint"], cell), cell


def of_rank(launch, rank, **changes):
    """Return the launch with a change on one rank."""
    return replace(
        launch, ranks=tuple(replace(one, **changes) if one.rank == rank else one for one in launch.ranks)
    )  # fmt: skip


def first_step(launch, rank, **changes):
    steps = launch.ranks[rank].steps
    return of_rank(launch, rank, steps=(replace(steps[0], **changes), *steps[1:]))


def test_only_some_ranks_load(right, told):
    trace, cell = right
    start = dict(WORKLOADS["checkpoint"].model().state_dict())
    spoilt = first_step(trace.resumed, 1, before={name: start[name] for name in trace.ranks[0].steps[0].before})
    found = told(replace(trace, resumed=spoilt), cell)
    assert (found.cause, found.rank) == ("loaded-on-some-ranks", 1)


def test_weights_of_a_step_before(right, told):
    trace, cell = right
    resumed = trace.resumed
    for rank in (0, 1):
        resumed = first_step(resumed, rank, before=trace.ranks[0].steps[7].before)
    found = told(replace(trace, resumed=resumed), cell)
    assert found.cause == "weights-of-another-step"
    assert "1 step before" in found.message


@pytest.mark.parametrize(
    ("scale", "cause"),
    [(65536.0, "scale-not-restored"), (16384.0, "scale-of-the-step-before"), (1.0, "scale-not-restored"),
     (None, "scaler-gone")],
)  # fmt: skip
def test_the_loss_scale(right, told, scale, cause):
    """The scale was lowered in the fifth step, the last before the interruption, and is halved again."""
    trace, cell = right

    def scaled(launch, begin):
        def of(step):
            return 65536.0 if step < 5 else 16384.0 if step == AFTER - 1 else 32768.0

        return replace(
            launch,
            ranks=tuple(
                replace(one, steps=tuple(replace(s, scale=of(n)) for n, s in enumerate(one.steps, begin)))
                for one in launch.ranks
            ),
        )

    whole = replace(scaled(trace, 0), saved=scaled(trace.saved, 0), resumed=scaled(trace.resumed, AFTER))
    assert told(whole, cell).outcome is Outcome.PASSED
    found = told(replace(whole, resumed=first_step(whole.resumed, 0, scale=scale)), cell)
    assert (found.cause, found.step) == (cause, AFTER)


def test_the_launch_that_saves_did_not_stop(right, told):
    trace, cell = right
    found = told(replace(trace, saved=replace(trace, saved=None, resumed=None)), cell)
    assert (found.cause, found.outcome) == ("never-stopped", Outcome.FAILED)


def test_stopping_after_so_many_steps_that_were_taken_is_as_good(told, cell_of):
    """Trainers may or may not count a skipped step."""
    cell = cell_of("checkpoint", "none", "1x1")
    trace = interrupted(WORKLOADS["checkpoint"], cell)

    def with_a_skipped_step(launch):
        (rank,) = launch.ranks
        index = 3
        left = rank.steps[index].before
        infinite = {name: value * float("inf") for name, value in rank.steps[index].gradients.items()}
        step = replace(rank.steps[index], skipped=True, gradients=infinite, after=left)
        return of_rank(launch, 0, steps=(*rank.steps[:index], step, *rank.steps[index:]))

    whole = with_a_skipped_step(trace)
    spoilt = replace(whole, saved=with_a_skipped_step(trace.saved))
    findings = {f.check: f for f in judge(TraceAnalysis(spoilt, WORKLOADS["checkpoint"], cell))}
    assert findings["checkpoint"].outcome is Outcome.PASSED, findings["checkpoint"]


def test_another_order_before_the_interruption_is_no_fault_of_the_checkpoint(told, cell_of):
    cell = cell_of("checkpoint-elastic", "ddp", "1x2")
    workload = WORKLOADS["checkpoint-elastic"]
    other = Simulated(workload, cell.resized).run(plan_of(workload, seed=77)[: workload.interrupt_after])
    found = told(replace(interrupted(workload, cell, origin=cell.resized), saved=other), cell)
    assert (found.family, found.cause, found.step) == ("data", "order-depends-on-the-devices", 0)


def test_a_gradient_that_is_wrong_after_resuming_only(told, cell_of):
    cell = cell_of("checkpoint", "ddp", "1x2")

    def double(simulated):
        simulated.factor = 2.0

    found = told(interrupted(WORKLOADS["checkpoint"], cell, lose=double), cell)
    assert (found.family, found.cause) == ("checkpoint", "wrong-after-resuming")
    assert found.step >= AFTER


def test_what_is_wrong_anyway_is_not_the_checkpoints(told, cell_of):
    """Gradients are summed instead of averaged, before and after the interruption; resuming is right."""
    cell = cell_of("checkpoint", "ddp", "1x2")
    trace = interrupted(WORKLOADS["checkpoint"], cell, factor=2.0)
    found = told(trace, cell, others={"gradients", "training"})
    assert found.outcome is Outcome.PASSED, found


@pytest.mark.parametrize("cause", [None, "unexplained", "summed"])
def test_a_mistake_without_an_interruption_is_told_first(cause):
    gradients = Finding("gradients", Outcome.FAILED, "", cause=cause)
    checkpoint = Finding("checkpoint", Outcome.FAILED, "", cause="optimizer-state-dropped", family="checkpoint")
    training = Finding("training", Outcome.FAILED, "")
    assert diagnosis((checkpoint, training, gradients)) is gradients
    assert diagnosis((training, checkpoint)) is checkpoint


def test_a_launch_that_broke_is_told_with_its_rank_and_error(right, told):
    trace, cell = right
    raised = of_rank(trace.resumed, 1, error="KeyError: 'optimizer'", failed_at=1.0)
    found = told(replace(trace, resumed=raised), cell)
    assert (found.outcome, found.family, found.cause, found.rank) == (
        Outcome.ERRORED, "checkpoint", "interruption-broke", 1,
    )  # fmt: skip
    assert "resumed failed: rank 1: KeyError: 'optimizer'" in found.message

    died = replace(trace.saved, ranks=trace.saved.ranks[:1], exits={1: Exit(Outcome.CRASHED, "killed by signal 9")})
    found = told(replace(trace, saved=died, resumed=None), cell)
    assert (found.outcome, found.rank) == (Outcome.CRASHED, 1)
    assert "was to be interrupted failed: rank 1: killed" in found.message

    alone = of_rank(of_rank(trace.resumed, 0, world_size=1), 1, world_size=1)
    found = told(replace(trace, resumed=alone), cell)
    assert found.outcome is Outcome.FAILED
    assert "in a world of 1 instead of 2" in found.message


def vacuous(found, why):
    assert found.outcome is Outcome.ERRORED
    assert found.message.startswith("vacuous (this check could not have failed): ")
    assert why in found.message


def test_it_does_not_pass_where_it_could_not_have_failed(right, told, cell_of, monkeypatch):
    trace, cell = right
    vacuous(told(replace(trace, saved=None, resumed=None), cell), "no trace of the interrupted training")
    vacuous(told(replace(trace, resumed=None), cell), "no trace of the resumed training")
    stateless = type(WORKLOADS["checkpoint"])
    monkeypatch.setattr(stateless, "optimizer", lambda self, params: torch.optim.SGD(params, lr=0.2))
    vacuous(told(interrupted(WORKLOADS["checkpoint"], cell), cell), "lost its state would have made the same")


def test_a_training_that_had_not_moved_shows_nothing(told, cell_of, monkeypatch):
    cell = cell_of("checkpoint", "none", "1x1")
    workload = type(WORKLOADS["checkpoint"])
    monkeypatch.setattr(workload, "optimizer", lambda self, params: torch.optim.SGD(params, lr=0.0, momentum=0.9))
    found = {
        f.check: f
        for f in judge(TraceAnalysis(interrupted(WORKLOADS["checkpoint"], cell), WORKLOADS["checkpoint"], cell))
    }
    vacuous(found["checkpoint"], "no weight had moved")


def test_a_training_that_moves_no_more_shows_nothing(told, cell_of, monkeypatch):
    cell = cell_of("checkpoint", "none", "1x1")

    def ends_early(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < AFTER))

    monkeypatch.setattr(type(WORKLOADS["checkpoint"]), "scheduler", ends_early)
    vacuous(told(interrupted(WORKLOADS["checkpoint"], cell), cell), "no weight moved after")


REAL = [
    ("batches-drawn-and-thrown-away", "checkpoint", "none", "1x1", "16", None),
    ("batches-drawn-and-thrown-away", "checkpoint", "ddp", "1x2", "16", None),
    ("batches-drawn-and-thrown-away", "checkpoint-elastic", "ddp", "1x3", "32", None),
    ("scaler-not-restored", "checkpoint", "ddp", "1x2", "16", "scale-not-restored"),
    ("optimizer-state-dropped", "checkpoint-elastic", "ddp", "1x2", "32", "optimizer-state-dropped"),
    ("only-rank-zero-loads", "checkpoint", "ddp", "1x3", "32", "loaded-on-some-ranks"),
    ("cannot-be-resumed", "checkpoint", "ddp", "1x2", "32", "interruption-broke"),
]


@pytest.mark.parametrize(("subject", "workload", "backend", "topology", "precision", "cause"), REAL)
def test_real_ranks(warm_pool, cell_of, tmp_path, one_thread, subject, workload, backend, topology, precision, cause):
    cell = cell_of(workload, backend, topology, precision, subject=subject)
    findings = examine(warm_pool(DETECTION), cell, tmp_path / "evidence", Settings(300)).findings
    told = diagnosis(findings)
    assert (told.cause if told else None) == cause, findings
    assert "checkpoint" in {finding.check for finding in findings}
