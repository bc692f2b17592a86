"""``plumbline.attach``: the verdict of ``plumbline check`` on a training without a command line."""

from __future__ import annotations

import gc
import glob
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import plumbline
from plumbline.check.callbacks.checked import ToldVerdict
from plumbline.check.rank.recorder import TrainingRecorder
from plumbline.check.rank.store_exchange import Exchange, SharedFolder, UnreachableFolderError, begin_recording
from plumbline.check.training_verdict import TrainingVerdict
from plumbline.ranks.run import run_on_ranks

WORLD = 2


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that nothing is left in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    gc.collect()
    assert glob.glob(str(tmp_path / "plumbline*")) == []


class Training:
    """A training with clipping, imported by name, and a scheduler; on several ranks with DDP and a sampler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
        alone = not distributed.is_initialized()
        self.model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.model = self.model if alone else DistributedDataParallel(self.model)
        self.loader = DataLoader(data, 4, sampler=None if alone else DistributedSampler(data))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = StepLR(self.optimizer, 2)

    def step(self, count: int) -> list[float]:
        losses = []
        for _, (inputs, labels) in zip(range(count), self.loader, strict=False):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 0.05)
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses


def on_two_ranks(train: Callable[[], Any]) -> list[Any]:
    ends = run_on_ranks(lambda _: train(), WORLD, timeout=120)
    assert not any(end.has_failed for end in ends), [end.stderr for end in ends]
    return [end.value for end in ends]


def attributes(owner: Any) -> dict[str, Any]:
    """Return attributes of a module or class that no import adds; torch replaces a step when an optimizer is made."""
    return {name: one for name, one in vars(owner).items() if name != "step" and not isinstance(one, ModuleType)}


def builtin_selections() -> set[int]:
    """Return the ids of functions that torch's script compiler treats as selections."""
    table = torch.jit._builtins._get_builtin_table()
    return {one for one, operator in table.items() if operator in ("aten::topk", "aten::argmax")}


def told(verdict: TrainingVerdict) -> tuple[str, list[tuple[str, str]]]:
    return verdict.answer.value, [(one.check, one.outcome.value) for one in verdict.findings]


def before_all() -> Any:
    with plumbline.attach(steps=2) as attached:
        Training().step(3)
    return told(attached.verdict())


def between_steps() -> Any:
    training = Training()
    training.step(1)
    with plumbline.attach(training.optimizer, steps=2) as attached:
        training.step(4)
    return told(attached.verdict())


def on_rank_0_alone() -> Any:
    training = Training()
    with plumbline.attach(steps=2) as attached:
        training.step(3)
    return told(attached.verdict()) if distributed.get_rank() == 0 else "not asked"


def without_a_reduction() -> Any:
    training = Training()
    training.model = training.model.module
    with plumbline.attach(steps=2) as attached:
        training.step(3)
    verdict = attached.verdict()
    return verdict.sentence, str(verdict)


RIGHT_CHECKS = ["initial-weights", "samples", "gradients", "learning-rate", "update", "ranks-agree"]


@pytest.mark.parametrize("where", [before_all, between_steps])
def test_each_rank_is_told_the_verdict_of_all(where: Callable[[], Any]) -> None:
    first, second = on_two_ranks(where)
    assert first == second
    answer, findings = first
    assert answer == "right"
    assert {name for name, outcome in findings if outcome == "passed"} >= {*RIGHT_CHECKS, "clipping"}


def exchanged_twice() -> list[list[int]]:
    """Exchange values in two recordings. Rank 0 is early, so it could find rank 1's values from the first recording."""
    found = []
    for recording in range(2):
        begin_recording()
        exchange = Exchange()
        for _ in range(2 + recording):
            time.sleep(0.1 * distributed.get_rank())
            found.append(exchange.values(recording))
    return found


def test_ranks_do_not_read_what_an_earlier_recording_left() -> None:
    assert on_two_ranks(exchanged_twice) == [[[0, 0]] * 2 + [[1, 1]] * 3] * 2


def test_one_rank_may_ask_alone() -> None:
    asked, other = on_two_ranks(on_rank_0_alone)
    assert asked[0] == "right"
    assert other == "not asked"


def test_what_is_wrong_is_named() -> None:
    sentence, screen = on_two_ranks(without_a_reduction)[0]
    assert sentence.startswith("gradients: not synchronised")
    assert "average the gradients over ranks" in screen


