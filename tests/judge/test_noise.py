"""The limit depends on the number of measurements, and on how rarely a right trainer may be accused."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.causes.combinations import scaled
from plumbline.judge.checks.buffers import buffer_errors, buffers_after
from plumbline.judge.checks.gradients import _factor_before_clipping, compare_gradients
from plumbline.judge.full_training import FullTraining
from plumbline.judge.oracle.noise import (
    FALSE_ALARM,
    NoiseScale,
    distance,
    in_noise,
    limit,
    next_to_nothing,
    norm,
    nudged,
    rounding_alone,
    rounding_unit,
)
from plumbline.judge.oracle.oracle import Oracle, clipped
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS
from plumbline.workloads.generated import Generated, Recipe


def test_more_measurements_allow_a_tighter_limit():
    limits = [limit(draws) for draws in (2, 4, 8, 12, 16, 32, 64)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] > 1


def test_fewer_false_alarms_ask_for_a_wider_limit():
    limits = [limit(12, chance) for chance in (1e-2, 1e-4, 1e-6, FALSE_ALARM)]
    assert limits == sorted(limits)


@pytest.mark.parametrize("draws", [2, 4, 12])
@pytest.mark.parametrize("chance", [0.05, 0.01])
def test_right_trainers_are_accused_as_rarely_as_was_asked(draws, chance):
    generator = torch.Generator().manual_seed(draws)
    trials = 400_000
    errors = torch.randn(trials, draws + 1, generator=generator).abs()
    accused = (errors[:, 0] > limit(draws, chance) * errors[:, 1:].amax(1)).double().mean().item()
    assert accused == pytest.approx(chance, abs=5 * math.sqrt(chance / trials) + 0.01 * chance)


def test_noise_is_never_less_than_one_rounding():
    noise = NoiseScale()
    assert noise.at("weight", 1e-8) == 1e-8
    noise.add({"weight": torch.ones(2)}, {"weight": torch.ones(2)}, {"weight": 1e-8})
    assert noise.at("weight", 1e-8) == 1e-8


def test_noise_follows_the_size_of_what_was_added_up():
    noise = NoiseScale()
    noise.add({"weight": torch.tensor([1.0, 2.0])}, {"weight": torch.tensor([1.0, 2.5])}, {"weight": 0.1})
    assert noise.at("weight", 0.1) == pytest.approx(0.5)
    assert noise.at("weight", 0.2) == pytest.approx(1.0)


def test_an_overflow_measures_no_rounding():
    noise = NoiseScale()
    noise.add({"weight": torch.tensor([math.inf])}, {"weight": torch.ones(1)}, {"weight": 0.1})
    assert noise.runs == 0
    assert noise.at("weight", 0.1) == 0.1


@given(st.sampled_from([0.0, 1e-9, 1.0, math.inf, math.nan]), st.sampled_from([0.0, 1e-9, 1.0, math.inf, math.nan]))
def test_an_error_without_finite_noise_is_never_explained(error, noise):
    multiple = in_noise(error, noise)
    assert not math.isnan(multiple)
    if error == 0:
        assert multiple == 0
    elif not (math.isfinite(error) and 0 < noise < math.inf):
        assert multiple == math.inf


def test_a_distance_to_what_is_not_finite_is_infinite():
    assert distance(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert distance(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf
    assert distance(torch.tensor([3.0]), torch.tensor([0.0])) == norm(torch.tensor([3.0])) == 3.0


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50))
def test_one_rounding_of_each_addend_is_within_the_unit(values):
    exact = [torch.tensor([value], dtype=torch.float64) for value in values]
    unit = rounding_unit(exact, torch.finfo(torch.bfloat16).eps)
    rounded = [value.bfloat16().double() for value in exact]
    assert sum(distance(a, b) for a, b in zip(rounded, exact, strict=True)) <= unit * (1 + 1e-9) + 1e-30


@given(st.lists(st.floats(1e-300, 1e300) | st.floats(-1e300, -1e-300), min_size=1, max_size=8))
def test_a_nudge_is_one_rounding_of_every_weight(values):
    weight = torch.tensor(values, dtype=torch.float64)
    moved = nudged({"w": weight}, torch.Generator().manual_seed(0))["w"]
    relative = ((moved - weight) / weight).abs()
    assert (moved != weight).all()
    assert relative.max() <= 2 * torch.finfo(torch.float64).eps


def test_in_float64_another_order_inside_a_layer_is_noise(cell_of):
    """Another order of a router's sums changes the gradient behind a nearly closed gate by many roundings."""
    workload, cell = WORKLOADS["experts"], cell_of("experts", "tp", "1x2", "64")
    oracle = Oracle(workload, cell.topology.devices)
    before = {name: parameter.detach().clone() for name, parameter in oracle.parameters.items()}
    hidden = oracle.model.first(oracle.data.columns["x"]).tanh()
    gates = oracle.model.router(hidden).relu()
    sample, expert = divmod(int(gates.where(gates > 0, torch.inf).argmin()), gates.shape[1])
    oracle.load(nudged(before, torch.Generator().manual_seed(1)))
    gradient = oracle.gradient(((((sample,),),),))
    step = Step((MicroBatch(((sample,),), (sample,)),), before, gradient, before, (0.1,))
    analysis = TraceAnalysis(Trace((RankTrace(0, 2, (step,)), RankTrace(1, 2, (step,)))), workload, cell)
    exact, name = analysis.expected[0], f"experts.{expert}.0.weight"
    error = distance(gradient[name], exact.contract[name])
    assert error > 20 * exact.units[name]
    assert error < analysis.limit * analysis.noise.at(name, exact.units[name])


