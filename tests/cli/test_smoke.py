"""``plumbline smoke``: it distinguishes a wrong adapter from a wrong trainer, with real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plumbline.cli.main import main
from plumbline.engine.smoke import EXCERPT_LINES, cells_of, excerpt, try_in_turn, untried_of

ADAPTERS = Path(__file__).parent / "adapters.py"


@pytest.fixture
def smoke(warm_pool, one_thread, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = warm_pool(ADAPTERS)
    declarations = {declared["name"]: declared for declared in pool.subjects}

    def smoke(name, **limit):
        cells = cells_of(declarations[name], "cpu")
        code = try_in_turn(pool, cells, untried=untried_of(declarations[name], "cpu", cells), **limit)
        return code, capsys.readouterr().out

    return smoke


def test_all_that_is_declared_is_right(smoke, tmp_path):
    code, said = smoke("adapted")
    assert code == 0
    assert "2 connected ranks, 6 optimizer steps, 72 samples" in said
    assert "Also right: none 1x1 32, ddp 1x2 64." in said
    assert "The trainer is right here" in said
    assert "Declared, but not tried: none in precision 64." in said
    assert not list(tmp_path.glob("plumbline-smoke-*"))


def test_what_is_declared_and_not_tried_is_named():
    declared = {
        "name": "it",
        "backends": ["none", "ddp", "dp"],
        "precisions": {"cpu": ["32", "16"]},
        "capabilities": ["checkpoint", "accumulation"],
    }
    untried = untried_of(declared, "cpu", cells_of(declared, "cpu"))
    assert untried == ["accumulation", "checkpoint", "none and dp in precision 16"]
    plain = {**declared, "backends": ["ddp"], "capabilities": []}
    assert untried_of(plain, "cpu", cells_of(plain, "cpu")) == []


def test_a_wrong_trainer_gets_the_diagnosis(smoke):
    code, said = smoke("unsynchronised")
    assert code == 1
    assert "The adapter is right" in said
    assert "own samples alone" in said


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("alone", "2 ranks were launched, but each had a world size of 1"),
        ("returning", "no optimizer stepped: train(job) returned before training, or does not call"),
        ("not-stepping", "no optimizer stepped: train(job) returned before training, or does not call"),
        ("raising-early", "train(job) raised before the first optimizer step"),
        ("promising", "it declares precision '16', but fails with this precision"),
    ],
)
def test_a_wrong_adapter_is_told_in_a_sentence(smoke, name, sentence):
    code, said = smoke(name)
    assert code == 2
    assert sentence in said
    assert "The trainer is wrong" not in said
    log = Path(said.rpartition("log: ")[2].strip())
    assert log.is_file()
    shutil.rmtree(log.parent)


def test_what_was_raised_is_shown_where_it_was_raised(smoke):
    _, said = smoke("raising-early")
    assert "parallel(job).no_such_thing()" in said
    assert "AttributeError: 'DistributedDataParallel' object has no attribute 'no_such_thing'" in said
    assert "harness/plumbline/worker" not in said
    assert "see the rank's log" not in said


def test_a_long_traceback_is_cut():
    log = "before\nTraceback (most recent call last):\n" + "".join(f'  File "{n}.py"\n    call()\n' for n in range(50))
    shown = excerpt(log)
    assert shown[0] == '  File "1.py"'
    assert shown[-1] == "…"
    assert len(shown) == EXCERPT_LINES + 1


def test_a_log_without_a_traceback_is_shown_from_its_beginning():
    assert excerpt("epoch 0\n\nepoch 1") == ["epoch 0", "epoch 1"]


def test_a_rank_that_hung_shows_its_stack(smoke):
    code, said = smoke("hanging", limit=3.0)
    assert code == 2
    assert "train(job) hung before the first optimizer step" in said
    stack = [line.rpartition(" in ")[2] for line in said.splitlines() if line.startswith("    ")]
    assert stack[:2] == ["wait_long", "hanging"]


def test_what_cannot_be_imported_is_the_adapter_s_fault(tmp_path, one_thread, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import no_such_library")
    assert main(["smoke", str(file)]) == 2
    assert "No module named 'no_such_library'" in capsys.readouterr().out


def test_a_script_is_sent_to_the_command_that_checks_it(tmp_path, one_thread, capsys):
    file = tmp_path / "train.py"
    file.write_text("print('trains')")
    assert main(["smoke", str(file)]) == 2
    said = capsys.readouterr().out
    assert f"{file}: declares no subject" in said
    assert said.count(str(file)) == 2
    assert f"to check a script, write plumbline check -- python {file}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "arguments are required: WHAT"),
        (["nowhere.py"], "plumbline new-subject nowhere.py` writes an example"),
        (["torch;pyhton=python3"], "only python=/path/to/python may follow"),
        (["torch", "--accelerator", "tpu"], "has no devices of this type; it has cpu, cuda"),
    ],
)
def test_a_wrong_command_line_is_another_exit_code(words, said, capsys):
    try:
        code = main(["smoke", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 4
    assert said in capsys.readouterr().err


def test_each_backend_and_each_precision_is_tried_once():
    declared = {"name": "x", "backends": ["none", "ddp2", "dp", "ddp"], "precisions": {"cpu": ["16", "64", "32"]}}
    assert [cell.id for cell in cells_of(declared, "cpu")] == [
        "x-mlp-ddp-1x2-32", "x-mlp-dp-1x2-32", "x-mlp-ddp2-2x2-32", "x-mlp-none-1x1-32",
        "x-mlp-ddp-1x2-64", "x-mlp-ddp-1x2-16",
    ]  # fmt: skip


def test_no_more_nodes_are_tried_than_are_declared():
    declared = {"name": "x", "backends": ["ddp2", "ddp"], "precisions": {"cpu": ["32"]}, "conduct": {"max_nodes": 1}}
    assert [cell.id for cell in cells_of(declared, "cpu")] == ["x-mlp-ddp-1x2-32"]


def test_a_subject_that_declares_nothing_is_told_so(capsys):
    assert try_in_turn(None, cells_of({"name": "x", "backends": [], "precisions": {"cpu": ["32"]}}, "cpu")) == 2
    assert "declares no backend" in capsys.readouterr().out


def test_on_cuda_a_backend_is_left_out_whose_replicas_would_share_a_device(capsys, monkeypatch):
    declared = {"name": "x", "backends": ["none", "ddp", "dp", "ddp2"], "precisions": {"cuda": ["32"]}}
    tried = {present: {cell.backend for cell in cells_of(declared, "cuda", present)} for present in (1, 2)}
    assert tried == {1: {"none", "ddp"}, 2: {"none", "ddp", "dp", "ddp2"}}
    monkeypatch.setattr("plumbline.launch.pool.Pool.subjects", [{**declared, "backends": ["dp"]}])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["smoke", "torch", "--accelerator", "cuda"]) == 4
    assert "this machine has 1: simulate devices with --accelerator cpu" in capsys.readouterr().err
