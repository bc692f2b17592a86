"""What a search promises: a wrong trainer is found, and its problem shrunk; what is known is passed over."""

from __future__ import annotations

import json
import math
from contextlib import closing

import pytest

from harness.cli.main import main
from harness.core.exit_codes import USAGE
from harness.hunt.corpus import Corpus
from harness.hunt.problems import Drawn
from harness.hunt.subject import started
from harness.workloads.generated import Recipe

WRONG = """
from harness import subject
from torch.utils.data import DataLoader

@subject(name="forgets", backends=["none"], precisions=["32"], capabilities=["accumulation"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        for number, batch in enumerate(DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle), 1):
            (job.loss(model(batch), batch) / job.accumulate).backward()
            if number % job.accumulate == 0:  # an epoch's last, short window is never stepped
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hunt")
    (folder / "forgets.py").write_text(WRONG)
    search = started(str(folder / "forgets.py"), 1, folder)
    with closing(search.pool):
        yield search


def test_what_fails_is_shrunk_to_what_it_takes_to_fail(search):
    search.until = math.inf
    found = search.round(0)
    assert found.cause.startswith("steps: ")
    recipe = found.drawn.recipe
    assert recipe.accumulate == 2
    assert recipe.steps_per_epoch == 1
    assert (recipe.layers, recipe.optimizer, recipe.inputs) == ((), "sgd", "features")


def test_a_corpus_is_trained_again(search, tmp_path):
    search.until = math.inf
    wrong = search.train(Drawn(Recipe(accumulate=2), search.cells[0]))
    right = search.train(Drawn(Recipe(accumulate=2, steps_per_epoch=2), search.cells[0]))
    assert right is None
    corpus = Corpus(tmp_path / "corpus")
    file = corpus.add(wrong)
    assert "Recipe(accumulate=2)" in file.read_text()
    (found,) = corpus
    assert (found.cause, found.drawn) == (wrong.cause, wrong.drawn)
    assert search.train(found.drawn).cause == found.cause


def test_counts_of_several_searches_add_up(tmp_path):
    corpus = Corpus(tmp_path)
    corpus.went_on({"drawn": 3, "rounds": 1})
    corpus.went_on({"drawn": 4, "rounds": 2})
    assert json.loads((tmp_path / "progress.json").read_text()) == {"drawn": 7, "rounds": 3}
    assert corpus.progress["rounds"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--subject", "nowhere.py"], "nowhere.py"),
        (["--subject", "torch", "--minutes", "0"], "minutes"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(words, said, capsys):
    try:
        code = main(["hunt", *words])
    except SystemExit as ended:
        code = ended.code
    assert code in (USAGE, 2)
    assert said in capsys.readouterr().err