class TwoSamples(Generated):
    """Attention and BatchNorm over two samples: one of their two orders hardly rounds, the other does."""

    name = "two-samples"
    recipe = Recipe(inputs="images", layers=("linear-3", "attention", "batchnorm"), batch_size=2, seed=85)


@pytest.mark.parametrize("tried", [(0, 1), (1, 0)])
def test_few_samples_are_no_accusation_whichever_of_their_orders_is_tried(cell_of, monkeypatch, tried):
    """Without changed weights, all runs have the same rounding, and one order has 77 times the other's."""
    workload, cell = TwoSamples(), cell_of("two-samples", "none", "1x1", "32")
    trainer = Oracle(workload, 1, cell.arithmetic)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    monkeypatch.setattr("plumbline.judge.trace_analysis.shuffled", lambda layout, rng: (((tried,),),))
    for order in ((0, 1), (1, 0)):
        step = Step((MicroBatch((order,), order),), before, trainer.gradient((((order,),),)), before, (0.1,))
        analysis = TraceAnalysis(Trace((RankTrace(0, 1, (step,)),)), workload, cell)
        finding = compare_gradients(analysis)
        assert finding.outcome is Outcome.PASSED, finding.message


class OverOneUnit(Generated):
    """A LayerNorm over one unit always returns its bias, so layers before it have no gradient."""

    name = "over-one-unit"
    recipe = Recipe(inputs="tokens", layers=("linear-1", "layernorm"), loss="squares", batch_size=4, seed=571)


@pytest.mark.parametrize("precision", ["32", "bf16", "64"])
def test_what_rounding_makes_of_a_gradient_that_cancels_out_is_noise(cell_of, precision):
    """Float32 gives zero in most runs, and a remainder if the loss is divided by a number of ranks."""
    workload, cell = OverOneUnit(), cell_of("over-one-unit", "none", "1x1", precision)
    trainer = Oracle(workload, 1, cell.arithmetic)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    before["layers.1.weight"] += 0.00965  # a factor of one does not round
    trainer.load(before)
    made = []
    for sample in range(4):
        layout = ((((sample,),),),)
        for divisor in (1, 3, 5, 7):
            gradient = trainer.gradient(layout, 1 / divisor)
            made.append(norm(gradient["first.weight"]))
            step = Step((MicroBatch(((sample,),), (sample,)),), before, gradient, before, (0.1,))
            analysis = TraceAnalysis(Trace((RankTrace(0, 1, (step,)),)), workload, cell)
            finding = compare_gradients(analysis)
            assert finding.outcome is Outcome.PASSED, finding.message
    assert max(made) > 0


@given(st.floats(1e-100, 1e100), st.floats(1e-14, 1.0))
def test_a_small_gradient_that_is_no_rounding_is_not_taken_for_zero(size, part):
    values = {"large": size, "small": size * part, "moved": size * part * (1 + 1e-12)}
    large, small, moved = (torch.tensor([value], dtype=torch.float64) for value in values.values())
    names = next_to_nothing({"large": large, "small": small})
    assert ("small" in names) == (part <= torch.finfo(torch.float32).eps)
    assert not rounding_alone({"small": small}, [{"small": moved}], names)


def test_of_a_tensor_that_is_zero_in_truth_the_largest_rounding_counts():
    exact = {"zero": torch.tensor([2e-16]), "none": torch.zeros(1), "large": torch.ones(1)}
    moved = [{"zero": torch.tensor([-4e-16]), "none": torch.zeros(1), "large": torch.ones(1)}]
    found = rounding_alone(exact, moved, next_to_nothing(exact))
    assert found == {"zero": pytest.approx(4e-16)}
    noise = NoiseScale()
    noise.add_rounding_alone(found, 10.0)
    assert noise.at("zero", 0.0) == pytest.approx(4e-15)


