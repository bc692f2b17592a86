"""Programs without Plumbline: they are plain, and show a deviation only if there is one."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import plumbline.subjects
from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.hunt.program.problem import NotExpressedError, Problem
from plumbline.hunt.program.run_program import (
    MOST_LINES,
    NoTemplateError,
    Shown,
    command_of,
    render,
    render_by_hand,
    run_program,
)
from plumbline.hunt.search import recipes
from plumbline.hunt.write_up import processes_of
from plumbline.planning.declaration import Declaration
from plumbline.subjects.declare import CAPABILITIES
from plumbline.subjects.virtual_environments import LIBRARIES, cache_folder
from plumbline.workloads.generated import Recipe

SUBJECTS = Path(plumbline.subjects.__file__).parent
WIDEST = 120
TEMPLATES = sorted(file.name.partition(".")[0] for file in (SUBJECTS / "programs").glob("*.py.jinja"))
WINDOWS = Recipe(steps_per_epoch=3, accumulate=2)
SCHEDULED = Recipe(inputs="sparse-tokens", schedule="warm-up", steps_per_epoch=4, accumulate=2)
DECAYING = Recipe(layers=("unused",), optimizer="adamw")
SMALL = [
    Recipe(),
    Recipe(epochs=2, steps_per_epoch=2),
    WINDOWS,
    replace(WINDOWS, epochs=2, clip_norm=0.05),
    replace(WINDOWS, inputs="tokens"),
    Recipe(inputs="sparse-tokens"),
    Recipe(inputs="images"),
    Recipe(layers=("batchnorm", "tanh"), optimizer="adam"),
    Recipe(layers=("frozen",), optimizer="momentum"),
    DECAYING,
    Recipe(layers=("tied",)),
    Recipe(loss="squares", layers=("layernorm", "linear-5")),
    Recipe(loss="in-batch"),
    Recipe(steps_per_epoch=2, left_out=3),
]
"""Problems like those to which searches shrink failures; every template writes a program for them."""

MODULES = {
    "accelerate": "accelerate",
    "aitoolbox": "aitoolbox",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "fabric": "lightning",
    "ignite": "ignite",
    "lightning": "lightning",
    "ray": "ray pyarrow",  # from ray[train]; ray alone lacks it
    "sentence-transformers": "sentence_transformers",
    "sentence-transformers-gather": "sentence_transformers",
    "torch": "torch",
    "transformers": "transformers",
    "trl": "trl",
    "trl-padding-free": "trl",
}
OWN_LOSS = ("trl", "trl-padding-free")
NOT_ASKED = {
    "composer": {"unused"},
    "deepspeed": {"sparse-tokens"},
    "transformers": {"sparse-tokens"},
    "sentence-transformers": {"sparse-tokens"},
    "sentence-transformers-gather": {"sparse-tokens"},
    "trl": {"batchnorm", "unused"},
    "trl-padding-free": {"batchnorm", "unused"},
}
"""Words of recipes that searches do not ask these trainers for."""

NEVER_RESUMED = ("aitoolbox", "ray", "sentence-transformers", "sentence-transformers-gather", "torch")
"""Templates without an interruption. With Ray and torch, resuming is in the user's own loop."""

REPORTING = ("ignite", "lightning", "transformers", "sentence-transformers", "sentence-transformers-gather")
"""Libraries that average a training loss themselves."""

INTERRUPTED = Recipe(steps_per_epoch=2, epochs=2, optimizer="adam", interrupt_after=1)
FILLED_UP = Recipe(inputs="text", loss="labels", batch_size=3, steps_per_epoch=2, left_out=2)

