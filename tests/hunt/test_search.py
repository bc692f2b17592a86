"""Searches: a wrong trainer is found, and its problem shrunk; known deviations are passed over."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import plumbline.subjects
from plumbline.cli.main import main
from plumbline.core.cell import Cell
from plumbline.core.errors import USAGE
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.engine.subject_pools import open_subject
from plumbline.hunt.program.run_program import ProgramRun
from plumbline.hunt.search import Drawn, Failure, Search, cells_of, name_of, searches
from plumbline.hunt.write_up import Corpus, write_up
from plumbline.judge.checks import CHECKS
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.planning.declaration import Declaration
from plumbline.workloads.generated import Recipe

MISTAKE = str(Path(__file__).parents[1] / "extending" / "outside" / "mistake.py")

WRONG = """
from plumbline import subject
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


def test_what_fails_is_shrunk_to_what_it_takes_to_fail(tmp_path):
    (tmp_path / "forgets.py").write_text(WRONG)
    with open_subject(str(tmp_path / "forgets.py")) as (pool, declared):
        (search,) = searches(pool, declared, 1, tmp_path)
        search.until = math.inf
        found = search.round(0)
    assert found.cause == "steps: short-last-window-dropped"
    # One sample per batch suffices. How far the size shrinks depends on the version of hypothesis.
    assert replace(found.drawn.recipe, batch_size=4) == Recipe(accumulate=2, steps_per_epoch=3)


TWO = """
from plumbline import subject

@subject(name="one", backends=["none"], precisions=["32"])
def one(job): ...

@subject(name="own-loss", backends=["none"], precisions=["32"], loss="labels")
def another(job): ...
"""


def test_of_several_subjects_each_is_searched_and_has_a_folder(tmp_path, capsys):
    (tmp_path / "two.py").write_text(TWO)
    words = ["--subject", str(tmp_path / "two.py"), "--minutes", "1e-9", "--folder", str(tmp_path / "found")]
    assert main(["hunt", *words]) == 0
    assert "one" in (said := capsys.readouterr().out)
    assert "own-loss" in said
    assert sorted(folder.name for folder in (tmp_path / "found").iterdir()) == ["one", "own-loss"]


@pytest.fixture
def search(warm_pool, tmp_path):
    """A search among problems with a trainer that is wrong on all of them."""
    pool = warm_pool(MISTAKE)
    declared = [Declaration.of(MISTAKE, one) for one in pool.subjects if one["name"] == "mirrors"]
    return Search(pool, declared, cells_of(declared, 1, "cpu"), tmp_path)


def test_a_corpus_is_trained_again(search, tmp_path):
    failure = search.train(Drawn(Recipe(epochs=2), search.cells[0]))
    corpus = Corpus(tmp_path / "corpus")
    assert "recipe = Recipe(epochs=2)" in corpus.add(failure).read_text()
    (found,) = corpus
    assert (found.cause, found.drawn) == (failure.cause, failure.drawn)
    assert corpus.causes == {failure.cause}
    assert search.train(found.drawn).cause == found.cause


def test_the_page_of_a_trainer_without_a_template_has_what_is_right_and_says_what_to_add(search, tmp_path):
    failure = search.train(Drawn(Recipe(epochs=2), search.cells[0]))
    written = write_up(failure, search.declared, MISTAKE, sys.executable, tmp_path)
    page = written.page.read_text()
    assert written.shown is None
    assert failure.finding.message in page
    assert "**Not confirmed without Plumbline**" in page
    assert "programs/mirrors.py.jinja" in page
    compile(page.partition("```python\n")[2].partition("```")[0], "page", "exec")
    assert f"--workload {tmp_path / name_of(failure.drawn.recipe)}.py" in page


def written_up(name, finding, folder):
    failure = Failure(Drawn(Recipe(), Cell(name, "mlp", "ddp", Topology(1, 2), "32", "cpu")), finding)
    source = (str(Path(plumbline.subjects.__file__)), 1)
    declared = Declaration(name, name, ("ddp",), {"cpu": ["32"]}, frozenset(), Software(name, "2.9"), source=source)
    return write_up(failure, [declared], name, sys.executable, folder)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (ProgramRun(1, "differs", "Deviates: other weights."), "shows the deviation without Plumbline"),
        (ProgramRun(0, "the same", ""), "**Not confirmed without Plumbline**"),
        (ProgramRun(None, "", ""), "did not end in time"),
    ],
)
def test_a_page_says_what_its_program_printed_and_whether_it_confirms(tmp_path, monkeypatch, run, said):
    monkeypatch.setattr("plumbline.hunt.write_up.run_program", lambda *given: run)
    written = written_up("torch", Finding("gradients", Outcome.FAILED, "gradients are doubled", "doubled"), tmp_path)
    page, program = written.page.read_text(), (tmp_path / f"{name_of(Recipe())}-program.py").read_text()
    assert said in page
    assert program in page
    assert "plumbline" not in program
    assert page.startswith("# torch 2.9: gradients: doubled (ddp, 2 ranks)")


