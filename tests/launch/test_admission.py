"""Nodes that cannot take part in a launch are refused before training starts, by name and with advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.launch.remote.node_checks import Node, cut_off, differing, other_plumbline, too_few_devices, why_not


def node(number, **values):
    told = {"number": number, "host": f"host{number}", "launcher": "10.0.0.9", "interface": "eth0", "chosen": False}
    told |= {"address": f"10.0.0.{number}", "nodes": None, "servers": None, "clock_offset": 0.0}
    software = {"torch": "2.13.0", "python": "3.11", "plumbline": "this", "devices": {"cuda": 8}}
    software |= {name: values.pop(name) for name in tuple(values) if name in software}
    return Node(**(told | values), software=software)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"servers": 8}, "host1: 8 processes were started there .*--nproc-per-node 1"),
        ({"nodes": 3}, "host1 was started as one of 3 nodes, but Plumbline runs with 2: use Plumbline's --nodes 3"),
        ({"number": 5}, "host1 is node 5, but there are only 2 nodes: number them from 0"),
        ({"number": 0}, r"host0 \(10.0.0.0 on eth0\) and host1 \(10.0.0.1 on eth0\) both have the number 0"),
        ({"address": "", "interface": "ib0"}, "host1 has no network interface ib0 with an IPv4 address"),
    ],
)
def test_a_node_that_contradicts_what_was_asked_for_is_refused(wrong, said):
    assert why_not(node(1), 2, {0: node(0)}) is None
    assert why_not(node(1, servers=1, nodes=2), 2, {0: node(0)}) is None
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(why_not(replace(node(1), **wrong), 2, {0: node(0)}))


def test_other_software_on_one_node_is_refused_with_both_names():
    assert differing([node(0), node(1)]) is None
    said = differing([node(0), node(1), node(2, torch="2.4.0")])
    assert said.startswith("host0 has torch 2.13.0 and Python 3.11 and host2 has torch 2.4.0 and Python 3.11: ")
    assert "host1 has torch 2.13.0 and Python 3.10" in differing([node(0), node(1, python="3.10")])


def test_another_plumbline_than_this_process_has_is_refused_with_the_node():
    assert other_plumbline([node(0), node(1)], "this") is None
    assert other_plumbline([node(0), node(1, plumbline="other")], "this").startswith("host1 has a different Plumbline")


def test_uneven_nodes_are_refused_with_every_count():
    uneven = [node(0), node(1, devices={"cuda": 4})]
    assert too_few_devices(uneven, "cuda", 4) is None
    said = too_few_devices(uneven, "cuda", 8)
    assert "cells need 8 CUDA devices per node" in said
    assert "host0 8, host1 4. To run, use --gpus 4" in said
    assert "leave out nodes without any" in too_few_devices([node(0), node(1, devices={})], "cuda", 1)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=8), st.integers(1, 16))
def test_nodes_are_refused_exactly_where_one_has_too_few(counts, wanted):
    said = too_few_devices([node(n, devices={"cuda": count}) for n, count in enumerate(counts)], "cuda", wanted)
    assert (said is None) == all(count >= wanted for count in counts)


def test_ways_that_lead_nowhere_are_named_and_many_are_counted():
    nodes = {n: node(n) for n in range(4)}
    assert cut_off(nodes, []) is None
    assert cut_off(nodes, [(0, 1, "no answer in 5 s")]).startswith(
        "host0 cannot reach host1 (10.0.0.1 on eth0): no answer in 5 s: "
    )
    every = [(who, whom, "No route to host") for who in nodes for whom in nodes if who != whom]
    assert cut_off(nodes, every).count("cannot reach") == 4
    assert "; and 8 more" in cut_off(nodes, every)
