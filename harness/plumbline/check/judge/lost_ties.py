"""Whether parameters that should be one are trained apart."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import failed_observers, headline_note
from plumbline.core.finding import Finding

OBSERVER = "ties"
CHECK = "update"


def judge_lost_ties(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note for each tie that is lost; the first rank's are those of all."""
    yield from failed_observers(training, OBSERVER, CHECK)
    facts = training.ranks[0].facts.get(OBSERVER) or {}
    lost = [tuple(pair) for pair in facts.get("lost", ())]
    for first, second in dict.fromkeys(lost):
        yield headline_note(
            CHECK,
            f"{first} and {second} were one parameter when the model was built, but are two now, and each is "
            "trained separately. Tie them again before you create the optimizer: to_empty() and "
            "load_state_dict(assign=True) untie parameters.",
        )
    for first, second in dict.fromkeys(map(tuple, facts.get("declared", ()))):
        if {first, second} not in map(set, lost):
            yield headline_note(
                CHECK,
                f"The model's configuration has tie_word_embeddings, but {first} and {second} are two parameters, and "
                "each is trained separately. Call model.tie_weights() before you create the optimizer.",
            )