@pytest.mark.parametrize("check", CHECKS[TraceAnalysis])
def test_whatever_fails_has_a_page(tmp_path, monkeypatch, check):
    right = ProgramRun(0, "", "")
    monkeypatch.setattr("plumbline.hunt.write_up.run_program", lambda *given: right)
    for message in ("something", "val_loss was reported as 2 where 1 is correct"):
        assert written_up("transformers", Finding(check, Outcome.FAILED, message), tmp_path).page.exists()


def test_a_pipeline_of_many_stages_has_cells_too():
    several = TrainingBehavior(stages_per_rank=2)
    declared = Declaration("v", "v.py", ("pp",), {"cpu": ["32"], "cuda": []}, frozenset(), behavior=several)
    assert {str(cell.topology) for cell in cells_of([declared], 2, "cpu")} == {"1x2"}


def test_what_is_known_is_passed_over(search):
    search.until = math.inf
    failure = search.train(Drawn(Recipe(), search.cells[0]))
    search.known = {failure.cause}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "train", lambda self, drawn: failure)
        assert search.round(0) is None


def test_the_consequences_of_an_expected_failure_are_known_too(tmp_path):
    """A problem with one short window has no other finding about a trainer that never steps it."""
    ignite = Software("pytorch-ignite", "0.5.5")
    declared = Declaration("ignite", "ignite", ("none",), {"cpu": ["32"], "cuda": []}, frozenset(), ignite)
    (search,) = searches(None, [declared], 1, tmp_path)
    assert "initial-weights: never-stepped" in search.known


def test_counts_of_several_searches_add_up(tmp_path):
    corpus = Corpus(tmp_path)
    corpus.went_on({"drawn": 3, "rounds": 1})
    corpus.went_on({"drawn": 4, "rounds": 2})
    assert json.loads((tmp_path / "progress.json").read_text()) == {"drawn": 7, "rounds": 3}
    assert corpus.progress["rounds"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--subject", "nowhere.py"], "nowhere.py", marks=pytest.mark.nightly),
        (["--subject", "torch", "--minutes", "0"], "minutes"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(words, said, capsys):
    try:
        code = main(["hunt", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == USAGE
    assert said in capsys.readouterr().err


SEVERAL = """
import torch
from plumbline import subject
from torch.utils.data import DataLoader, DistributedSampler

def batches(job):
    torch.distributed.init_process_group(job.comm)
    yield from DataLoader(job.dataset, job.batch_size, sampler=DistributedSampler(job.dataset, shuffle=False))
    torch.distributed.destroy_process_group()

@subject(name="never-steps", backends=["ddp"], precisions=["32"], capabilities=["accumulation"])
def never_steps(job):
    model = job.model()
    job.optimizer(model.parameters())
    for batch in batches(job):
        job.loss(model(batch), batch).backward()

@subject(name="reports-tokens", backends=["ddp"], precisions=["32"])
def reports_tokens(job, mistake=False):
    # Right: the mean loss of the tokens of all ranks is no mean over samples.
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in batches(job):
        optimizer.zero_grad()
        loss = job.loss(model(batch), batch)
        loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= job.world_size
            parameter.grad = parameter.grad.roll(int(mistake), 0)
        optimizer.step()
        count = batch["real"].sum()
        sums = torch.stack([loss.detach() * count, count])
        torch.distributed.all_reduce(sums)
        job.log("loss", (sums[0] / sums[1]).item())

@subject(name="rolls", backends=["ddp"], precisions=["32"])
def rolls(job):
    reports_tokens(job, mistake=True)

@subject(name="casts", backends=["none"], precisions=["64"], capabilities=["accumulation"])
def casts(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in DataLoader(job.dataset, job.batch_size):
        (job.loss(model(batch).float(), batch) / job.accumulate).backward()
    optimizer.step()
"""


def test_what_is_wrong_is_named_and_what_is_right_is_not(tmp_path):
    (tmp_path / "wrong.py").write_text(SEVERAL)
    with open_subject(str(tmp_path / "wrong.py")) as (pool, declared):
        never_steps, reports_tokens, rolls, casts = searches(pool, declared, 2, tmp_path)
        failure = never_steps.train(Drawn(Recipe(accumulate=2), never_steps.cells[0]))
        assert failure.finding.cause == "never-stepped"  # and not that each trained alone
        over_tokens = Recipe(inputs="tokens", layers=("batchnorm",), loss="token-mean")
        failure = rolls.train(Drawn(over_tokens, rolls.cells[0]))
        assert failure.cause == "gradients: coupled-otherwise"  # and not that the check raised
        of_one_length_on_a_rank = Recipe(inputs="text", loss="labels", seed=3)
        assert reports_tokens.train(Drawn(of_one_length_on_a_rank, reports_tokens.cells[0])) is None
        failure = casts.train(Drawn(Recipe(accumulate=3, steps_per_epoch=3), casts.cells[0]))
        assert failure.cause == "gradients: computed-in-lower-precision"
