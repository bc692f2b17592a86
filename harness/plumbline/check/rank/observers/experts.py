"""Notes which experts a forward sends its tokens to, which tokens none receives, and how balancing losses count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.router_graph import (
    Scores,
    Term,
    attached_numbers,
    is_scripts,
    only_from,
    scores_of,
    terms_of,
)
from plumbline.check.rank.observers.row_hashes import mixed
from plumbline.check.rank.observers.selections import install_watch, watch_selections
from plumbline.check.rank.observers.unused_losses import is_auxiliary
from plumbline.recording.backward_passes import in_backward
from plumbline.recording.observer import Observer
from plumbline.recording.patching import attempt
from plumbline.recording.running_modules import RunningModule, running_modules
from plumbline.replay.applied_functions import follow_functions
from plumbline.replay.unwrapping import add_root

NAME = "experts"

_KEPT = 512
"""Selections that a recomputation is compared with."""

_TOKENS = 32
"""Tokens of a selection whose experts are compared with those on other ranks."""


@dataclass(eq=False)
class _Selection:
    """One selection: ``experts`` hashes those of each token, ``clear`` says whether rounding cannot decide which.

    ``is_over``: the module that selects has returned. ``without`` counts the tokens for which the module around it
    returned zeros, None where that is not known.
    """

    choices: int
    k: int
    experts: Tensor
    clear: Tensor
    scores: Scores | None
    parameters: list[str]
    module: str
    is_over: bool = False
    without: Tensor | None = None

    @property
    def name(self) -> str:
        """The name of the module that holds the first of the weights, of the one that selects if none is known."""
        return self.parameters[0].rpartition(".")[0] or self.parameters[0] if self.parameters else self.module


@dataclass(eq=False)
class _Balancing:
    """A term of the loss that is computed from scores alone, and what arrives at it in the backward pass."""

    term: Term
    own: list[float]
    function: str = ""
    times: int = 1
    weights: list[Tensor] = field(default_factory=list)


class ExpertObserver(Observer):
    """Notes for each backward pass the selections of the forwards before it that depend on trained scores.

    ``routers`` has, by the name of the module that selects: the tokens, the number of choices and of those selected,
    the names of the ``parameters`` that the scores are computed with, ``without``, the tokens that no expert received,
    and for some tokens a hash of their experts, None where rounding may decide. ``rerouted`` has the recomputed
    selections that differ from those of the forward. ``balancing`` has the terms of the loss that are computed from
    the scores alone: the constants they are multiplied by and other terms are not, the outermost first, how often each
    is added, and its ``weight``, the gradient that arrives at it. ``main`` has the factors of the other terms, with
    whether each is a mean. ``constant``: where a number without a gradient is
    added to the loss, the names of losses without one that modules hold. ``dropped`` names functions
    of the script that attach such a term to a tensor that nothing uses.
    """

    name = NAME

    def __init__(self) -> None:
        self._selections: list[_Selection] = []
        self._known: deque[_Selection] = deque(maxlen=_KEPT)
        self._again: list[tuple[str, Tensor, int]] = []
        self._attached: list[tuple[str, Any, Any]] = []
        self._balancing: list[_Balancing] = []
        self._loss: Facts = {}
        self._handles: list[Any] = []
        self._following = ExitStack()
        self._roots: list[nn.Module] = []
        self._names: tuple[RunningModule, dict[int, str]] | None = None

    def install(self) -> None:
        install_watch()

    def start(self) -> None:
        super().start()
        self._following.callback(follow_functions(self._applied))
        self._following.enter_context(watch_selections(self._selected))

    def stop(self) -> None:
        super().stop()
        self._following.close()
        self._forget()
        self._known.clear()
        self._roots = []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        add_root(self._roots, module)

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Find the balancing losses in the graph, while it is there."""
        self._again = []
        if self._chosen() and len(roots) == 1:
            attempt(self._look, roots[0].grad_fn)

    def backward_ends(self, number: int) -> Facts | None:
        chosen = self._chosen()
        facts: Facts | None = None
        if chosen or self._again:
            facts = {
                "routers": _routers(chosen),
                "rerouted": [
                    {"module": module, "tokens": int(count), "of": of}
                    for module, count, of in self._again
                    if int(count)
                ],
                "balancing": [made for one in self._balancing if (made := _balancing_facts(one)) is not None],
                **self._loss,
            }
        self._forget()
        return facts

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        for one in self._selections:
            one.scores = None
        self._selections, self._balancing, self._attached, self._handles = [], [], [], []
        self._again, self._loss, self._names = [], {}, None

    def _chosen(self) -> list[_Selection]:
        return [one for one in self._selections if one.parameters]

    def _selected(self, scores: Tensor, indices: Tensor) -> None:
        if not self.attends or indices.shape[-1] >= scores.shape[-1]:
            return
        with torch.no_grad():
            experts = mixed(indices.detach().reshape(-1, indices.shape[-1]) + 1).sum(1)
        if in_backward():
            self._compare(experts, scores.shape[-1])
            return
        running = running_modules()
        if not running:
            return
        found = scores_of(scores.grad_fn) if scores.grad_fn is not None and torch.is_grad_enabled() else None
        parameters = _own_scores(running[-1].module, scores.shape[-1]) if found is None else found.parameters
        clear = _clear(scores.detach(), indices.shape[-1])
        known = running[0].module.named_modules()
        module = next((name for name, each in known if each is running[-1].module), "")
        names = self._name(running[0], parameters)
        one = _Selection(scores.shape[-1], indices.shape[-1], experts, clear, found, names, module)
        # Groups of experts may be selected first, and a balancing loss may select again, outside of the module.
        if any(each.is_over and _have_one_origin(each.scores, found) for each in self._selections):
            return
        self._selections = [each for each in self._selections if not _have_one_origin(each.scores, found)] + [one]
        self._known.append(one)
        for each in reversed(running):
            each.when_ended.append(partial(_count_zeros, one))

    def _name(self, outermost: RunningModule, parameters: Sequence[Any]) -> list[str]:
        """Return the names of parameters; under FSDP modules hold others from one layer to the next."""
        if (
            self._names is None
            or self._names[0] is not outermost
            or not {*map(id, parameters)} <= self._names[1].keys()
        ):
            self._names = outermost, {id(one): name for name, one in outermost.module.named_parameters()}
        return [name for one in parameters if (name := self._names[1].get(id(one))) is not None]

    def _compare(self, experts: Tensor, choices: int) -> None:
        """Compare a recomputed selection with those of the forwards: it is one of them, or nearest to one of them."""
        alike = [one for one in self._known if one.choices == choices and one.experts.shape == experts.shape]
        if alike:
            apart = torch.stack([(one.experts != experts).sum() for one in alike])
            least = apart.argmin()
            self._again.append((alike[int(least)].name, apart[least], len(experts)))

    def _applied(self, run: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(*args, **kwargs)
        if self.attends and not torch.compiler.is_compiling() and running_modules() and not in_backward():
            attempt(self._note_attached, kind, args, result)
        return result

    def _note_attached(self, kind: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what a function is given beside the tensor that it returns: a number that receives a gradient."""
        if type(result) is not Tensor or result.grad_fn is None or result.numel() < 2 or not is_scripts(result.grad_fn):
            return
        numbers = [one for one in args if isinstance(one, Tensor) and one.numel() == 1 and one.grad_fn is not None]
        if numbers:
            self._attached.append((kind.__name__, result.grad_fn, numbers[0].grad_fn))

    def _look(self, root: Any) -> None:
        zone = {id(node): node for one in self._chosen() if one.scores is not None for node in one.scores.nodes}
        terms = terms_of(root)
        balancing = [one for one in terms if one.node is not None and only_from(one.node, zone)]
        main = [one for one in terms if one.node is not None and not any(one is other for other in balancing)]
        if not main:
            return  # the scores are the output
        shared = {place for one in main for place, _ in one.constants}
        for one in balancing:
            self._add(_Balancing(one, [constant for place, constant in one.constants if place not in shared]))
        reached = []
        for node, function in attached_numbers([one.node for one in main]):
            reached.append(node)
            for one in terms_of(node):
                if one.node is not None and only_from(one.node, zone):
                    self._add(_Balancing(one, [constant for _, constant in one.constants], function))
        self._loss = {
            "main": [[one.factor, _is_mean(one.node)] for one in main],
            "constant": sorted(_without_graph(self._roots)) if any(one.node is None for one in terms) else [],
            "dropped": sorted(
                {
                    name
                    for name, _, number in self._attached
                    if only_from(number, zone) and not any(number is one for one in reached)
                }
            ),
        }

    def _add(self, one: _Balancing) -> None:
        known = next((other for other in self._balancing if other.term.node is one.term.node), None)
        if known is not None:
            known.times += 1
            return
        self._balancing.append(one)
        output = one.term.output

        def arrived(cotangents: tuple[Tensor | None, ...]) -> None:
            given = cotangents[output] if output < len(cotangents) else None
            if given is not None:
                one.weights.append(given.detach().double().sum())

        self._handles.append(one.term.node.register_prehook(arrived))


def _without_graph(roots: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the names of numbers without a graph that modules hold as balancing losses: 0 is none."""
    for root in roots:
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                is_named = is_auxiliary(name) or "balanc" in name.lower()
                if is_named and isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and value:
                    yield f"{path}.{name}" if path else f"{type(root).__name__}.{name}"


def _routers(chosen: Sequence[_Selection]) -> dict[str, Facts]:
    routers: dict[str, Facts] = {}
    for one in chosen:
        known = routers.setdefault(
            one.name, {"tokens": 0, "choices": one.choices, "k": one.k, "parameters": one.parameters, "without": None}
        )
        known["tokens"] += len(one.experts)
        if one.without is not None:
            known["without"] = (known["without"] or 0) + int(one.without)
        if "experts" not in known:
            hashes, clear = one.experts[:_TOKENS].tolist(), one.clear.tolist()
            known["experts"] = [each if is_clear else None for each, is_clear in zip(hashes, clear, strict=True)]
    return routers


def _balancing_facts(one: _Balancing) -> Facts | None:
    weight = float(torch.stack(one.weights).sum()) if one.weights else 0.0
    if not math.isfinite(weight):
        return None
    return {"own": one.own, "weight": weight, "times": one.times, "function": one.function}


def _have_one_origin(one: Scores | None, other: Scores | None) -> bool:
    return one is not None and other is not None and {*map(id, one.origins)} == {*map(id, other.origins)}


def _own_scores(module: nn.Module, choices: int) -> list[nn.Parameter]:
    """Return the weights of a module that may score choices: the graph does not say so where it selects without one."""
    own = [one for one in module._parameters.values() if one is not None and one.requires_grad]
    return [one for one in own if one.dim() == 2 and choices in one.shape]


def _clear(scores: Tensor, k: int) -> Tensor:
    """Return of the first tokens whether their last expert is ahead of the next one by more than half of the digits."""
    first = scores.reshape(-1, scores.shape[-1])[:_TOKENS]
    best = first.sort(dim=1, descending=True).values
    return (best[:, k - 1] - best[:, k]) > math.sqrt(torch.finfo(scores.dtype).eps) * first.abs().amax(1)


def _count_zeros(one: _Selection, args: tuple[Any, ...], output: Any) -> None:
    """Count the tokens for which a module returns zeros: the innermost one that returns a row for each token."""
    tokens, one.is_over = len(one.experts), True
    if one.without is not None:
        return
    made = next((each for each in output if isinstance(each, Tensor)), None) if isinstance(output, tuple) else output
    given = next((each for each in args if isinstance(each, Tensor)), None)
    if not _has_rows(made, tokens) or not _has_rows(given, tokens):
        return
    rows, inputs = (each.detach().reshape(tokens, -1) for each in (made, given))
    if rows.shape != inputs.shape:
        return  # scores or weights, not what experts made of the tokens
    one.without = ((rows == 0).all(1) & (inputs != 0).any(1)).sum()


def _has_rows(value: Any, tokens: int) -> TypeGuard[Tensor]:
    return (
        type(value) is Tensor and value.is_floating_point() and value.dim() > 1 and value.shape[:-1].numel() == tokens
    )


def _is_mean(node: Any) -> bool:
    return type(node).__name__.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
