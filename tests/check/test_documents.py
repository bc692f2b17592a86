"""Packed documents and padding: a model that mixes them is named with its module, and a right one is not accused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.verdict.verdict import Answer, answer_of

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ROWS, LENGTH, VOCABULARY = 2, 3, 12, 20


class Attention(nn.Module):
    """Single-head attention, causal or not, restricted by ``mask`` (rows, positions, positions)."""

    def __init__(self, causal, masked=True):
        super().__init__()
        self.qkv, self.out, self.causal, self.masked = nn.Linear(8, 24), nn.Linear(8, 8), causal, masked

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        allowed = (allowed.tril() if self.causal else allowed).expand(len(x), -1, -1)
        if self.masked and mask is not None:
            allowed = allowed & mask
        allowed = allowed | torch.eye(x.shape[1], dtype=torch.bool)
        return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed))


class Block(nn.Module):
    def __init__(self, *, causal=True, masked=True):
        super().__init__()
        self.attention, self.norm = Attention(causal, masked), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, mask):
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class Net(nn.Module):
    """Takes tokens and document or padding declarations, and masks its attention accordingly."""

    def __init__(self, masked=(True, True), causal=True, after=None):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.blocks = nn.ModuleList(Block(causal=causal, masked=one) for one in masked)
        self.after, self.head = after, nn.Linear(8, VOCABULARY)

    def run(self, input_ids, mask, position_ids=None):
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
        x = self.embedding(input_ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x if self.after is None else self.after(x))


class ByIds(Net):
    def forward(self, input_ids, document_ids, position_ids=None):
        return self.run(input_ids, document_ids.unsqueeze(2) == document_ids.unsqueeze(1), position_ids)


class ByPositions(Net):
    def forward(self, input_ids, position_ids):
        documents = (position_ids == 0).cumsum(1)
        return self.run(input_ids, documents.unsqueeze(2) == documents.unsqueeze(1), position_ids)


class ByBoundaries(Net):
    def forward(self, input_ids, cu_seqlens):
        documents = torch.searchsorted(cu_seqlens, torch.arange(input_ids.shape[1]), right=True)
        return self.run(input_ids, (documents.unsqueeze(1) == documents).unsqueeze(0))


class ByMask(Net):
    def forward(self, input_ids, attention_mask):
        return self.run(input_ids, attention_mask.bool().unsqueeze(1))


class ByEmbedding(Net):
    """Reads several documents next to each other, distinguished by embeddings."""

    def forward(self, input_ids, doc_ids):
        return self.run(input_ids, None, doc_ids)


class OfZeros(nn.Module):
    """A convolution over tokens; padding tokens are zeros, like its own padding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8, padding_idx=0), nn.Linear(8, VOCABULARY)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, input_ids, attention_mask):
        return self.head(self.convolution(self.embedding(input_ids).mT).mT)


class Classifier(ByMask):
    """Averages over a row, including padding if ``careless``."""

    def __init__(self, careless, **options):
        super().__init__(**options)
        self.careless = careless

    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        weights = attention_mask.unsqueeze(2).float()
        return outputs.mean(1) if self.careless else (outputs * weights).sum(1) / weights.sum(1)


class Shared(nn.Module):
    """Sends tokens to the better of two experts, which have a capacity shared by all documents."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            kept = (chosen == number) & ((chosen == number).cumsum(1) <= 4)
            outputs = outputs + expert(x) * weights * kept
        return x + outputs


class Chosen(Shared):
    """Lets each expert choose tokens from all documents."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best = scores.topk(2, dim=1)
        weights = torch.zeros_like(scores).scatter(1, best.indices, best.values)
        return x + sum(weights[..., number, None] * expert(x) for number, expert in enumerate(self.experts))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x.reshape(-1, 8)).reshape(x.shape)


class NormedByChannel(Normed):
    def forward(self, x):
        return x + self.norm(x.mT).mT


class Quantised(nn.Module):
    """Rounds to 8 bits, with one scale for all tokens."""

    def forward(self, x):
        scale = x.detach().abs().max() / 127
        return x + ((x / scale).round() * scale - x).detach()


