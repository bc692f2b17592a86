"""Checks that packed documents and padding are kept apart by the model, in labels and in positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import amount, failed_observers, headline_note, information, not_judged
from plumbline.check.judge.rank_weights import LAYOUT, forward_communicates
from plumbline.core.finding import Finding
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import in_two_digits, percent

CHECK = "documents"

_FOR_NOTHING_ELSE = ("cu_seq", "cu_doc")
"""Prefixes of arguments that only say where the sequences of a batch begin. A model of tokens that is given one and
mixes the sequences is wrong. Other arguments are no proof: the model or the loss may read document numbers, position
ids may restart, and vectors, such as those of images, may be divided into windows that are meant to see each other."""

_OF_SEQUENCES = ("context", "context_parallel", "cp", "seq", "sequence", "sequence_parallel", "sp", "ulysses")
"""Names of the mesh dimensions over which sequences are divided."""

_NOTICED = 1e-3
"""A limit that messages do not mention: real influence between documents moves outputs by more."""

_ENDS = 7
"""How often the loss must count the tokens at the ends of parts before it matters that it never counts those after
them: if both were equally likely, the chance of that would be below 1 %."""

_PARTS = {"documents": "one document", "padding": "padding"}

_LABELS = {
    "seams": "The batch declares documents ({by}), but the last token of a document is trained to predict the first "
    "token of the next one, at {terms} of {of} document boundaries. Ignore the labels there.",
    "padded": "The batch has padding ({by}), but the loss counts {terms} of {of} padded positions. Ignore the labels "
    "there.",
}


def judge_documents(training: RecordedTraining) -> Iterator[Finding]:
    """Yield whether documents and padding are kept apart, where a batch declares them."""
    yield from failed_observers(training, CHECK, CHECK)
    facts = [(rank.rank, own) for rank in training.ranks if (own := rank.noted(CHECK))]
    for kind in ("documents", "padding"):
        yield from _apart(kind, [(rank, own[kind]) for rank, own in facts if kind in own])
    # Documents that see each other are one text, so the next document's first token is a right label.
    mixed = any((own.get("documents") or {}).get("moved") for _, own in facts)
    yield from _labels([own for _, own in facts], ["padded"] if mixed else ["seams", "padded"])
    yield from _parts(training)
    yield from _seams_of_ranks(training)
    if any(not own["places"]["restart"] for _, own in facts if "places" in own):
        by = next(own["places"]["by"] for _, own in facts if "places" in own)
        yield information(
            CHECK,
            f"The batch declares documents ({by}), but position ids continue from one document to the next. This makes "
            "no difference to rotary embeddings. With absolute position embeddings, restart the ids at each document.",
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
            others = "other documents" if kind == "documents" else "other tokens"
            limit = max(one["limit"] for _, one in noted)
            least = f" by more than {percent(limit)} of its size" if limit > _NOTICED else ""
            what = "output or gradient" if all(one["gradients"] for _, one in noted) else "output"
            yield passed(CHECK, f"changing {_PARTS[kind]} changes no {what} of {others}{least} ({by})")
        return
    where = f"{moved['module'] or 'the model'} ({moved['kind']})"
    if moved["of_gradients"]:
        yield _gradients(kind, rank, facts, where)
        return
    if moved["shares"]:
        first = f"The first module in which changing {_PARTS[kind]} changes outputs of other tokens is {where}"
        why = "which computes statistics over all tokens, or shares experts among them"
        yield information(CHECK, f"The batch declares {kind} ({by}). {first}, {why}.")
        return
    if kind == "padding" and moved["of_zeros"]:
        yield information(
            CHECK,
            f"The batch has padding ({by}) whose vectors are zero. Other values there would change the output of "
            f"{where} at other positions. This is harmless if the module itself pads with zeros, as a convolution "
            "does.",
        )
        return
    if kind == "padding":
        yield headline_note(
            CHECK,
            f"The batch has padding ({by}), but other tokens depend on it: changing the padding changes the output of "
            f"{where} at {amount(moved['positions'])} of {amount(moved['of'])} other positions, by up to "
            f"{in_two_digits(moved['share'])} of its size. Pass the mask to this module.",
        )
        return
    observed = (
        f"the batch declares documents ({by}), but they influence each other: changing the first document changes the "
        f"output of {where} at {amount(moved['positions'])} of {amount(moved['of'])} positions of the other "
        f"documents, by up to {in_two_digits(moved['share'])} of its size"
    )
    hint = "mask the attention between documents, or pass the boundaries to the kernel that computes it"
    if _is_certain(by, facts):
        yield failed_with_hint(
            CHECK, observed, hint, cause="documents-see-each-other", family="batch-coupling", step=0, rank=rank
        )
    elif moved["embeds"]:
        why = "The model also embeds the document numbers, so this may be intended."
        yield information(CHECK, f"{observed[0].upper()}{observed[1:]}. {why}")
    else:
        yield headline_note(CHECK, f"{observed[0].upper()}{observed[1:]}. If this is not intended, {hint}.")


def _gradients(kind: str, rank: int, facts: Facts, where: str) -> Finding:
    by, moved = facts["by"], facts["moved"]
    observed = (
        f"the batch declares {kind} ({by}), and changing {_PARTS[kind]} changes no output of other tokens, but the "
        f"gradients of {amount(moved['positions'])} of {amount(moved['of'])} other tokens, first in the backward pass "
        f"of {where}, by up to {in_two_digits(moved['share'])} of their size"
    )
    seeing = "the first document" if kind == "documents" else "padding"
    hint = (
        f"check whether {seeing} depends on these tokens, and whether the backward pass applies the same mask as the "
        "forward pass"
    )
    if _is_certain(by, facts):
        return failed_with_hint(
            CHECK, observed, hint, cause="gradients-of-other-documents", family="batch-coupling", step=0, rank=rank
        )
    return headline_note(CHECK, f"{observed[0].upper()}{observed[1:]}: {hint}.")


def _is_certain(by: str, facts: Facts) -> bool:
    return by.lower().startswith(_FOR_NOTHING_ELSE) and not facts["vectors"]


def _parts(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note if a mesh divides sequences over ranks, but the position ids of all ranks begin at 0."""
    sizes = _dimensions_of_sequences(training)
    facts = [rank.noted(CHECK) for rank in training.ranks]
    packed = any(one.get("documents") for one in facts)
    # If all ranks receive the same whole sequence, the model divides it itself.
    tokens = {one["tokens"] for one in facts if one.get("begins") == 0}
    if sizes and not packed and len(tokens) == training.world_size:
        name, size = next(iter(sizes.items()))
        yield headline_note(
            CHECK,
            f"The mesh has {size} ranks in dimension {name!r}, but the position ids of all "
            "ranks begin at 0. Start each rank's position ids at the offset of its part of the sequence, unless the "
            "model adds it.",
        )


