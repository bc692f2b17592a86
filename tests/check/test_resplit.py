"""A step's gradient must not depend on which rank and micro-batch has which sample."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.check.judge.resplit import Split
from plumbline.cli.main import main

WORDS, PASSES = 11, 2


class Texts(torch.utils.data.Dataset):
    def __init__(self, draws=False):
        torch.manual_seed(1)
        self.texts, self.draws = [torch.randint(WORDS, (length,)) for length in torch.randint(3, 12, (24,))], draws

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, place):
        text = self.texts[place]
        return text[torch.randperm(len(text))] if self.draws else text


class Words(nn.Module):
    def __init__(self, dropped):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.dropout = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), nn.Dropout(dropped)

    def forward(self, words):
        return self.head(self.dropout(self.embedding(words).tanh()))


def padded(texts):
    return nn.utils.rnn.pad_sequence([*texts], batch_first=True, padding_value=-100)


def training(count, dropped=0.0, draws=False, loader_of=DataLoader):
    """Return a function that trains; ``count`` returns a micro-batch's divisor, given all divisors."""

    def train():
        model, data = DistributedDataParallel(Words(dropped)), Texts(draws)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = iter(loader_of(data, 3, sampler=DistributedSampler(data, seed=3), collate_fn=padded))
        for _ in range(2):
            step = [next(batches) for _ in range(PASSES)]
            for texts in step:
                scores, labels = model(texts.clamp(min=0))[:, :-1], texts[:, 1:]
                loss = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="sum")
                (loss / count(labels, [one[:, 1:] for one in step])).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def own(labels, step):
    return (labels >= 0).sum() * PASSES


def of_all(labels, step):
    total = sum((one >= 0).sum() for one in step).float()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def said(plumbline, train):
    checked = plumbline.check(train, 2, steps=2, resplit=True)
    assert not any(end.has_failed for end in checked.ends), checked.ends[0].stderr
    (found,) = [finding for finding in checked.findings if finding.check == "resplit"]
    return found


def test_samples_are_dealt_to_batches_of_the_same_sizes():
    split = Split({0: [[1, 2, 3], [4, 5, 6]], 1: [[7, 8, 9], [10]]}, {0: 0, 1: 2})
    assert split.dealt_otherwise() == {0: (0, [[1, 5, 8], [2, 6, 9]]), 1: (2, [[3, 7, 10], [4]])}
    assert split.ordered_otherwise()[0] == (0, [[6, 5, 4], [3, 2, 1]])


def test_a_mean_of_means_moves(plumbline):
    found = said(plumbline, training(own))
    assert found.message.startswith("The gradient changes by about ")
    assert "if the 12 samples of the first step go to other ranks" in found.message


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_a_mean_over_all_tokens_does_not_move(plumbline, dropped):
    found = said(plumbline, training(of_all, dropped))
    assert found.message.startswith("the split has no visible effect: the gradient changes by ")


def test_data_that_are_drawn_anew_are_not_judged(plumbline):
    found = said(plumbline, training(of_all, draws=True))
    assert found.message.startswith("not judged: the gradient also changes by about ")


def test_batches_of_no_loader_are_not_judged(plumbline):
    def by_hand(data, size, **_):
        return [padded(data[index] for index in range(first, first + size)) for first in range(0, 12, size)]

    found = said(plumbline, training(of_all, loader_of=by_hand))
    assert found.message == "not judged: the first batch does not come from a torch DataLoader"


SCRIPT = """
import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = [torch.randint(7, (length,)) for length in torch.randint(2, 9, (8,))]
padded = lambda texts: torch.stack([pad(text, (0, 9 - len(text)), value=-100) for text in texts])
model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 7))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for texts in DataLoader(data, 4, collate_fn=padded):
    loss = cross_entropy(model(texts[:, :-1].clamp(min=0)).transpose(1, 2), texts[:, 1:])
    (loss / 2).backward()
optimizer.step()
"""


def test_the_command_runs_again_and_the_declared_objective_is_wrong(tmp_path, capfd):
    script, file = tmp_path / "train.py", tmp_path / "verdict.json"
    script.write_text(SCRIPT)
    options = ["--resplit", "--objective", "token-mean", "--json", str(file)]
    assert main(["check", *options, "--", sys.executable, str(script)]) == 1
    found = {one["check"]: one for one in json.loads(file.read_text())["trainings"][0]["findings"]}
    assert found["objective"]["cause"] == "mean-of-micro-batch-means"
    assert found["resplit"]["message"].startswith("The gradient changes by about ")
    assert "WRONG: objective: mean of micro batch means" in capfd.readouterr().err


@pytest.mark.parametrize("also", [["--after", "1"], ["--dry-run"]])
def test_only_the_first_step_can_be_split_otherwise(also, capsys):
    assert main(["check", "--resplit", *also, "--", sys.executable, "-c", ""]) == 4
    assert "--resplit trains the first step again" in capsys.readouterr().err