class Sparse(nn.Module):
    """Attends to the four best tokens, from all documents."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        return x + scores.masked_fill(scores < scores.topk(4).values[..., -1:], -1e9).softmax(-1) @ v


class Behind(nn.Module):
    """Sums all tokens, and then sends them to experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 2)

    def forward(self, x):
        weights = self.gate(x.cumsum(1) / 4).softmax(-1)
        return x * weights.topk(1).values


class Forgetful(torch.autograd.Function):
    """Attention that keeps documents apart in the forward, but not in the backward."""

    @staticmethod
    def forward(ctx, x, mask):
        weights = (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1)
        ctx.save_for_backward(x)
        return weights.detach() @ x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (x @ x.mT).tril().softmax(-1).mT @ gradient, None


class ForgottenInBackward(nn.Module):
    def forward(self, x):
        return x + Forgetful.apply(x, OF_ONE & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


class SeesLaterOnes(nn.Module):
    """Keeps later documents from seeing earlier ones, but not the other way round."""

    def forward(self, x):
        return x + (x @ x.mT).where(NUMBERS[:, None] <= NUMBERS, -torch.inf).softmax(-1) @ x


class Faint(nn.Module):
    """Has dropout, and adds a little of all tokens."""

    def forward(self, x):
        return functional.dropout(x, 0.1) + 0.01 * x.cumsum(1)


NUMBERS = torch.tensor([0] * 4 + [1] * 5 + [2] * 3)
OF_ONE = NUMBERS[:, None] == NUMBERS
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 6 + [1] * 6, [0] * 12])
POSITIONS = torch.tensor([[*range(4), *range(5), *range(3)], [*range(6), *range(6)], [*range(12)]])
RIGHT_PADDED = torch.tensor([[1] * 12, [1] * 8 + [0] * 4, [1] * 5 + [0] * 7])


