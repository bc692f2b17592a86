"""Experts on different ranks whose gradients lack other ranks' parts, and routers that lack gradients from experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plumbline.judge.causes.combinations import CONCLUSIVE, factor_between
from plumbline.judge.causes.held_parts import mean_over, own_experts
from plumbline.judge.causes.oracle_gradient_case import GradientHypothesis, Gradients, OracleGradientCase
from plumbline.judge.hypothesis import register
from plumbline.judge.oracle.noise import norm
from plumbline.judge.oracle.oracle import mean_gradient


def _of_holders_samples(case: OracleGradientCase) -> Gradients:
    if case.clip_norm is not None or case.world == 1:
        return
    holders = own_experts(case)
    parts = {rank: mean_over(case, (rank,)) for rank in set(holders.values())}
    for factor in (1.0, 1 / case.world) if holders else ():
        own = {n: factor * parts[rank].get(n, torch.zeros_like(case.expected.raw[n])) for n, rank in holders.items()}
        yield {**case.expected.raw, **own}


def _rest_missing(case: OracleGradientCase) -> Gradients:
    if (experts := own_experts(case)) and len(experts) < len(case.expected.contract):
        yield {name: value for name, value in case.expected.contract.items() if name in experts}


def _missing_elsewhere(case: OracleGradientCase) -> Gradients:
    missing = {name for name, value in case.observed.items() if not norm(value)}
    ranks = [step.gradients for step in case.ranks]
    if missing and all(any(name in own and norm(own[name]) for own in ranks) for name in missing):
        yield {name: value for name, value in case.expected.contract.items() if name not in missing}


def _experts_scaled(case: OracleGradientCase) -> Gradients:
    total = dict(case.expected.raw)
    for name in own_experts(case) if case.clip_norm is None else ():
        factor = factor_between({name: total[name]}, case.observed)
        if factor < 0 or total[name].numel() < CONCLUSIVE:
            return
        total[name] = factor * total[name]
    yield total


def _of_other_experts(case: OracleGradientCase) -> Gradients:
    """Predict that parameters with the same position in each rank's list of experts are reduced as if they were one."""
    by_rank = defaultdict(list)
    for name, rank in own_experts(case).items() if case.clip_norm is None else ():
        by_rank[rank].append(name)
    raw = case.expected.raw
    for divisor in (1, len(by_rank)):
        mixed = {}
        for names in zip(*by_rank.values(), strict=False):
            if len(names) > 1 and len({raw[name].shape for name in names}) == 1:
                mixed.update(dict.fromkeys(names, torch.stack([raw[name] for name in names]).sum(0) / divisor))
        if mixed:
            yield {**raw, **mixed}


def _number(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@contextmanager
def _columns_kept(layers: list[nn.Module], kept: Tensor) -> Iterator[None]:
    """Let gradients pass only through the ``kept`` columns of the outputs of these layers."""

    def keep(layer: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.where(kept, output, output.detach())

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _router_of_own_experts(case: OracleGradientCase) -> Gradients:
    """Predict that a row's gate of an expert has a gradient only if the row's rank holds the expert."""
    holders = {_number(name): rank for name, rank in own_experts(case).items()}
    layout = case.layout
    if case.clip_norm is not None or None in holders or not holders or any(len(g) != case.world for g in layout):
        return
    with case.counterfactuals.at(case.index) as oracle:
        routers = [layer for layer in oracle.model.modules() if getattr(layer, "out_features", None) == len(holders)]
        for chosen in [[router] for router in routers] + ([routers] if len(routers) > 1 else []):
            parts = []
            for groups in layout:
                own = []
                for rank, group in enumerate(groups):
                    kept = torch.tensor([holders[number] == rank for number in sorted(holders)])  # type: ignore[type-var]
                    with _columns_kept(chosen, kept):
                        own += oracle.group_gradients(((group,),))[0]
                parts.append(own)
            yield mean_gradient(parts)


register(
    OracleGradientCase,
    GradientHypothesis("nothing-but-experts-trained", "unused-params", _rest_missing,
        "right for parameters that only one rank holds, and zero or absent for those that all ranks hold",
        "check that the optimizer has the layers around the experts, and a backward reaches them on each rank", 958),
    GradientHypothesis("missing-where-another-rank-has-it", "unused-params", _missing_elsewhere,
        "right, but zero or absent on rank {rank} for parameters that have a gradient on another rank",
        "send an expert's gradient to every rank that holds it, before the step", 952),
    GradientHypothesis("of-the-holders-samples", "sync", _of_holders_samples,
        "right, but for parameters that only one rank holds they are those of that rank's samples",
        "include the gradient of what an expert computes for other ranks", 326),
    GradientHypothesis("experts-scaled", "averaging", _experts_scaled,
        "right, but for parameters that only one rank holds they are right in direction only, not in length",
        "check what an expert's gradient is divided by: ranks, or the rows that use it", 33),
    GradientHypothesis("router-of-own-experts", "sync", _router_of_own_experts,
        "those of a router that learns, on each rank, only from the experts that the rank holds",
        "send the gradients of gates back to the rank of their row, and add those from all ranks' experts", 328),
    GradientHypothesis("averaged-with-other-experts", "sync", _of_other_experts,
        "right, but parameters that only some ranks hold are reduced over ranks that hold others",
        "leave experts out of the all-reduce over all ranks: reduce each over the ranks that hold it", 327),
)  # fmt: skip
