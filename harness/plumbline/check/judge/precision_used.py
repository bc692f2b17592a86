"""Reports the precision of the training, and whether every rank used it."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, information, noted, side_by_side
from plumbline.core.finding import Finding
from plumbline.evidence.training_record import step_copies
from plumbline.report.text import listed

OBSERVER = "precision"


def judge_precision_used(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a failure if a rank's precision differs from the first rank's, and one finding with the precision used."""
    if (different := _differ(training)) is not None:
        yield different
    steps = list(noted(training, OBSERVER))
    if steps:
        yield information("precision", "; ".join(_in_words(training, steps)))


def _differ(training: RecordedTraining) -> Finding | None:
    """Find ranks with copies of one model, on the same kind of device, that differ in every recorded step.

    A difference in some steps is allowed: one rank alone may evaluate now and then, in any precision.
    """
    seen: dict[tuple[int, int], list[tuple[ObserverFacts, ObserverFacts, str]]] = {}
    for ranks in side_by_side(training, OBSERVER):
        first, *others = ranks.values()
        for other in others:
            if step_copies((first, other)) and first.facts["devices"] == other.facts["devices"]:
                pairs = seen.setdefault((other.rank, other.step.optimizer), [])
                pairs.append((first, other, _difference(first, other)))
    for pairs in seen.values():
        first, other, what = pairs[0]
        if all(each for _, _, each in pairs):
            return other.failed(
                "precision",
                f"{what} on rank {first.rank} and rank {other.rank}, respectively",
                "use the same precision on all ranks",
                cause="precisions-differ",
                family="amp",
            )
    return None


def _difference(one: ObserverFacts, other: ObserverFacts) -> str:
    """Return in words what differs, "" if nothing does. How often autocast is entered may differ."""
    for what in ("parameters", "gradients"):
        left, right = one.facts[what], other.facts[what]
        if left and right and set(left) != set(right):
            return f"{what} are {_list(left)} and {_list(right)}"
    if _real(one.facts["autocast"]) != _real(other.facts["autocast"]):
        return f"autocast is {_list(_real(one.facts['autocast']))} and {_list(_real(other.facts['autocast']))}"
    return ""


def _real(autocast: Facts) -> set[str]:
    return {name for name in autocast if not name.endswith(" off")}


def _list(names: object) -> str:
    return listed(sorted(names)) or "none" if isinstance(names, (dict, set)) else str(names)


def _in_words(training: RecordedTraining, steps: list[ObserverFacts]) -> Iterator[str]:
    facts = [one.facts for one in steps]
    yield f"parameters are {_list({name for one in facts for name in one['parameters']})}"
    yield f"gradients are {_list({name for one in facts for name in one['gradients']})}"
    yield f"autocast: {_list(set().union(*(_real(one['autocast']) for one in facts)))}"
    inside = any(each.noted(OBSERVER).get("autocast") for one in steps for each in one.step.passes)
    if inside:
        yield "backward passes begin inside autocast"
    process = training.ranks[0].noted(OBSERVER)
    flags = process.get("flags") or {}
    if flags.get("matmul", "highest") not in ("highest", "ieee", "none", None):
        yield f"float32 matrix products use the precision “{flags['matmul']}”"
    if hooks := process.get("hooks"):
        yield f"gradients pass through the communication hook {listed(hooks)}"