def test_a_repeated_run_raises_the_noise_and_not_the_number_of_runs():
    noise = NoiseScale()
    noise.add({"weight": torch.tensor([1.5])}, {"weight": torch.ones(1)}, {"weight": 0.1}, repeated=True)
    assert noise.runs == 0
    assert noise.at("weight", 0.1) == pytest.approx(0.5)


def test_a_run_that_takes_other_experts_is_compared_in_what_both_have():
    noise = NoiseScale()
    noise.add({"weight": torch.ones(1), "new": torch.ones(1)}, {"weight": torch.ones(1)}, {"weight": 0.1})
    assert noise.runs == 1


class Centred(Generated):
    """A BatchNorm behind another one: the mean of its input is zero except for rounding."""

    name = "centred"
    recipe = Recipe(layers=("layernorm", "batchnorm", "batchnorm"), batch_size=8, epochs=2)


def test_in_float64_statistics_of_what_is_centred_already_are_noise(cell_of):
    workload, cell = Centred(), cell_of("centred", "none", "1x1", "64")
    trainer, share = Oracle(workload, 1), tuple(range(8))
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    start = {name: buffer.clone() for name, buffer in trainer.buffers.items()}
    trainer.load(nudged(before, torch.Generator().manual_seed(1)))
    then = trainer.buffers_after(start, [share])
    steps = tuple(
        Step((MicroBatch((share,), share),), before, {}, before, (0.1,), buffers=buffers) for buffers in (start, then)
    )
    analysis = TraceAnalysis(Trace((RankTrace(0, 1, steps),)), workload, cell)
    errors = [one for _, one in buffer_errors(analysis, *analysis.steps, 0)]
    assert errors
    assert max(one.x_noise for one in errors) <= limit()
    exact = buffers_after(analysis.oracle, steps[0], [share], 1)["layers.2.norm.running_mean"]
    off = distance(then["layers.2.norm.running_mean"], exact)
    assert off > limit() * rounding_unit([exact], analysis.epsilon)


class BehindOneAnother(Generated):
    """A bias in front of a BatchNorm starts at zero, and only rounding moves it."""

    name = "batchnorms-behind-one-another"
    recipe = Recipe(
        layers=("tanh", "linear-8", "batchnorm", "batchnorm"), loss="squares", optimizer="momentum",
        batch_size=6, epochs=2, clip_norm=0.05,
    )  # fmt: skip


def test_a_whole_training_in_float64_may_round_otherwise_inside_its_layers(simulation, cell_of):
    workload, cell = BehindOneAnother(), cell_of("batchnorms-behind-one-another", "ddp", "1x3", "64")
    trace = simulation.right_trace(workload, cell)
    training = FullTraining(TraceAnalysis(trace, workload, cell))
    other = training._train(
        Oracle(workload, 3, cell.arithmetic), training.layouts,
        moved=partial(nudged, generator=torch.Generator().manual_seed(99)),
    )  # fmt: skip
    for name, exact in training.contract.items():
        assert distance(other[name], exact) <= training.limit * training.noise[name], name


class CancellingOnOneDevice(Generated):
    """Adam, and a gradient that is only rounding if both ranks' tokens are one batch."""

    name = "cancelling-on-one-device"
    recipe = Recipe(
        inputs="text", layers=("linear-3", "linear-1", "linear-3", "linear-1", "experts"), loss="labels",
        optimizer="adam", batch_size=1, seed=220,
    )  # fmt: skip


def test_each_way_in_which_a_whole_training_may_go_has_a_noise(simulation, cell_of):
    workload, cell = CancellingOnOneDevice(), cell_of("cancelling-on-one-device", "ddp", "1x2", "bf16")
    analysis = TraceAnalysis(simulation.right_trace(workload, cell), workload, cell)
    training = FullTraining(analysis)
    contracts_own = training._noise_of(training.layouts, training.contract)
    for way, exact in training.one_device.items():
        ended = training._train(analysis.cell_oracle, way)
        errors = {name: distance(ended[name], weight) for name, weight in exact.items()}
        assert all(error <= training.limit * training.noise[name] for name, error in errors.items())
        assert any(error > training.limit * contracts_own[name] for name, error in errors.items())


def test_clipping_tells_of_gradients_that_it_has_shortened_how_long_they_were():
    raw = {"w": torch.tensor([0.3, 0.4], dtype=torch.float64)}
    case = SimpleNamespace(clip_norm=0.05, observed=clipped(scaled(0.5, raw), 0.05), expected=SimpleNamespace(raw=raw))
    assert _factor_before_clipping([case]) == pytest.approx(0.5, rel=1e-3)