VALIDATED = Finding("metrics", Outcome.FAILED, "val_loss was reported as 2 where 1 is correct")
LEFT_OUT = Finding("validation", Outcome.FAILED, "1 of 7 held-out samples were not evaluated in evaluation 1 of 1")
STEPS = Finding("steps", Outcome.FAILED, "1 optimizer step instead of 2 on rank 0")
REPORTED = Finding("metrics", Outcome.FAILED, "loss was reported as 2 where 1 is correct")
RESUMED = Finding("checkpoint", Outcome.FAILED, "the resumed training used different samples")
SHARED = Finding("buffers", Outcome.FAILED, "buffers are not broadcast", cause="buffers-not-broadcast")
SAMPLES = Finding("samples", Outcome.FAILED, "8 draws of epoch 0 were repeats")
GRADIENTS = Finding("gradients", Outcome.FAILED, "gradients do not match those of one device")
RAISED = Finding("launch", Outcome.FAILED, "rank 0: ValueError: of its own", cause="raised")


def problem_of(recipe, subject, ranks=2, precision="32", finding=GRADIENTS, backend=None):
    backend = backend or ("ddp" if ranks > 1 else "none")
    return Problem(recipe, Cell(subject, "mlp", backend, Topology(1, ranks), precision, "cpu"), finding)


def asked_of(subject, recipe):
    """Return the recipe as a search asks the subject for it, or None if it does not."""
    if subject in OWN_LOSS:
        recipe = replace(recipe, inputs="text", loss="labels")
    return recipe if NOT_ASKED.get(subject, set()).isdisjoint((recipe.inputs, *recipe.layers)) else None


def python_of(subject):
    """Return an interpreter with the subject's library, this one or that of an environment; skip without one."""
    if all(find_spec(module) for module in MODULES[subject].split()):
        return sys.executable
    library = LIBRARIES[subject].partition("[")[0]
    made = sorted(cache_folder().glob(f"{library}-*/bin/python"))
    return str(made[-1]) if made else pytest.skip(f"{library} is not installed")


def run_of(program, subject, processes=2):
    """Run a program like a hunt."""
    return run_program(program, processes, python_of(subject), SUBJECTS / "programs" / subject)


def text_of(problem):
    return render(problem, SUBJECTS, "A program.")


@given(
    st.booleans().flatmap(lambda own_loss: recipes(CAPABILITIES, own_loss=own_loss)), st.sampled_from(TEMPLATES),
    st.integers(1, 3), st.sampled_from(["64", "32", "bf16"]),
    st.sampled_from([GRADIENTS, VALIDATED, REPORTED, RESUMED, SAMPLES, SHARED]),
)  # fmt: skip
def test_a_program_is_short_and_needs_no_plumbline(recipe, subject, ranks, precision, finding):
    if finding is RESUMED:
        recipe = replace(recipe, interrupt_after=1)
    for made in (replace(recipe, shuffle=False), recipe):
        for write in (text_of, lambda problem: render_by_hand(problem, "A program.")):
            try:
                text = write(problem_of(made, subject, ranks, precision, finding))
            except NotExpressedError:
                continue
            lines = [line for line in text.splitlines() if line.strip()]
            assert len(lines) <= MOST_LINES
            assert max(map(len, lines)) <= WIDEST
            assert "plumbline" not in text
            compile(text, "program", "exec")


@pytest.mark.parametrize("subject", TEMPLATES)
def test_small_problems_have_programs(subject):
    shuffled = Recipe(steps_per_epoch=2, epochs=2, left_out=3, shuffle=True)
    drawn = [(recipe, GRADIENTS) for recipe in SMALL]
    drawn += [(WINDOWS, RAISED), (Recipe(layers=("batchnorm",), epochs=2), SHARED)]
    drawn += [(shuffled, SAMPLES), (replace(shuffled, shuffle=False), SAMPLES)]
    if subject not in NEVER_RESUMED:
        drawn.append((INTERRUPTED, RESUMED))
    if subject in REPORTING:
        drawn.append((Recipe(steps_per_epoch=2), REPORTED))
    for recipe, finding in drawn:
        if asked := asked_of(subject, recipe):
            text = text_of(problem_of(asked, subject, finding=finding))
            compile(text, "program", "exec")
            assert not re.search(r"\n\n\n\n| \n|\t", text)  # it is readable


