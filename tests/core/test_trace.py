"""A trace is sent as plain values and tensors, and arrives unchanged."""

from __future__ import annotations

import json
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.evidence.trace import MicroBatch, RankTrace, Step
from plumbline.evidence.trace_file import flatten, unflatten

NAMES = st.text(min_size=1, max_size=8)
TENSORS = st.dictionaries(NAMES, st.lists(st.floats(width=32), max_size=4).map(torch.tensor), max_size=3)
IDS = st.lists(st.integers(0, 99), max_size=4).map(tuple)
MICRO_BATCHES = st.builds(MicroBatch, st.lists(IDS, max_size=3).map(tuple), st.none() | IDS)


@st.composite
def traces(draw):
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        continues = steps and draw(st.booleans())
        steps.append(
            Step(
                micro_batches=draw(st.lists(MICRO_BATCHES, max_size=2).map(tuple)),
                before=steps[-1].after if continues else draw(TENSORS),
                gradients=draw(TENSORS),
                after=draw(TENSORS),
                learning_rates=draw(st.lists(st.floats(0, 1), max_size=2).map(tuple)),
                skipped=draw(st.booleans()),
                scale=draw(st.none() | st.floats(1, 2**20)),
                turns=draw(st.lists(st.lists(NAMES, max_size=2).map(tuple), max_size=3).map(tuple)),
            )
        )
    error = draw(st.none() | st.text(max_size=10))
    return RankTrace(draw(st.integers(0, 95)), draw(st.integers(1, 96)), tuple(steps), error, 1.5 if error else None)


def bits(trace):
    """Everything in a trace in a comparable form, with tensors as bytes."""
    values, _ = flatten(trace)
    weights = [
        {name: (str(t.dtype), t.shape, t.numpy().tobytes()) for name, t in part.items()}
        for step in trace.steps
        for part in (step.before, step.gradients, step.after)
    ]
    return {**values, "steps": [{**step, "continues": None} for step in values["steps"]]}, weights


@given(traces())
def test_a_trace_arrives_as_it_was(trace):
    values, tensors = flatten(trace)
    arrived = unflatten(json.loads(json.dumps(values)), tensors)
    assert bits(arrived) == bits(trace)


def test_drawn_masks_and_turns_arrive():
    drawn = {"coins 1": torch.ones(2, 3), "coins 1 again": torch.zeros(2, 3)}
    step = Step((MicroBatch(((4, 7),), None, drawn),), {}, {}, {}, (), turns=(("a", "b"), ("c",)))
    values, tensors = flatten(RankTrace(0, 1, (step,)))
    (arrived,) = unflatten(json.loads(json.dumps(values)), tensors).steps
    assert arrived.turns == step.turns
    assert {name: value.tolist() for name, value in arrived.micro_batches[0].drawn.items()} == {
        name: value.tolist() for name, value in drawn.items()
    }


def test_weights_that_did_not_change_between_steps_travel_once():
    weights = [{"weight": torch.full((2,), float(i))} for i in range(3)]
    steps = [Step((), before, {}, after, ()) for before, after in pairwise(weights)]
    _, tensors = flatten(RankTrace(0, 1, tuple(steps)))
    assert len(tensors) == 3