def _dimensions_of_sequences(training: RecordedTraining) -> Mapping[str, int]:
    dimensions: Mapping[str, int] = training.ranks[0].noted(LAYOUT).get("dimensions", {})
    return {name: size for name, size in dimensions.items() if name in _OF_SEQUENCES}


def _seams_of_ranks(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a failure if ranks have parts of the same sequences, and no loss term is at the end of a continued part.

    Ranks that read their own sequences can have such position ids, too, but they do not exchange keys and values. A
    script that leaves out single tokens inside the parts may do so at the ends of documents, and parts may end there.
    """
    if not (forward_communicates(training) or _dimensions_of_sequences(training)):
        return
    every: dict[int, list[dict[tuple[int, int], tuple[int, int]]]] = {}
    leaves_out = False
    for rank in training.ranks:
        own: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        for number, begin, following, after, before, single in rank.noted(CHECK).get("pieces", ()):
            own.setdefault(number, {})[begin, following] = after, before
            leaves_out = leaves_out or single > 0
        for number, pieces in own.items():
            every.setdefault(number, []).append(pieces)
    passes = [pieces for pieces in every.values() if len(pieces) == len(training.ranks)]
    ends = [list(_continued(pieces)) for pieces in passes]
    of = sum(before for one in ends for _, before in one)
    if of < _ENDS or not all(ends) or any(after for one in ends for after, _ in one):
        return
    observed = (
        "ranks have parts of the same sequences, because position ids continue from one rank to another, but the "
        f"loss never counts the prediction of the first token of another rank's part; it counts {of} "
        "predictions of the last token of a part"
    )
    hint = "shift labels before sequences are divided, so that the last token of a part has its label"
    if leaves_out:
        yield headline_note(CHECK, f"{observed[0].upper()}{observed[1:]}. Unless documents end there, {hint}.")
    else:
        yield failed_with_hint(CHECK, observed, hint, cause="tokens-at-seams-missing", family="data")


def _continued(ranks: Sequence[dict[tuple[int, int], tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield the counts at the end of each part that a rank with other parts continues."""
    for own in ranks:
        others = {begin for one in ranks if one.keys() != own.keys() for begin, _ in one}
        yield from (counts for (_, following), counts in own.items() if following in others)


def _labels(facts: list[Facts], kinds: Sequence[str]) -> Iterator[Finding]:
    for kind in kinds:
        said, noted = _LABELS[kind], [own[kind] for own in facts if kind in own]
        terms, of = (sum(one[name] for one in noted) for name in ("terms", "of"))
        if terms:
            yield headline_note(CHECK, said.format(by=noted[0]["by"], terms=amount(terms), of=amount(of)))