@pytest.mark.parametrize(
    ("recipe", "finding", "said"),
    [
        (Recipe(shuffle=True), GRADIENTS, "order is the trainer's own"),
        (Recipe(layers=("dropout",)), GRADIENTS, "dropout, whose masks"),
        (Recipe(), Finding("buffers", Outcome.FAILED, ""), "buffers"),
        (Recipe(validate_every=1, loss="in-batch"), VALIDATED, "not a mean over samples"),
    ],
)
def test_what_no_program_expresses_is_said(recipe, finding, said):
    with pytest.raises(NotExpressedError, match=said):
        text_of(problem_of(recipe, "accelerate", finding=finding))


def test_the_loss_of_texts_is_the_mean_over_the_tokens_of_all_ranks_and_micro_batches():
    uneven = Recipe(inputs="text", loss="labels", steps_per_epoch=2, accumulate=2, left_out=2)
    assert "shares = [window]" in text_of(problem_of(uneven, "trl"))


def test_micro_batches_weigh_alike_or_by_their_samples():
    uneven = Recipe(steps_per_epoch=2, accumulate=2, left_out=2)
    assert "(1 / len(shares) * loss_of(" in text_of(problem_of(uneven, "torch"))
    assert "(len(share) / len(window) * loss_of(" in text_of(problem_of(uneven, "composer"))


def test_samples_that_are_not_evaluated_show_in_the_loss_that_is_reported():
    assert "evaluate()" in text_of(problem_of(Recipe(validate_every=1), "sentence-transformers", finding=LEFT_OUT))


def test_of_shuffled_samples_the_ranks_shares_are_shown_under_accumulation_too():
    shuffled = Recipe(steps_per_epoch=3, accumulate=3, left_out=1, shuffle=True)
    assert problem_of(shuffled, "transformers", finding=SAMPLES).kind == "samples"


def test_a_subject_without_a_template_is_told_where_to_write_one(tmp_path):
    with pytest.raises(NoTemplateError) as raised:
        render(problem_of(Recipe(), "mine"), tmp_path, "A program.")
    assert str(tmp_path / "programs" / "mine.py.jinja") in raised.value.advice


def test_a_template_of_the_user_s_own_stands_beside_the_adapter(tmp_path):
    (tmp_path / "programs").mkdir()
    mine = '{% extends "program.py.jinja" %}{% block training %}\ndef train(model, data): ...\n{% endblock %}'
    (tmp_path / "programs" / "mine.py.jinja").write_text(mine + '{% block version %}"mine"{% endblock %}')
    text = render(problem_of(Recipe(), "mine"), tmp_path, "A program.")
    assert "\ndef train(model, data): ...\n" in text
    assert 'print("mine", "- weights differ' in text


@pytest.mark.parametrize(
    ("statement", "expected_error", "shown"),
    [
        ("raise SystemExit('Deviates: 1 is not 2.')", None, Shown.YES),
        ("print('the same')", None, Shown.NO),
        ("raise ValueError('of its own')", None, Shown.BROKE),
        ("raise ValueError('of its own')", "rank 0 raised ValueError: of its own", Shown.YES),
        ("assert False", None, Shown.BROKE),
        ("import time; time.sleep(600)", None, Shown.BROKE),
    ],
)
def test_only_the_comparison_or_the_error_that_was_found_shows_a_deviation(tmp_path, statement, expected_error, shown):
    (tmp_path / "program.py").write_text(f"{statement}\n")
    run = run_program(tmp_path / "program.py", 1, sys.executable, time_limit=1.0 if "sleep" in statement else 60.0)
    assert run.shows(expected_error) is shown
    assert (run.exit_code is None) == ("sleep" in statement)


def test_a_program_that_ends_without_a_reason_is_run_again(tmp_path):
    """Torch may abort when a process ends."""
    (tmp_path / "program.py").write_text(
        "import os, pathlib\nprint('compared')\nonce = pathlib.Path(__file__).with_name('once')\n"
        "if not once.exists():\n    once.touch()\n    os.abort()\n"
    )
    run = run_program(tmp_path / "program.py", 1, sys.executable)
    assert (run.exit_code, run.printed) == (0, "compared")


