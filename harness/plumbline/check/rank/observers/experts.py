"""Notes which experts get a forward's tokens, which tokens no expert receives, and how balancing losses count."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.balancing_losses import BalancingLosses, Scores, scores_of
from plumbline.evidence.projection import scrambled
from plumbline.recording.backward_passes import in_backward
from plumbline.recording.module_calls import running_modules
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames
from plumbline.recording.patching import attempt, undone_by, wrap
from plumbline.replay.applied_functions import follow_functions
from plumbline.replay.call import sample

NAME = "experts"

_KEPT = 512
"""The most selections that a recomputation is compared with."""

_TOKENS = 32
"""Number of tokens of a selection whose experts are compared with those on other ranks."""


@dataclass(eq=False)
class _Selection:
    """One selection. ``experts`` has a hash of each token's experts.

    ``clear``: for the first tokens, whether rounding cannot change their experts. ``values``: samples of the
    ``parameters`` if these are not known from the graph. ``biases``: tensors that may be added to the scores.
    ``is_over``: the selecting module has returned. ``without``: the number of tokens for which the module around it
    returned zeros, None if unknown. ``tokens``: a number for each of the first tokens that the outermost such module is
    given, None without.
    """

    choices: int
    k: int
    experts: Tensor
    clear: Tensor
    scores: Scores | None
    parameters: list[str]
    module: str
    values: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)
    is_over: bool = False
    without: Tensor | None = None
    tokens: Tensor | None = None
    is_reached: bool = False
    is_balanced: bool = False

    @property
    def name(self) -> str:
        """The name of the module with the first of the parameters, or of the selecting one if none is known."""
        return self.parameters[0].rpartition(".")[0] or self.parameters[0] if self.parameters else self.module


class ExpertObserver(Observer):
    """Notes for each backward pass the selections of the forwards before it that depend on trained scores.

    ``routers`` has, by module name: the numbers of ``tokens``, of ``choices``, and of selected choices ``k``;
    ``parameters``, the names of the parameters that compute the scores; ``moved``, those of them that are not in the
    graph but have changed; ``is_biased``, whether the module holds a number without a gradient for each expert;
    ``without``, the number of tokens that no expert received; ``reached``, whether a gradient of anything but the
    balancing losses reaches the scores, or they are not in the graph; and ``balanced``, whether a gradient of these
    losses does. For the first tokens it has ``experts``, a hash of each token's experts, None if rounding may decide,
    and ``given``, a number that identifies the token. ``rerouted`` has the recomputed selections that differ from those
    of the forward. The other facts are those of ``BalancingLosses``.
    """

    name = NAME

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self._selections: list[_Selection] = []
        self._known: deque[_Selection] = deque(maxlen=_KEPT)
        self._again: list[tuple[str, Tensor, int]] = []
        self._losses = BalancingLosses()
        self._following = ExitStack()
        self._paths = ModulePaths()
        self._values: dict[str, Tensor] = {}

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
        self._values.clear()

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Find the balancing losses in the graph while it exists."""
        self._again = []
        if chosen := self._chosen():
            scores = {id(node): node for one in chosen if one.scores is not None for node in one.scores.nodes}
            if len(roots) == 1:
                attempt(self._losses.look, roots[0].grad_fn, scores, self._names.roots)
            for one in chosen:
                nodes = set() if one.scores is None else set(map(id, one.scores.nodes))
                one.is_reached = one.scores is None or not nodes.isdisjoint(self._losses.reached)
                one.is_balanced = not nodes.isdisjoint(self._losses.balanced)

    def backward_ends(self, number: int) -> Facts | None:
        chosen = self._chosen()
        facts: Facts | None = None
        if chosen or self._again:
            facts = {
                "routers": self._routers(chosen),
                "rerouted": [
                    {"module": module, "tokens": int(count), "of": of}
                    for module, count, of in self._again
                    if int(count)
                ],
                **self._losses.facts,
            }
        self._forget()
        return facts

    def _forget(self) -> None:
        self._losses.forget()
        for one in self._selections:
            one.scores = None
        self._selections, self._again, self._paths = [], [], ModulePaths()

    def _chosen(self) -> list[_Selection]:
        return [one for one in self._selections if one.parameters]

    def _selected(self, scores: Tensor, indices: Tensor) -> None:
        if not self.attends or indices.shape[-1] >= scores.shape[-1]:
            return
        with torch.no_grad():
            experts = scrambled(indices.detach().reshape(-1, indices.shape[-1]) + 1).sum(1)
        if in_backward():
            self._compare(experts, scores.shape[-1])
            return
        running = running_modules()
        if not running:
            return
        found = scores_of(scores.grad_fn) if scores.grad_fn is not None and torch.is_grad_enabled() else None
        outermost, module, choices = running[0].module, running[-1].module, scores.shape[-1]
        parameters = _own_scores(module, choices) if found is None else found.parameters
        one = _Selection(
            choices=choices,
            k=indices.shape[-1],
            experts=experts,
            clear=_clear(scores.detach(), indices.shape[-1]),
            scores=found,
            parameters=self._paths.of_parameters(outermost, module, parameters),
            module=self._paths.of_module(outermost, module),
            values=[sample(each) for each in parameters] if found is None else [],
            biases=_biases(module, choices),
        )
        # Groups of experts may be selected first, and a balancing loss may select again, outside of the module.
        if any(each.is_over and _have_one_origin(each.scores, found) for each in self._selections):
            return
        for each in [each for each in self._selections if _have_one_origin(each.scores, found)]:
            self._selections.remove(each)
            each.scores = None  # it holds the graph
        self._selections.append(one)
        self._known.append(one)
        for each_running in reversed(running):
            each_running.when_ended.append(partial(_look_around, one))

    def _compare(self, experts: Tensor, choices: int) -> None:
        alike = [one for one in self._known if one.choices == choices and one.experts.shape == experts.shape]
        if alike:
            apart = torch.stack([(one.experts != experts).sum() for one in alike])
            least = apart.argmin()
            self._again.append((alike[int(least)].name, apart[least], len(experts)))

    def _applied(self, run: Any, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(*args, **kwargs)
        if self.attends and not torch.compiler.is_compiling() and running_modules() and not in_backward():
            attempt(self._losses.note_function, kind, args, result)
        return result

    def _routers(self, chosen: Sequence[_Selection]) -> dict[str, Facts]:
        routers: dict[str, Facts] = {}
        for one in chosen:
            known = routers.setdefault(
                one.name,
                {
                    "tokens": 0,
                    "choices": one.choices,
                    "k": one.k,
                    "parameters": one.parameters,
                    "moved": self._moved(one),
                    "is_biased": any(each.grad is None for each in one.biases),
                    "without": None,
                    "reached": False,
                    "balanced": False,
                },
            )
            known["reached"] |= one.is_reached
            known["balanced"] |= one.is_balanced
            known["tokens"] += len(one.experts)
            if one.without is not None:
                known["without"] = (known["without"] or 0) + int(one.without)
            if "experts" not in known:
                hashes, clear = one.experts[:_TOKENS].tolist(), one.clear.tolist()
                known["experts"] = [each if is_clear else None for each, is_clear in zip(hashes, clear, strict=True)]
                known["given"] = None if one.tokens is None else one.tokens.tolist()
        return routers

    def _moved(self, one: _Selection) -> list[str]:
        """Return the names of parameters that changed without being in the graph, such as the means of a codebook."""
        moved = []
        for name, values in zip(one.parameters, one.values, strict=False):
            before = self._values.setdefault(name, values)
            if before.shape == values.shape and not torch.equal(before, values):
                moved.append(name)
        return moved


def _have_one_origin(one: Scores | None, other: Scores | None) -> bool:
    return one is not None and other is not None and {*map(id, one.origins)} == {*map(id, other.origins)}


def _own_scores(module: nn.Module, choices: int) -> list[nn.Parameter]:
    """Return a module's weights that may score choices, for selections without a graph."""
    own = [one for one in module._parameters.values() if one is not None and one.requires_grad]
    return [one for one in own if one.dim() == 2 and choices in one.shape]


def _biases(module: nn.Module, choices: int) -> list[Tensor]:
    """Return tensors with one number per expert, which may balance experts in place of a loss."""
    buffers = [one for each in (module, *module.children()) for one in each._buffers.values()]
    own = (*buffers, *module._parameters.values())
    return [one for one in own if one is not None and one.shape == (choices,)]


def _clear(scores: Tensor, k: int) -> Tensor:
    """Return for the first tokens whether the last selected expert leads the next by over half of the digits."""
    first = scores.reshape(-1, scores.shape[-1])[:_TOKENS]
    best = first.sort(dim=1, descending=True).values
    return (best[:, k - 1] - best[:, k]) > math.sqrt(torch.finfo(scores.dtype).eps) * first.abs().amax(1)


def _look_around(one: _Selection, args: tuple[Any, ...], output: Any) -> None:
    """Note the inputs and outputs of a module around a selection, if they have a row for each token.

    The tokens are those given to the outermost such module. A token reaches no expert if the innermost one returns
    zeros.
    """
    tokens, one.is_over = len(one.experts), True
    given = next((each for each in args if isinstance(each, Tensor)), None)
    if not _has_rows(given, tokens):
        return
    inputs = given.detach().reshape(tokens, -1)
    one.tokens = inputs[:_TOKENS].double() @ torch.arange(inputs.shape[1], device=inputs.device).double().cos()
    made = next((each for each in output if isinstance(each, Tensor)), None) if isinstance(output, tuple) else output
    if one.without is not None or not _has_rows(made, tokens):
        return
    rows = made.detach().reshape(tokens, -1)
    if rows.shape == inputs.shape:  # otherwise they are scores or weights, not outputs of experts
        one.without = ((rows == 0).all(1) & (inputs != 0).any(1)).sum()


def _has_rows(value: Any, tokens: int) -> TypeGuard[Tensor]:
    return (
        type(value) is Tensor and value.is_floating_point() and value.dim() > 1 and value.shape[:-1].numel() == tokens
    )


class ModulePaths:
    """Names by id, of the model asked about last. The model is searched again for a module that is not known."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: dict[int, tuple[nn.Module, str]] = {}

    def of_module(self, model: nn.Module, module: nn.Module) -> str:
        """Return the name of a module in a model, "" for the model itself and for modules outside of it."""
        if self._model is not model or id(module) not in self._modules:
            self._go_through(model)
        return self._modules.get(id(module), (module, ""))[1]

    def of_parameters(self, model: nn.Module, near: nn.Module, parameters: Sequence[Any]) -> list[str]:
        """Return the names of those parameters that are in a model, after a first look at the module ``near``.

        Under FSDP, modules hold different parameters from one layer to the next.
        """
        path = self.of_module(model, near)
        known = {id(one): name for name, one in near.named_parameters(path)}
        if not {*map(id, parameters)} <= known.keys():
            known = {id(one): name for name, one in model.named_parameters()}
        return [known[id(one)] for one in parameters if id(one) in known]

    def _go_through(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {id(one): (one, name) for name, one in model.named_modules()}


_PLACES = {"topk": 2, "argmax": 1, "max": 1}
"""The place of the dimension among the arguments of the functions that select."""

Selected = Callable[[Tensor, Tensor], None]
"""Takes scores (…, choices), and the indices (…, k) that were selected in the last dimension."""


_WATCHING: list[Selected] = []


@contextmanager
def watch_selections(selected: Selected) -> Iterator[None]:
    """Tell ``selected`` of each selection along the last dimension inside the block, outside of compiled code."""
    _WATCHING.append(selected)
    try:
        yield
    finally:
        _WATCHING.remove(selected)


def install_watch() -> None:
    """Wrap the functions of torch that select."""
    for owner in (torch, torch.Tensor):
        for name in _PLACES:
            wrap(owner, name, partial(_around_selection, name))
    for name in _PLACES:
        attempt(_known_to_scripts, name)


def _around_selection(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    if _WATCHING and not torch.compiler.is_compiling():
        attempt(_follow_selection, name, args, kwargs, result)
    return result


def _follow_selection(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    scores = args[0] if args else kwargs.get("input")
    if type(scores) is not Tensor or not scores.is_floating_point() or scores.dim() < 2:
        return
    default = -1 if name == "topk" else None
    dim = kwargs["dim"] if "dim" in kwargs else args[_PLACES[name]] if len(args) > _PLACES[name] else default
    if type(dim) is not int or dim % scores.dim() != scores.dim() - 1:
        return
    indices = result if name == "argmax" else result[1]
    for selected in _WATCHING:
        selected(scores, indices if indices.dim() == scores.dim() else indices.unsqueeze(-1))


def _known_to_scripts(name: str) -> None:
    """Let the TorchScript compiler take the wrapper for the same operator as torch's own function."""
    builtins: Any = torch.jit._builtins
    function = getattr(torch, name)
    builtins._register_builtin(function, f"aten::{name}")
    # The table knows functions by their ids: once this one is freed, another may have the same.
    undone_by(lambda: builtins._get_builtin_table().pop(id(function), None))
