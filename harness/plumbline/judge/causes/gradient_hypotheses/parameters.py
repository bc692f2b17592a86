"""Gradients that are missing, stale or another parameter's, although the loss has a gradient for each parameter."""

from __future__ import annotations

import torch

from plumbline.judge.causes.combinations import mean
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.mistakes.case import Combination, SomeParameters
from plumbline.judge.mistakes.synchronisation import only
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import clipped, mean_gradient


def _thrown_away(case: OracleGradientCase) -> Gradients:
    if names := case.unused & case.expected.raw.keys():
        yield {name: value for name, value in case.expected.contract.items() if name not in names}


def _averaged_over_users(case: OracleGradientCase) -> Gradients:
    if case.unused and case.micro_batches == 1 and case.clip_norm is None:
        (parts,) = case.expected.parts
        yield {name: mean([part for part in parts if name in part])[name] for name in case.expected.raw}


def _own_where_unused(case: OracleGradientCase) -> Gradients:
    if not case.unused or not (parts := case.own_parts(case.rank)):
        return
    own, right = mean_gradient(parts), case.expected.contract
    yield {
        name: own.get(name, torch.zeros_like(value)) if name in case.unused else value for name, value in right.items()
    }
    # Where every step is wrong, unused parameters are not the reason.
    if not case.pattern.every_step:
        yield from case.predicted(SomeParameters(Combination(only({case.rank}, case.world))))
        yield clipped(own, case.clip_norm)


def _stale_where_unused(case: OracleGradientCase) -> Gradients:
    if not case.unused or case.micro_batches > 1 or case.clip_norm is not None:
        return
    parts = [dict(part) for part in case.expected.parts[0]]
    for earlier in case.earlier_expected:
        for rank, part in enumerate(parts[: len(earlier.parts[0])]):
            parts[rank] = {**earlier.parts[0][rank], **part}
    yield mean(parts)


def _exchanged(case: OracleGradientCase) -> Gradients:
    raw, factor = case.expected.raw, case.common_factor
    alike = {name: [other for other in raw.values() if other.shape == value.shape] for name, value in raw.items()}
    yield from case.with_nearer(
        {n: min(few, key=lambda one: distance(case.observed[n], factor * one)) for n, few in alike.items()}
    )


def _rows_in_another_order(case: OracleGradientCase) -> Gradients:
    raw = {name: value for name, value in case.expected.raw.items() if value.dim()}
    yield from case.with_nearer({name: value.flip(0) for name, value in raw.items()})
    for shift in (1, -1):
        yield from case.with_nearer({name: value.roll(shift, 0) for name, value in raw.items()})


register(
    OracleGradientCase,
    GradientHypothesis("unused-somewhere-stepped-nowhere", "unused-params", _thrown_away,
        "missing where some rank did not use a parameter",
        "count a rank without a gradient as zero in the average, and keep the other ranks' part", 960),
    GradientHypothesis("averaged-over-its-users", "unused-params", _averaged_over_users,
        "divided by the number of ranks that used a parameter, not by {world}",
        "count a rank without a gradient as zero in the average", 955),
    GradientHypothesis("unused-and-not-synchronised", "unused-params", _own_where_unused,
        "averaged for some parameters and rank {rank}'s own for others, in a step that does not use them all",
        "set find_unused_parameters=True: a bucket was never reduced", 950),
    GradientHypothesis("stale-where-unused", "unused-params", _stale_where_unused,
        "averaged with the last gradients of ranks that had none in this step",
        "zero gradients that no backward writes, or set them to None", 945),
    GradientHypothesis("parameters-exchanged", "sync", _exchanged,
        "right, but some parameters have the gradient of another parameter of their shape",
        "unpack a flat buffer in the order in which it was packed, on every rank", 322),
    GradientHypothesis("rows-in-another-order", "sync", _rows_in_another_order,
        "right, but with the rows of some parameters in a different order",
        "reassemble a gathered or flattened tensor in the order in which it was split", 321),
)  # fmt: skip