def test_a_program_that_prints_more_than_a_pipe_holds_comes_to_its_end(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\nfor out in (sys.stdout, sys.stderr):\n    out.write('.' * 200_000)\n"
    )
    run = run_program(tmp_path / "program.py", 1, sys.executable)
    assert run.exit_code == 0
    assert len(run.printed) == 200_000


def test_a_program_is_given_modules_that_its_environment_lacks(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "lacking.py").write_text("MODULE = 'found'\n")
    (tmp_path / "program.py").write_text("import lacking\nprint(lacking.MODULE)\n")
    assert run_program(tmp_path / "program.py", 1, sys.executable, tmp_path / "given").printed == "found"


@pytest.mark.parametrize("layers", [(), ("thawed",), ("experts",)], ids="-".join)
def test_a_right_trainer_is_not_accused_and_a_wrong_step_is(layers, capsys):
    """The default case: torch alone, on one rank, with a wrong learning rate."""
    text = text_of(problem_of(replace(WINDOWS, layers=layers), "torch", ranks=1))
    wrong = text.replace("SGD(wrapped.parameters(), lr=0.1)", "SGD(wrapped.parameters(), lr=0.2)")
    with torch.random.fork_rng():
        exec(compile(text, "right", "exec"), {})
        with pytest.raises(SystemExit, match="Deviates: "):
            exec(compile(wrong, "wrong", "exec"), {})
    assert capsys.readouterr().out.count("weights differ by") == 2


@pytest.mark.parametrize("loss", ["two", "token-mean", "in-batch"])
def test_a_program_trains_with_every_loss(loss):
    text = text_of(problem_of(Recipe(inputs="tokens", loss=loss, returns="nested"), "torch", ranks=1))
    with torch.random.fork_rng():
        exec(compile(text, "program", "exec"), {})


@pytest.mark.parametrize("precision", [name for name, one in PRECISIONS.items() if one.masters is None])
def test_the_tolerance_is_that_of_the_precision(precision, capsys):
    with torch.random.fork_rng():
        exec(compile(text_of(problem_of(Recipe(), "torch", 1, precision)), "program", "exec"), {})
    limit = float(capsys.readouterr().out.split()[-1])
    least, most = {
        "64": (1e-16, 1e-12),
        "32": (1e-7, 1e-4),
        "bf16": (1e-4, 1e-1),
        "bf16-true": (1e-3, 1),
        "16": (1e-5, 1e-2),
    }[precision]
    assert least < limit < most


