"""The trials that a search makes of its options."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline import HyperOptArgumentParser
from plumbline.slurm.grid_search import SearchError


def parsed(strategy, options, seed=0, arguments=()):
    parser = HyperOptArgumentParser(strategy=strategy, seed=seed)
    parser.add_argument("--data", default="here")
    for name, choices in options.items():
        parser.opt_list(f"--{name}", default=choices[0], type=int, options=choices)
    return parser.parse_args(list(arguments))


options_of = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=1
)


@given(options_of, st.integers(1, 70))
def test_a_grid_is_the_product_in_order_cut_at_the_number_asked_for(options, wanted):
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    hyperparameters = parsed("grid_search", options)
    assert hyperparameters.trials() == every
    assert hyperparameters.trials(wanted) == every[:wanted]


@given(options_of, st.integers(1, 70), st.integers(0, 3))
def test_a_random_search_draws_without_repeats_and_the_same_every_time(options, wanted, seed):
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    drawn = parsed("random_search", options, seed).trials(wanted)
    assert len(drawn) == min(wanted, len(every))
    assert all(trial in every and drawn.count(trial) == 1 for trial in drawn)
    assert parsed("random_search", options, seed).trials(wanted) == drawn


def test_a_trial_has_the_arguments_and_its_own_values():
    hyperparameters = parsed("grid_search", {"a": [1, 2]}, arguments=["--data", "there", "--a", "7"])
    assert hyperparameters.a == 7, "outside a search an argument is what was typed"
    assert vars(hyperparameters.trial({"a": 2})) == {"data": "there", "a": 2}


def test_a_search_that_cannot_be_done_is_refused():
    with pytest.raises(SearchError, match="unknown strategy 'gird_search'"):
        HyperOptArgumentParser(strategy="gird_search")
    with pytest.raises(SearchError, match="nothing to search"):
        parsed("grid_search", {}).trials(3)
    with pytest.raises(SearchError, match="at least one"):
        parsed("grid_search", {"a": [1]}).trials(0)
    with pytest.raises(SearchError, match="give at least one option, and each only once"):
        parsed("grid_search", {"a": [1, 1]})