def fit(make, declared, *, seams=False, padded=False, pooled=False, another=False, autocast=False):
    """Train a model that predicts the next token, with labels at seams and at padding or not.

    ``another``: labels are from another sequence, like a decoder's.
    """
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
        if "attention_mask" in declared:
            tokens[declared["attention_mask"] == 0] = 0
        optimizer.zero_grad()
        if "cu_seqlens" in declared:
            tokens = tokens[:1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(tokens, **declared)
        if another:
            labels = torch.randint(1, VOCABULARY, tokens.shape)
        elif pooled:
            labels = torch.randint(VOCABULARY, (ROWS,))
        else:
            labels = functional.pad(tokens[:, 1:], (0, 1), value=-100)
            documents, mask = declared.get("document_ids"), declared.get("attention_mask")
            if documents is None and "position_ids" in declared:
                documents = (declared["position_ids"] == 0).cumsum(1)
            if documents is not None and not seams:
                labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
            if "cu_seqlens" in declared and not seams:
                labels[:, declared["cu_seqlens"][1:] - 1] = -100
            if mask is not None and not padded:
                labels[mask == 0] = -100
                labels[:, :-1][mask[:, 1:] == 0] = -100
        functional.cross_entropy(outputs.flatten(0, -2), labels.flatten()).backward()
        optimizer.step()


IDS, PLACES, MASK = {"document_ids": DOCUMENTS}, {"position_ids": POSITIONS}, {"attention_mask": RIGHT_PADDED}
LEFT, BOUNDARIES = {"attention_mask": RIGHT_PADDED.flip(1)}, {"cu_seqlens": torch.tensor([0, 4, 9, 12])}


def behind(module, **options):
    """Return a training whose attention keeps documents apart, before a module that may not."""

    def train():
        fit(lambda: ByBoundaries(after=module()), BOUNDARIES, **options)

    return train


WRONG = {
    # NVIDIA-NeMo/Megatron-Bridge#2952: the middle stages do not receive the boundaries
    "boundaries that a layer lacks": (
        partial(fit, partial(ByBoundaries, (True, False)), BOUNDARIES),
        "blocks.1.attention (Attention)",
    ),
    "boundaries that attention to few tokens lacks": (behind(Sparse), "after (Sparse)"),
    "boundaries that sums before a router lack": (behind(Behind), "after (Behind)"),
    "boundaries that little crosses": (behind(Faint, autocast=True), "after (Faint)"),
}


@pytest.mark.parametrize(("train", "where"), WRONG.values(), ids=WRONG.keys())
def test_sequences_that_see_each_other_are_wrong_and_the_first_layer_is_named(plumbline, train, where):
    checked = plumbline.check(train, ranks=1, steps=STEPS)
    assert answer_of(checked.trainings[0]) is Answer.WRONG
    (found,) = [one for one in checked.findings if one.outcome.is_bad]
    assert (found.check, found.cause) == ("documents", "documents-see-each-other")
    assert "the batch declares documents (cu_seqlens), but they influence each other" in found.message
    assert f"changes the output of {where} at" in found.message


@pytest.mark.parametrize("module", [ForgottenInBackward, SeesLaterOnes])
def test_gradients_that_depend_on_another_sequence_are_wrong(plumbline, module):
    checked = plumbline.check(behind(module), ranks=1, steps=STEPS)
    (found,) = [one for one in checked.findings if one.outcome.is_bad]
    assert (found.check, found.cause) == ("documents", "gradients-of-other-documents")
    assert f"gradients of 8 of 8 other tokens, first in the backward pass of after ({module.__name__})" in found.message


@pytest.fixture
def notes(plumbline):
    """Return a function that trains, and returns the notes on documents and the check's findings."""

    def notes(train):
        checked = plumbline.check(train, ranks=1, steps=STEPS)
        checked.assert_right()
        return [one.message for one in checked.findings if isinstance(one, HeadlineNote)], [
            one.message for one in checked.findings if one.check == "documents" and not isinstance(one, HeadlineNote)
        ]

    return notes


NOTED = {
    # huggingface/nanoVLM#204: positions restart, but attention does not
    "positions that begin again": (
        partial(fit, partial(ByPositions, (False, False)), PLACES),
        "The batch declares documents (position_ids), but they influence each other",
    ),
    "numbers of documents that all layers ignore": (
        partial(fit, partial(ByIds, (False, False)), IDS, seams=True),
        "blocks.0.attention (Attention) at 14 of 14 positions of the other documents",
    ),
    "padding on the left that a layer sees": (
        partial(fit, partial(ByMask, (True, False)), LEFT),
        "changes the output of blocks.1.attention (Attention)",
    ),
    "padding that both directions see": (
        partial(fit, partial(ByMask, (False, True), causal=False), MASK),
        "changes the output of blocks.0.attention (Attention)",
    ),
    "a mean over padding": (
        partial(fit, partial(Classifier, True, causal=False), MASK, pooled=True),
        "changes the output of the model (Classifier)",
    ),
    # 01-ai/Yi#110
    "labels of padding": (partial(fit, ByMask, MASK, padded=True), "the loss counts 18 of 22 padded positions"),
    "labels at seams": (
        partial(fit, ByIds, IDS, seams=True),
        "is trained to predict the first token of the next one, at 6 of 6 document boundaries",
    ),
}


@pytest.mark.parametrize(("train", "said"), NOTED.values(), ids=NOTED.keys())
def test_what_is_seldom_meant_is_noted(notes, train, said):
    (found,), _ = notes(train)
    assert said in found


RIGHT = {
    "documents by ids": (
        partial(fit, ByIds, IDS),
        "changing one document changes no output or gradient of other documents (document_ids)",
    ),
    "documents by positions": (
        partial(fit, ByPositions, PLACES),
        "changes no output or gradient of other documents (position_ids)",
    ),
    "documents by boundaries": (
        partial(fit, ByBoundaries, BOUNDARIES),
        "changes no output or gradient of other documents (cu_seqlens)",
    ),
    "padding": (
        partial(fit, partial(ByMask, causal=False), LEFT),
        "changing padding changes no output or gradient of other tokens",
    ),
    "padding behind causal attention": (
        partial(fit, partial(ByMask, (False, False)), MASK),
        "padding changes no output",
    ),
    "a mean over tokens": (
        partial(fit, partial(Classifier, False, causal=False), MASK, pooled=True),
        "padding changes no output",
    ),
    "experts that documents share": (
        partial(fit, lambda: ByIds(after=Shared()), IDS),
        "outputs of other tokens is after (Shared), which",
    ),
    "statistics that documents share": (
        partial(fit, lambda: ByIds(after=Normed()), IDS),
        "is after.norm (BatchNorm1d), which",
    ),
    "positions that go on": (
        partial(fit, ByIds, IDS | {"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}),
        "changes no output or gradient of other documents (document_ids)",
    ),
    "a stream of tokens": (partial(fit, lambda: Plain(), {}), None),
    "documents that are read beside each other": (
        partial(fit, ByEmbedding, {"doc_ids": DOCUMENTS}),
        "The model also embeds the document numbers",
    ),
    "numbers of the tokens themselves": (
        partial(fit, lambda: Named(), {"seq_idx": torch.arange(LENGTH).expand(ROWS, -1)}),
        None,
    ),
    "the two parts of one input": (
        partial(fit, lambda: Named(), {"sequence_ids": DOCUMENTS.clamp(max=1)}),
        None,
    ),
    "columns of an image": (
        partial(fit, lambda: Named(), {"positions_x": torch.arange(4).repeat(3).expand(ROWS, -1)}),
        None,
    ),
    "boundaries of another sequence": (
        partial(fit, lambda: Named(), {"cu_seqlens": torch.tensor([0, 4, 9])}),
        None,
    ),
    "boundaries of whole rows": (
        partial(fit, lambda: Named(), {"cu_seqlens_rows": torch.arange(ROWS + 1) * LENGTH}),
        None,
    ),
    "a mask of what is not learned": (
        partial(fit, lambda: Named(), {"mask": RIGHT_PADDED.flip(1)}),
        None,
    ),
    "labels of a decoder": (partial(fit, ByMask, MASK, another=True), "padding changes no output"),
    "padding of zeros": (partial(fit, OfZeros, MASK), "whose vectors are zero"),
    "experts that choose": (behind(Chosen), "outputs of other tokens is after (Chosen), which"),
    "statistics of channels": (behind(NormedByChannel), "outputs of other tokens is after (NormedByChannel), which"),
    "a scale of all tokens": (behind(Quantised), "outputs of other tokens is after (Quantised), which"),
}


class Plain(Net):
    """Tokens of all documents in one stream: nothing declares that they must be kept apart."""

    def forward(self, input_ids):
        return self.run(input_ids, None)


class Named(Plain):
    """Has an argument with a document declaration's name but another meaning."""

    def forward(self, input_ids, **_):
        return self.run(input_ids, None)


@pytest.mark.parametrize(("train", "said"), RIGHT.values(), ids=RIGHT.keys())
def test_right_documents_have_no_note(notes, train, said):
    found, others = notes(train)
    assert found == []
    assert others == [] if said is None else said in others[0]


def in_parts(begin, *, divides=False, shifted="before"):
    """Each of two ranks has a part of every sequence, whose positions begin where ``begin`` says.

    ``divides``: the model is given whole sequences, and takes the rank's part itself. ``shifted``: labels are shifted
    before sequences are divided, or after it, by ignoring the last token or by leaving it out; or no document's first
    token is predicted, and two documents fit into a part.
    """
    init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    rank, half = dist.get_rank(), LENGTH // 2
    model = Parts(rank * half if divides else None)
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2 * ROWS, LENGTH + 1), generator=batches)
        part = slice(rank * half, rank * half + half)
        places = torch.arange(half).expand(2 * ROWS, -1) + begin(rank) * half
        whole = tokens[:, :-1]
        outputs = wrapped(whole, torch.arange(LENGTH)[None]) if divides else wrapped(whole[:, part], places)
        optimizer.zero_grad()
        labels = tokens[:, 1:][:, part].clone()
        if shifted == "ignored":
            labels[:, -1] = -100
        elif shifted == "documents":
            labels[:, half // 2 - 1 :: half // 2] = -100
        elif shifted == "left out":
            outputs, labels = outputs[:, :-1], labels[:, :-1]
        functional.cross_entropy(outputs.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


class Parts(Net):
    """Stands in for a model whose attention is exchanged between the parts: its tokens do not see each other."""

    def __init__(self, part):
        super().__init__(masked=())
        self.part = part

    def forward(self, input_ids, position_ids):
        if self.part is not None:
            part = slice(self.part, self.part + LENGTH // 2)
            input_ids, position_ids = input_ids[:, part], position_ids[:, part]
        return self.head(self.embedding(input_ids) + self.places(position_ids))


PARTS = {
    "0": (partial(in_parts, lambda rank: 0), True),
    "own": (partial(in_parts, lambda rank: rank), False),
    "divided by the model": (partial(in_parts, lambda rank: 0, divides=True), False),
}


@pytest.mark.parametrize(("train", "is_told"), PARTS.values(), ids=PARTS.keys())
def test_parts_of_a_sequence_that_all_begin_at_0_are_told(plumbline, train, is_told):
    """pytorch/torchtitan#3604: positions repeat on each rank."""
    findings = plumbline.check(train, ranks=2, steps=STEPS).findings
    told = [one.message for one in findings if isinstance(one, HeadlineNote)]
    assert ["dimension 'cp', but the position ids of all ranks begin at 0" in one for one in told] == [True] * is_told


def in_two_pieces(*, shifted):
    """Each of two ranks has two pieces of every sequence: the first and the last, or the middle ones."""
    init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    rank, model = dist.get_rank(), Parts(None)
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)
    places = torch.arange(LENGTH).chunk(4)
    own = torch.cat((places[rank], places[3 - rank]))
    batches = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2 * ROWS, LENGTH + 1), generator=batches)
        labels = tokens[:, 1:][:, own]
        if shifted == "after":
            labels = functional.pad(tokens[:, own][:, 1:], (0, 1), value=-100)
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(tokens[:, own], own[None]).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def by_offsets(begin, *, divides_model=False):
    """Each of two ranks trains on its own sequences, at positions that begin where ``begin`` says.

    ``divides_model``: forwards communicate, but not about the tokens of other positions.
    """
    rank, half = dist.get_rank(), LENGTH // 2
    model = Parts(None)
    if divides_model:
        model.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.zeros(1)))
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    wrapped, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (2 * ROWS, half), generator=batches)
        places = torch.arange(half).expand(2 * ROWS, -1) + begin(rank, step) * half
        optimizer.zero_grad()
        outputs = wrapped(tokens, places)[:, :-1]
        functional.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