def test_a_training_that_diverges_shows_no_deviation(capsys):
    text = text_of(problem_of(Recipe(epochs=2), "torch", 1)).replace("lr=0.1", "lr=1e30")
    with torch.random.fork_rng():
        exec(compile(text, "program", "exec"), {})
    assert capsys.readouterr().out.split()[-1] in ("inf", "nan")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "recipe",
    [SMALL[1], SMALL[5], SMALL[6], SMALL[9], SMALL[10], SMALL[12], replace(WINDOWS, steps_per_epoch=2)],
    ids=lambda recipe: f"{recipe.inputs}-{'-'.join(recipe.layers)}-{recipe.loss}-{recipe.accumulate}",
)
@pytest.mark.parametrize("subject", TEMPLATES)
def test_a_released_trainer_that_is_right_is_not_accused(tmp_path, subject, recipe):
    asked = asked_of(subject, recipe)
    if asked is None:
        pytest.skip("no search asks it for this")
    if subject == "deepspeed" and recipe == DECAYING:
        pytest.skip("it decays weights that have no gradient")
    (tmp_path / "program.py").write_text(text_of(problem_of(asked, subject)))
    run = run_of(tmp_path / "program.py", subject)
    assert run.shows(None) is Shown.NO, run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("subject", "recipe", "finding"),
    # Resumed within an epoch, Lightning starts the epoch's samples again.
    [(one, INTERRUPTED, RESUMED) for one in TEMPLATES if one not in (*NEVER_RESUMED, "lightning")]
    + [("lightning", replace(INTERRUPTED, interrupt_after=2), RESUMED)]
    + [(one, Recipe(steps_per_epoch=2, shuffle=True), REPORTED) for one in REPORTING]
    + [(one, Recipe(steps_per_epoch=2, epochs=2, left_out=1), SAMPLES) for one in ("fabric", "ignite", "torch")]
    + [(one, Recipe(layers=("batchnorm",), epochs=2), SHARED) for one in ("accelerate", "fabric", "lightning")],
)
def test_what_a_released_trainer_does_right_is_not_accused(tmp_path, subject, recipe, finding):
    problem = problem_of(asked_of(subject, recipe), subject, finding=finding).visible(())
    (tmp_path / "program.py").write_text(text_of(problem))
    run = run_of(tmp_path / "program.py", subject)
    assert run.shows(None) is Shown.NO, run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("subject", "recipe", "finding"),
    [
        ("accelerate", WINDOWS, GRADIENTS),
        ("accelerate", Recipe(steps_per_epoch=2, left_out=3, shuffle=True), SAMPLES),
        ("aitoolbox", WINDOWS, GRADIENTS),
        ("lightning", WINDOWS, GRADIENTS),
        ("ignite", WINDOWS, STEPS),
        ("deepspeed", WINDOWS, STEPS),
        ("deepspeed", DECAYING, GRADIENTS),
        ("transformers", Recipe(batch_size=3, validate_every=1), VALIDATED),
        ("accelerate", replace(INTERRUPTED, shuffle=True), RESUMED),
        ("lightning", replace(INTERRUPTED, shuffle=True), RESUMED),
        ("ignite", Recipe(steps_per_epoch=4, accumulate=2, interrupt_after=1, shuffle=True), RESUMED),
        ("ignite", Recipe(batch_size=3, validate_every=1), VALIDATED),
        ("lightning", Recipe(batch_size=3, validate_every=1), VALIDATED),
        ("sentence-transformers", Recipe(batch_size=3, steps_per_epoch=2, left_out=1), STEPS),
        ("sentence-transformers", Recipe(batch_size=1, validate_every=1), LEFT_OUT),
        ("sentence-transformers-gather", Recipe(steps_per_epoch=2, left_out=3, shuffle=True), SAMPLES),
        ("trl", FILLED_UP, SAMPLES),
        ("trl-padding-free", FILLED_UP, SAMPLES),
        ("lightning", Recipe(validate_every=2), RAISED),
        ("fabric", Recipe(optimizer="several", clip_norm=0.05), GRADIENTS),
        ("accelerate", SCHEDULED, Finding("learning-rate", Outcome.FAILED, "")),
        ("transformers", WINDOWS, REPORTED),
        ("lightning", Recipe(steps_per_epoch=2, left_out=1), SAMPLES),
        ("lightning", Recipe(layers=("batchnorm",), epochs=2, optimizer="several"), SHARED),
        ("sentence-transformers", WINDOWS, REPORTED),
    ],
)
def test_what_a_released_trainer_is_known_to_do_is_shown(tmp_path, subject, recipe, finding):
    ranks = 1 if finding is RESUMED else 2  # with several epochs, Accelerate and Ignite draw the same order again
    problem = problem_of(recipe, subject, ranks, finding=finding).visible(())
    (tmp_path / "program.py").write_text(text_of(problem))
    run = run_of(tmp_path / "program.py", subject, ranks)
    assert run.shows(finding.message if finding is RAISED else None) is Shown.YES, run