def test_it_can_be_attached_again_and_everything_is_put_back() -> None:
    places: list[Any] = [nn.functional, torch.autograd, torch.nn.utils, torch.utils.checkpoint, distributed]
    places += [
        Optimizer,
        torch.Tensor,
        DataLoader,
        _BaseDataLoaderIter,
        DistributedDataParallel,
        nn.Module,
        torch.amp.GradScaler,
    ]
    before = [attributes(one) for one in places]
    builtins = builtin_selections()
    imported = globals()["clip_grad_norm_"]
    training = Training()
    for _ in range(2):
        with plumbline.attach(training.optimizer, steps=2) as attached:
            training.step(4)
        verdict = attached.verdict()
        assert verdict.right
        verdict.assert_right(require_full=True)
        assert "RIGHT" in verdict._repr_html_()
        assert [attributes(one) for one in places] == before
        assert builtin_selections() == builtins
        assert globals()["clip_grad_norm_"] is imported


def test_nothing_of_the_training_is_kept() -> None:
    training = Training()
    model, optimizer = ref(training.model), ref(training.optimizer)
    with plumbline.attach(steps=2) as attached:
        training.step(3)
    assert attached.verdict().right
    del training, attached
    gc.collect()
    assert (model(), optimizer()) == (None, None)


def test_optimizers_of_earlier_trainings_do_not_count() -> None:
    earlier, training = Training(), Training()
    earlier.optimizer.zero_grad()
    with plumbline.attach(steps=2) as attached:
        training.step(3)
    assert attached.verdict().right


def test_one_that_is_closed_before_another_leaves_nothing_behind() -> None:
    before, imported = nn.functional.cross_entropy, clip_grad_norm_
    training = Training()
    first, second = plumbline.attach(steps=2), plumbline.attach(steps=2)
    training.step(3)
    first.close()
    second.close()
    assert first.verdict().right
    assert training.step(1)
    assert (nn.functional.cross_entropy, globals()["clip_grad_norm_"]) == (before, imported)


def test_a_process_that_is_forked_meanwhile_leaves_the_evidence_alone() -> None:
    training = Training()
    with plumbline.attach(steps=2) as attached:
        training.step(1)
        if not (child := os.fork()):
            try:
                training.step(2)
                attached.close()
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        training.step(2)
    assert attached.verdict().right


def test_the_training_is_the_same_bit_for_bit() -> None:
    plain = Training().step(4)
    with plumbline.attach(steps=2):
        followed = Training().step(4)
    assert followed == plain


def test_a_wrong_training_says_so_where_it_is_asserted() -> None:
    training = Training()
    training.optimizer.zero_grad = lambda: None
    with plumbline.attach(training.optimizer, steps=3) as attached:
        training.step(3)
    with pytest.raises(AssertionError, match="previous step not zeroed"):
        attached.verdict().assert_right()


def test_gradients_left_from_before_are_no_step_of_their_own() -> None:
    training = Training()
    training.optimizer.zero_grad = lambda: None
    training.step(2)
    with plumbline.attach(training.optimizer, steps=3) as attached:
        training.step(5)
    assert attached.verdict().sentence.startswith("gradients: previous step not zeroed")


def test_without_a_step_nothing_is_judged() -> None:
    with plumbline.attach() as attached:
        pass
    verdict = attached.verdict()
    assert (verdict.answer.value, verdict.right) == ("not judged", False)
    assert "completed 0 steps since attach() was called" in verdict.sentence
    with pytest.raises(AssertionError, match="nothing was recorded"):
        verdict.assert_right()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "steps=0 must be a whole number, 1 or more"),
        ({"steps": "4"}, "steps='4' must be a whole number, 1 or more"),
        ({"steps": None}, "steps=None must be"),
        ({"steps": 2.5}, "steps=2.5 must be"),
        ({"after": -1}, "after=-1 must be a whole number, 0 or more"),
        ({"objective": "mean"}, "token-mean"),
        ({"folder": "/nowhere/at/all"}, "create it first"),
    ],
)
def test_arguments_without_a_meaning_are_refused_when_they_are_given(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        plumbline.attach(**arguments)
    if "folder" in arguments:  # it need not exist on the machine that creates a callback
        return
    with pytest.raises((TypeError, ValueError), match=words):
        ToldVerdict(**arguments)
    with pytest.raises((TypeError, ValueError), match=words):
        plumbline.checked(**arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.Linear(2, 2), r"attach\(\) takes optimizers, not Linear: write attach\(optimizer\)"),
        ([], r"attach\(\) takes optimizers, not list: write attach\(\*optimizers\)"),
        (4, r"attach\(\) takes optimizers, not int"),
    ],
)
def test_what_is_no_optimizer_is_refused(given: Any, words: str) -> None:
    before = attributes(torch), attributes(torch.Tensor)
    with pytest.raises(TypeError, match=words):
        plumbline.attach(given)
    assert (attributes(torch), attributes(torch.Tensor)) == before