SEAMS = {
    "offset by rank": (partial(by_offsets, lambda rank, step: rank), False),
    "offset by step": (partial(by_offsets, lambda rank, step: step % 2, divides_model=True), False),
    "ignored": (partial(in_parts, lambda rank: rank, shifted="ignored"), True),
    "left out": (partial(in_parts, lambda rank: rank, shifted="left out"), True),
    "right": (partial(in_parts, lambda rank: rank), False),
    "documents that end with the parts": (partial(in_parts, lambda rank: rank, shifted="documents"), False),
    "own sequences": (partial(in_parts, lambda rank: 0, shifted="ignored"), False),
    "two pieces": (partial(in_two_pieces, shifted="after"), True),
    "two right pieces": (partial(in_two_pieces, shifted="before"), False),
}


@pytest.mark.parametrize(("train", "is_wrong"), SEAMS.values(), ids=SEAMS.keys())
def test_labels_shifted_within_parts_of_sequences_are_wrong(plumbline, train, is_wrong):
    """huggingface/transformers#48491, NVIDIA-BioNeMo/bionemo-recipes#1449: a part's last token has no label."""
    check = plumbline.check(train, ranks=2, steps=STEPS)
    assert not any(end.has_failed for end in check.ends)
    causes = {one.cause for one in check.findings if one.outcome.is_bad and one.consequence_of is None}
    assert causes == ({"tokens-at-seams-missing"} if is_wrong else set())
