"""Whether documents packed into one sequence, and padding, are kept apart: by the model, in labels and in positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import amount, failed_observers, headline_note, information, not_judged
from plumbline.check.judge.rank_layout import OBSERVER
from plumbline.core.finding import Finding
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import percent

CHECK = "documents"

_FOR_NOTHING_ELSE = ("cu_seq", "cu_doc")
"""Arguments that say where the sequences of a batch begin and nothing else: a model of tokens that is given one and
mixes these is wrong. Numbers of documents may be read by the model, or be there for the loss; position ids may begin
again, and vectors, as those of images, be divided into windows, where all are meant to see each other."""

_OF_SEQUENCES = ("context", "context_parallel", "cp", "seq", "sequence", "sequence_parallel", "sp", "ulysses")
"""Names of the mesh dimensions over which sequences are divided."""

_NOTICED = 1e-3
"""A limit that is not told: what documents share moves them by more."""

_PARTS = {"documents": "one document", "padding": "padding"}

_LABELS = {
    "seams": "The batch declares documents ({by}), but the last token of a document is trained to predict the first "
    "token of the next one, at {terms} of {of} seams. Ignore the labels there.",
    "padded": "The batch has padding ({by}), but the loss counts {terms} of {of} padded positions. Ignore the labels "
    "there.",
}


def judge_documents(training: RecordedTraining) -> Iterator[Finding]:
    """Yield whether documents and padding are kept apart, where a batch declares them."""
    yield from failed_observers(training, CHECK, CHECK)
    facts = [(rank.rank, own) for rank in training.ranks if (own := rank.facts.get(CHECK) or {})]
    for kind in ("documents", "padding"):
        yield from _apart(kind, [(rank, own[kind]) for rank, own in facts if kind in own])
    # Documents that see each other, whatever that is meant for, are one text: the next token is what follows.
    mixed = any((own.get("documents") or {}).get("moved") for _, own in facts)
    yield from _labels([own for _, own in facts], ["padded"] if mixed else ["seams", "padded"])
    yield from _parts(training)
    if any(not own["places"]["restart"] for _, own in facts if "places" in own):
        by = next(own["places"]["by"] for _, own in facts if "places" in own)
        yield information(
            CHECK,
            f"The batch declares documents ({by}), but position ids go on from one to the next. Rotary embeddings do "
            "not notice; embeddings of absolute positions do.",
        )


def _apart(kind: str, noted: list[tuple[int, Facts]]) -> Iterator[Finding]:
    if not noted:
        return
    rank, facts = next(((rank, one) for rank, one in noted if one["moved"]), noted[0])
    by, moved = facts["by"], facts["moved"]
    if moved is None:
        if facts["why"]:
            yield not_judged(
                CHECK, f"the batch declares {kind} ({by}), but the forward cannot be run again: {facts['why']}"
            )
        else:
            others = "no other one" if kind == "documents" else "nothing else"
            limit = max(one["limit"] for _, one in noted)
            least = f" by more than {percent(limit)} of its size" if limit > _NOTICED else ""
            also = ", nor its gradients" if all(one["gradients"] for _, one in noted) else ""
            yield passed(CHECK, f"a change of {_PARTS[kind]} moves {others}{also}{least} ({by})")
        return
    where = f"{moved['module'] or 'the model'} ({moved['kind']})"
    if moved["of_gradients"]:
        yield _gradients(kind, rank, facts, where)
        return
    if moved["shares"]:
        first = f"A change of {_PARTS[kind]} moves others first in {where}"
        why = "which takes statistics of all tokens or shares experts among them"
        yield information(CHECK, f"The batch declares {kind} ({by}). {first}, {why}.")
        return
    if kind == "padding" and moved["of_zeros"]:
        yield information(
            CHECK,
            f"The batch has padding ({by}), whose vectors are zeros. If they were not, the output of {where} would "
            "move at other positions, as that of a convolution does, which pads with zeros itself.",
        )
        return
    if kind == "padding":
        yield headline_note(
            CHECK,
            f"The batch has padding ({by}), but other tokens see it: a change of padding moves the output of {where} "
            f"at {amount(moved['positions'])} of {amount(moved['of'])} other positions, by up to "
            f"{moved['share']:.2g} of its size. Pass the mask on to this module.",
        )
        return
    observed = (
        f"the batch declares documents ({by}), but they see each other: a change of the first one moves the output of "
        f"{where} at {amount(moved['positions'])} of {amount(moved['of'])} positions of the others, by up to "
        f"{moved['share']:.2g} of its size"
    )
    hint = "mask the attention between documents, or pass the boundaries on to the kernel that computes it"
    if _is_certain(by, facts):
        yield failed_with_hint(
            CHECK, observed, hint, cause="documents-see-each-other", family="batch-coupling", step=0, rank=rank
        )
    elif moved["embeds"]:
        yield information(CHECK, f"{observed[0].upper()}{observed[1:]}. It also looks vectors up by their numbers.")
    else:
        yield headline_note(CHECK, f"{observed[0].upper()}{observed[1:]}. If that is not meant, {hint}.")


def _gradients(kind: str, rank: int, facts: Facts, where: str) -> Finding:
    """Return the finding about tokens whose gradients depend on a document, or padding, that their outputs ignore."""
    by, moved = facts["by"], facts["moved"]
    observed = (
        f"the batch declares {kind} ({by}), and a change of {_PARTS[kind]} moves no output, but the gradients of "
        f"{amount(moved['positions'])} of {amount(moved['of'])} other tokens, first behind {where}, by up to "
        f"{moved['share']:.2g} of their size"
    )
    seeing = "the first document" if kind == "documents" else "padding"
    hint = f"either {seeing} sees them, or the backward pass does not keep apart what the forward does"
    if _is_certain(by, facts):
        return failed_with_hint(
            CHECK, observed, hint, cause="gradients-of-other-documents", family="batch-coupling", step=0, rank=rank
        )
    return headline_note(CHECK, f"{observed[0].upper()}{observed[1:]}: {hint}.")


def _is_certain(by: str, facts: Facts) -> bool:
    return by.lower().startswith(_FOR_NOTHING_ELSE) and not facts["vectors"]


def _parts(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note where ranks that a mesh gives parts of a sequence number all of these from 0."""
    dimensions = [rank.facts.get(OBSERVER, {}).get("dimensions", {}) for rank in training.ranks]
    names = [name for name in dimensions[0] if name in _OF_SEQUENCES]
    facts = [rank.facts.get(CHECK) or {} for rank in training.ranks]
    packed = any(one.get("documents") for one in facts)
    # Where ranks are given the same tokens, as a whole, the model divides these itself.
    tokens = {one["tokens"] for one in facts if one.get("begins") == 0}
    if names and not packed and len(tokens) == training.world_size:
        yield headline_note(
            CHECK,
            f"The mesh has {dimensions[0][names[0]]} ranks in dimension {names[0]!r}, but the position ids of all "
            "ranks begin at 0. Number each rank's part of a sequence from where it begins in the whole one, unless the "
            "model does.",
        )


def _labels(facts: list[Facts], kinds: Sequence[str]) -> Iterator[Finding]:
    for kind in kinds:
        said, noted = _LABELS[kind], [own[kind] for own in facts if kind in own]
        terms, of = (sum(one[name] for one in noted) for name in ("terms", "of"))
        if terms:
            yield headline_note(CHECK, said.format(by=noted[0]["by"], terms=amount(terms), of=amount(of)))