def test_an_error_while_attaching_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes(torch), attributes(torch.Tensor)

    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(TrainingRecorder, "follow", broken)
    with pytest.raises(RuntimeError, match="broken"):
        plumbline.attach()
    assert (attributes(torch), attributes(torch.Tensor)) == before


def test_only_a_function_can_be_checked() -> None:
    with pytest.raises(TypeError, match=r"checked\(\) takes a training function, not int: write checked\(train\)"):
        plumbline.checked(3)  # type: ignore[call-overload]


def test_seconds_to_wait_are_a_number() -> None:
    with plumbline.attach() as attached:
        pass
    for wait in ("a", -1, float("nan")):
        with pytest.raises(ValueError, match="must be a number of seconds, 0 or more, or None"):
            attached.verdict(wait=wait)  # type: ignore[arg-type]


def test_a_verdict_is_represented_by_its_first_line() -> None:
    with plumbline.attach(steps=1) as attached:
        Training().step(2)
    verdict = attached.verdict()
    assert repr(verdict) == f"RIGHT: {verdict.sentence}"
    assert str(verdict).startswith("RIGHT: ")


def test_a_folder_that_is_on_another_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.path.isdir

    def found() -> str:
        monkeypatch.setattr(os.path, "isdir", lambda path: "plumbline-attach" not in str(path) and there(path))
        try:
            folder = SharedFolder(lambda path: None).find()
        except UnreachableFolderError as error:
            return str(error)
        os.rmdir(folder)
        return "found"

    told = sorted(one.partition("pass ")[2] for one in on_two_ranks(found))
    assert told == ["", "attach() a folder= that all machines share"]


def test_what_watches_a_training_is_imported_without_what_compiles_it():
    """Importing torch._dynamo takes a second, and a process without an optimizer never needs it."""
    code = "import sys, plumbline.check.attach; assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        "plumbline.check.rank.joint.comparison",
        "plumbline.check.rank.observers.document_probe",
        "plumbline.evidence.trace",
    ],
)
def test_what_few_trainings_need_is_not_imported_before_they_do(module):
    code = f"import sys, plumbline; plumbline.attach; sys.exit('{module}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_is_collected_before_and_after_an_import_but_not_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "imported_uncollected.py").write_text("import gc\n\nis_collected = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gc.isenabled()
    assert not plumbline.import_uncollected("imported_uncollected").is_collected
    assert gc.isenabled()


SPAWNED = """
import sys

import torch
from torch import distributed, nn

import plumbline

OPTIONS = {"steps": 2, "stop_when_wrong": True}


def train(rank, store, bypass):
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        rows, labels = torch.randn(8, 4), torch.randint(3, (8,))
        nn.functional.cross_entropy((model.module if bypass else model)(rows), labels).backward()
        optimizer.step()
    distributed.destroy_process_group()


@plumbline.checked(**OPTIONS)
def decorated(rank, store, bypass):
    train(rank, store, bypass)


if __name__ == "__main__":
    how, store, mistake = sys.argv[1:]
    function = decorated if how == "decorated" else plumbline.checked(**OPTIONS)(train)
    torch.multiprocessing.spawn(function, (store, mistake == "bypass"), 2)
"""


@pytest.mark.parametrize(("how", "mistake", "answer"), [("decorated", "bypass", "WRONG"), ("handed on", "", "RIGHT")])
def test_a_function_is_checked_whatever_starts_it(tmp_path: Any, how: str, mistake: str, answer: str) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED, encoding="utf-8")
    command = [sys.executable, str(script), how, str(tmp_path / "store"), mistake]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.stderr.count(f"{answer}: ") == 1 + bool(mistake), done.stderr  # the error message has it too
    assert (done.returncode != 0) == bool(mistake)
