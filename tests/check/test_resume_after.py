"""``plumbline check --resume-after K``: an interrupted and resumed training is compared with an uninterrupted one."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.function import record_function
from plumbline.check.judge.resumption import judge_resumption
from plumbline.check.judge.script_checks import read_trainings
from plumbline.cli.main import main
from plumbline.core.outcome import Outcome

SCRIPT = f"""
import sys

sys.path.append({str(Path(__file__).parent)!r})
from test_resume_after import train

train(*sys.argv[1:])
"""


def train(folder, mistake=""):
    """Train for nine epochs of six batches; save after every fourth step, and resume from what was saved."""
    Path(folder).mkdir(exist_ok=True)
    file = Path(folder) / "saved.pt"
    torch.manual_seed(0)
    if mistake == "no seed":
        torch.seed()
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = 0
    if file.exists() and mistake != "loads nothing":
        saved = torch.load(file)
        done = saved["done"]
        for name, part in parts.items():
            if mistake != f"no {name}":
                part.load_state_dict(saved[name])
        if mistake == "no scheduler":
            optimizer.param_groups[0]["lr"] = 0.01
        if mistake == "count lost":
            for state in optimizer.state.values():
                state["step"].zero_()
        if mistake != "no generator":
            torch.set_rng_state(saved["generator"])
    begin = 0 if mistake == "begins data again" else done
    begin += bool(done) * ((mistake == "leaves a batch out") - (mistake == "a batch again"))
    for epoch in range(begin // 6, 9):
        order = RandomSampler(data, generator=torch.Generator().manual_seed(epoch))
        loader = DataLoader(data, batch_size=4, sampler=order, generator=torch.Generator())
        for index, (x, y) in enumerate(loader):
            if epoch * 6 + index < begin:
                continue
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            done += 1
            if mistake == "fails":
                raise OSError("cannot save")
            if done % 4 == 0 and mistake != "saves nothing":
                saved = {name: part.state_dict() for name, part in parts.items()}
                if mistake == "rounds":
                    saved["model"] = {name: one.bfloat16() for name, one in saved["model"].items()}
                torch.save({**saved, "done": done, "generator": torch.get_rng_state()}, file)


def found_in(tmp_path, mistake, steps=8):
    """Return the findings about a training with a mistake that is interrupted after this many steps."""

    def recorded(name, folder, options):
        evidence = tmp_path / name
        evidence.mkdir()
        record_function(lambda: train(tmp_path / folder, mistake), 1, evidence, options)
        return read_trainings(evidence)

    first = recorded(
        "first", "interrupted", RecordingOptions(steps + 1, interrupt_after=steps, state=True, replays=False)
    )
    resumed = recorded("second", "interrupted", RecordingOptions(4, state=True))
    whole = recorded("third", "whole", RecordingOptions(steps + 8, state=True, replays=False))
    return list(judge_resumption(first, resumed, whole, steps))


def test_a_training_that_goes_on_as_if_nothing_had_happened_is_right(tmp_path):
    (finding,) = found_in(tmp_path, "")
    assert finding.outcome is Outcome.PASSED
    assert "at step 8 the optimizers of the resumed training have the weights" in finding.message


def test_an_older_checkpoint_is_compared_where_it_was_saved(tmp_path):
    (finding,) = found_in(tmp_path, "", steps=11)
    assert finding.outcome is Outcome.PASSED
    assert "at step 8, the last one that was saved before step 11" in finding.message


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ("loads nothing", "weights-not-loaded"),
        ("rounds", "weights-of-another-step"),
        ("no optimizer", "optimizer-state-dropped"),
        ("count lost", "optimizer-state-altered"),
        ("no scheduler", "scheduler-not-restored"),
        ("begins data again", "trained-all-over-again"),
        ("a batch again", "batch-again-after-resuming"),
        ("leaves a batch out", "batch-left-out-after-resuming"),
    ],
)
def test_what_is_not_restored_is_named(tmp_path, mistake, cause):
    (finding,) = found_in(tmp_path, mistake)
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, cause)


def test_other_masks_of_dropout_are_a_note(tmp_path):
    passed, note = found_in(tmp_path, "no generator")
    assert passed.outcome is note.outcome is Outcome.PASSED
    assert "random number generators are not restored" in note.message


def test_a_training_that_is_another_one_each_time_is_not_judged(tmp_path):
    (finding,) = found_in(tmp_path, "no seed")
    assert finding.outcome is Outcome.SKIPPED
    assert "have different weights before step 0: set all seeds" in finding.message


def test_the_command_trains_three_times_and_has_one_verdict(tmp_path, capfd):
    script, file = tmp_path / "train.py", tmp_path / "check.json"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "{folder}"]
    assert main(["check", "--resume-after", "8", "--json", str(file), "--", *command]) == 0
    document = json.loads(file.read_text())
    assert document["verdict"] == "right"
    findings = [one for one in document["trainings"][0]["findings"] if one["check"] == "resumption"]
    assert [one["outcome"] for one in findings] == ["passed"]
    assert "3 of 3: training without an interruption" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "steps", "why"),
    [
        ("saves nothing", 8, "saved nothing"),
        ("", 99, "ended before step 99"),
        ("fails", 8, "failed before step 8 (exit code 1)"),
    ],
)
def test_what_cannot_be_compared_is_not_judged(tmp_path, mistake, steps, why):
    script, file = tmp_path / "train.py", tmp_path / "check.json"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "{folder}", mistake]
    assert main(["check", "--resume-after", str(steps), "--json", str(file), "--", *command]) == 2
    assert why in json.loads(file.read_text())["sentence"]


def train_together(folder, mistake):
    """Train on any number of ranks with the same eight rows per step; save after every second step, and resume."""
    Path(folder).mkdir(exist_ok=True)
    file, rank, ranks = Path(folder) / "saved.pt", 0, 1
    torch.manual_seed(0)
    model = wrapped = torch.nn.Linear(4, 2)
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        wrapped = fully_shard(model) if mistake == "sharded" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    begin = done = 0
    if file.exists():
        saved = torch.load(file)
        begin = done = saved["done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["lr"] *= ranks / 2 if mistake in ("four rows a rank", "other rows") else 1
        # Like NVIDIA-NeMo/Megatron-Bridge#5637: the position is that of one of the former ranks.
        begin = done // 2 if mistake == "one rank's position" else begin
    for step in range(begin, 12):
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        if mistake in ("four rows a rank", "other rows"):
            if not done:
                optimizer.param_groups[0]["lr"] *= ranks
            place = (8 * step + 4 * rank) if ranks == 2 else 4 * (step - 4) + 32
            other = 100 * (mistake == "other rows" and ranks == 1)
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(place + other))
        optimizer.zero_grad()
        mse_loss(wrapped(rows[:, :4]), rows[:, 4:]).backward()
        optimizer.step()
        done += 1
        states = {} if mistake == "sharded" else copy.deepcopy(optimizer.state_dict())
        for state in states["state"].values() if mistake == "zeros" else ():
            state["exp_avg"].zero_()  # like NVIDIA/Megatron-LM#5077
        if done % 2 == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": states, "done": done}, file)


@pytest.mark.parametrize(
    ("mistake", "cause", "says"),
    [
        ("", None, "have the weights and states of the uninterrupted one; samples"),
        ("zeros", "optimizer-state-altered", ": exp_avg of "),
        (
            "four rows a rank",
            None,
            "a step has 8 samples on 2 ranks and 4 on 1; both trainings use the same samples",
        ),
        pytest.param("other rows", None, "cannot be compared step by step", marks=pytest.mark.nightly),
        pytest.param(
            "one rank's position", "batch-again-after-resuming", "the samples from step 2 on", marks=pytest.mark.nightly
        ),
        pytest.param(
            "sharded",
            None,
            "on 2 and 1 ranks the optimizers have no whole parameter in common",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_can_be_compared_on_another_number_of_ranks_is_compared(tmp_path, mistake, cause, says):
    def recorded(name, folder, ranks, options):
        (tmp_path / name).mkdir()
        record_function(lambda: train_together(tmp_path / folder, mistake), ranks, tmp_path / name, options)
        return read_trainings(tmp_path / name)

    whole = recorded("whole", "w", 2, RecordingOptions(8, state=True, replays=False))
    first = recorded("first", "i", 2, RecordingOptions(5, interrupt_after=4, state=True, replays=False))
    if mistake == "sharded":  # without the metadata that torch needs to read shards on one rank
        (tmp_path / "i" / "saved.pt").unlink()
    resumed = recorded("resumed", "i", 1, RecordingOptions(4, state=True))
    *_, finding = judge_resumption(first, resumed, whole, 4)
    assert (finding.cause, says in finding.message) == (cause, True), finding


def test_a_command_without_a_folder_is_refused(capsys):
    assert main(["check", "--resume-after", "4", "--", "true"]) == 4
    assert "write {folder} in place of the checkpoint folder in COMMAND" in capsys.readouterr().err