@pytest.mark.nightly
@pytest.mark.parametrize("subject", OWN_LOSS)
def test_means_over_the_tokens_of_each_rank_are_shown(tmp_path, subject):
    text = text_of(problem_of(asked_of(subject, SMALL[1]), subject))
    wrong = text.replace("trl.SFTConfig(", "trl.SFTConfig(average_tokens_across_devices=False,")
    (tmp_path / "program.py").write_text(wrong)
    assert wrong != text
    assert run_program(tmp_path / "program.py", 2, python_of(subject)).shows(None) is Shown.YES


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("subject", "backend", "ranks", "precision", "recipe"),
    [
        ("torch", "none", 1, "16", replace(WINDOWS, clip_norm=0.05)),
        ("torch", "ddp", 2, "16", Recipe(steps_per_epoch=2, loss="squares", schedule="warm-up")),
        ("torch", "ddp", 2, "bf16", Recipe(steps_per_epoch=2, loss="squares")),
        ("torch", "fsdp", 2, "32", replace(WINDOWS, clip_norm=0.05)),
        ("torch", "fsdp", 2, "bf16", Recipe(layers=("layernorm", "tanh"))),
        ("torch", "hsdp", 4, "64", Recipe(steps_per_epoch=2, optimizer="adam")),
        ("torch", "zero", 2, "32", Recipe(steps_per_epoch=2, optimizer="groups", schedule="warm-up")),
        ("torch", "zero", 2, "32", Recipe(steps_per_epoch=2, optimizer="several")),
        ("torch", "none", 1, "32", Recipe(steps_per_epoch=2, optimizer="several", schedule="warm-up")),
        ("torch", "ddp", 2, "32", Recipe(steps_per_epoch=2, layers=("experts",), optimizer="muon")),
        ("torch", "ddp", 2, "32", Recipe(steps_per_epoch=2, layers=("adapter", "tanh", "adapter"), optimizer="adam")),
        ("fabric", "ddp", 2, "16", Recipe(steps_per_epoch=2, loss="squares")),
        ("fabric", "fsdp", 2, "32", Recipe(epochs=2)),
        ("deepspeed", "fsdp", 2, "32", Recipe(steps_per_epoch=2)),
        ("lightning", "none", 1, "16", Recipe(steps_per_epoch=2, loss="squares")),
    ],
)
def test_a_right_backend_and_precision_are_not_accused(tmp_path, subject, backend, ranks, precision, recipe):
    problem = problem_of(recipe, subject, ranks, precision, backend=backend)
    (tmp_path / "program.py").write_text(text_of(problem))
    run = run_program(tmp_path / "program.py", ranks, python_of(subject))
    assert run.shows(None) is Shown.NO, run


@pytest.mark.nightly
@pytest.mark.parametrize(("accumulate", "shown"), [(3, Shown.YES), (2, Shown.NO)])
def test_a_share_that_float32_does_not_hold_shows_in_float64(tmp_path, accumulate, shown):
    """Composer multiplies the loss by it in float32, which rounds a third but not a half."""
    problem = problem_of(Recipe(steps_per_epoch=accumulate, accumulate=accumulate), "composer", 1, "64")
    (tmp_path / "program.py").write_text(text_of(problem))
    assert run_of(tmp_path / "program.py", "composer", 1).shows(None) is shown


@pytest.mark.nightly
def test_what_several_nodes_start_is_shown_by_one(tmp_path):
    launched = Cell("aitoolbox", "mlp", "ddp", Topology(2, 3), "32", "cpu")
    problem = Problem(Recipe(), launched, Finding("launch", Outcome.TIMED_OUT, "the launch did not end in time"))
    (tmp_path / "program.py").write_text(text_of(problem))
    run = run_of(tmp_path / "program.py", "aitoolbox", 1)
    assert run.shows(None) is Shown.YES
    assert "starts: 6" in run.printed


@pytest.mark.parametrize(
    ("launch", "topology", "processes"),
    [("rank", Topology(2, 2), 4), ("node", Topology(1, 2), 2), ("node", Topology(2, 2), 1)],
)
def test_a_program_begins_in_one_process_a_rank_or_on_one_of_several_nodes_that_start_them(launch, topology, processes):
    declaration = Declaration("mine", "mine.py", ["ddp"], {"cpu": ["32"]}, frozenset(), launch=launch)
    assert processes_of(declaration, Cell("mine", "mlp", "ddp", topology, "32", "cpu")) == processes


def test_the_command_is_one_that_readers_have():
    assert command_of(Path("p.py"), 2) == ["torchrun", "--standalone", "--nproc_per_node", "2", "p.py"]
    assert command_of(Path("p.py"), 1) == ["python", "p.py"]
