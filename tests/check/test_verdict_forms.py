"""The verdict on a terminal, as JSON and as a page: all agree, and text from a script stays text."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

from checked_commands import BROKEN, FOLLOWS, NOT_JUDGED, RIGHT, WRONG, checked, training
from hypothesis import given
from hypothesis import strategies as st

from plumbline.check.judge.noted import headline_note, information
from plumbline.check.report.files import REPORT, write_report
from plumbline.check.report.json_file import as_json
from plumbline.check.report.lines import annotations_on, check_sarif, unjudged_annotation, verdict_markdown
from plumbline.check.report.page import verdict_page
from plumbline.check.report.terminal import verdict_screen
from plumbline.check.verdict.verdict import verdict_of
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.report.annotations import github_commands
from plumbline.report.text import percent

EVERYTHING = checked(training(WRONG, FOLLOWS, BROKEN), training(RIGHT, ranks=1, optimizers=2), code=1)


def screen(command, **options):
    return verdict_screen(command, verdict_of(command), **options)


def page(command):
    return verdict_page(command, verdict_of(command))


def document(command):
    return json.loads(as_json(command, verdict_of(command)))


def test_the_first_line_is_the_answer():
    assert screen(checked(training(RIGHT))).startswith("RIGHT: 100 % of gradients and updates judged in 4 steps")
    assert screen(checked(training(RIGHT, moved=(0,)))).startswith("RIGHT IN PART: 100 % of gradients, 75 % of updates")
    assert screen(checked(training(WRONG))).startswith("WRONG: gradients: not synchronised (3.9e6 × rounding noise)")
    assert screen(checked(training(NOT_JUDGED))).startswith("NOT JUDGED: no gradients were judged")


def test_place_and_what_to_look_at_follow_the_first_line():
    lines = screen(checked(training(WRONG, FOLLOWS))).splitlines()
    assert lines[1].strip() == "first at step 1, rank 0, parameter net.weight"
    assert "does the forward go through" in " ".join(" ".join(lines[2:4]).split())


def test_a_screen_fits_80_columns_and_is_plain():
    text = screen(EVERYTHING, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\x1b" in screen(EVERYTHING, colour=True)


def test_each_question_has_a_line_with_its_answer():
    text = screen(checked(training(WRONG, FOLLOWS, BROKEN)))
    assert re.search(r"wrong +ranks-agree +consequence of gradients", text)
    assert re.search(r"not judged +update +the check raised an error", text)


def test_what_says_nothing_about_being_right_is_a_note_everywhere():
    command = checked(training(RIGHT, information("ranks-agree", "ranks hold different weights")))
    assert re.search(r"note +ranks-agree +Ranks hold different weights\.", screen(command))
    assert re.search(r"ranks-agree</th>.*note</td><td>Ranks hold different weights\.", page(command))
    assert [one["information"] for one in document(command)["trainings"][0]["findings"]] == [False, True]


def test_notes_in_the_list_of_checks_are_sentences_and_begin_with_a_capital_unless_with_code():
    told = ["one rank is idle", "no_sync() is never left", "The loss is a mean. It is scaled."]
    text = screen(checked(training(RIGHT, *(information("samples", one) for one in told))))
    assert re.findall(r"note +samples +(.*)", text) == ["One rank is idle.", "no_sync() is never left.", told[2]]


def test_an_update_that_is_right_is_right_only_for_what_was_judged():
    right = Finding("update", Outcome.PASSED, "weights after the step match")
    in_part, whole = (screen(checked(training(RIGHT, right, moved=moved))) for moved in ((0,), (0, 1)))
    assert re.search(r"ok +update +75 % judged: weights", in_part)
    assert re.search(r"ok +update +weights after the step match", whole)


def test_the_last_line_says_how_long_it_ran_and_how_long_judging_took_if_anything_was_judged():
    assert screen(checked(training(RIGHT)), width=100).endswith("exit code 0, ran 12.5 s, judged in 250 ms")
    assert screen(checked()).endswith("exit code 0, ran 12.5 s")


def test_a_job_that_fails_although_nothing_is_wrong_has_an_annotation():
    (one,) = unjudged_annotation(verdict_of(checked(training(RIGHT), code=1)))
    assert github_commands([one]).startswith(
        "::error title=plumbline check%3A not judged::the command failed: exit code 1"
    )
    assert "What to do: run the command without Plumbline" in one.message
    assert not unjudged_annotation(verdict_of(checked(training(RIGHT))))
    assert not unjudged_annotation(verdict_of(checked(training(WRONG), code=1)))


def test_a_page_shows_names_in_what_to_do_as_code():
    shown = page(checked())
    assert "What to do: <b>use Python 3.10 or newer, and pass <code>PYTHONPATH</code> and <code>" in shown


def test_what_the_reader_must_do_is_shown_whole_on_a_narrow_screen():
    long = f"the loader {'and its sampler ' * 15}begin each epoch alike: call sampler.set_epoch(epoch)"
    for one in (information("samples", long), replace(NOT_JUDGED, message=long)):
        text = " ".join(screen(checked(training(RIGHT, one)), width=60).split())
        assert "call sampler.set_epoch(epoch)" in text


def test_a_note_for_the_headline_stands_right_under_it_everywhere():
    said = "The gradient is the sum over 4 micro-batches, not their mean."
    command = checked(training(RIGHT, headline_note("objective", said)))
    first, _, rest = screen(command).partition("\n\n")
    assert said in " ".join(first.split())
    assert "objective" not in rest
    assert page(command).count(said) == 1
    (one,) = document(command)["trainings"]
    assert one["notes"] == [said]
    assert one["findings"][1]["information"]


def test_what_was_not_covered_is_said_as_a_share_with_the_reason():
    text = " ".join(screen(checked(training(RIGHT))).split())
    assert "judged: 100 % of gradients and 100 % of updates, of 8 trainable entries" in text
    assert "recomputed in float64 on each rank: 75 % of the backward passes' gradients" in text
    assert "not recomputed: 25 %, scale: used outside any recorded call" in text


def test_without_a_replay_it_is_said_what_gradients_were_compared_with():
    text = " ".join(screen(checked(training(RIGHT, replayed=False))).split())
    assert "gradients were compared with those of the script's own backward passes" in text


def test_only_all_is_100_percent():
    assert [percent(share) for share in (0, 1e-9, 0.5, 1 - 1e-9, 1)] == ["0 %", "0.1 %", "50 %", "99.9 %", "100 %"]


def test_each_of_several_trainings_has_an_answer():
    text = screen(EVERYTHING)
    assert text.startswith("WRONG: 1 of 2 trainings: gradients")
    assert "training 1: WRONG" in text
    assert "training 2: RIGHT" in text
    assert "2 × an optimizer" in text


def test_json_has_every_field_of_every_finding():
    written = document(EVERYTHING)
    assert (written["version"], written["verdict"], written["exit_code"]) == (1, "wrong", 1)
    assert written["script"] == {"exit_code": 1, "ended_by": "itself", "seconds": 12.5}
    first, second = written["trainings"]
    assert [one["check"] for one in first["findings"]] == ["gradients", "ranks-agree", "update"] or len(
        first["findings"]
    ) == 3
    assert set(first["findings"][0]) == {field.name for field in fields(Finding)} | {"information"}
    assert first["findings"][0]["parameters"] == {"net.weight": 3.9e6, "scale": "inf"}
    assert first["findings"][1]["error_x_noise"] is None
    assert (second["ranks"], second["steps"], second["optimizers"]) == (1, 4, ["an optimizer", "an optimizer"])
    assert second["coverage"]["replayed"] == 0.75
    assert (second["coverage"]["compared"], second["coverage"]["updates"]) == (1, 1)


def test_every_answer_has_a_page_and_annotations():
    for one in (training(RIGHT), training(RIGHT, moved=(0,)), training(NOT_JUDGED), training(WRONG)):
        command = checked(one)
        verdict = verdict_of(command)
        assert verdict.answer.value in page(command).lower()
        assert verdict.answer.value in check_sarif(command, verdict)


def test_each_mistake_that_stands_by_itself_is_named_first_and_has_a_box():
    also = replace(WRONG, check="buffers", cause="buffers-not-broadcast", hint="broadcast them", error_x_noise=None)
    command = checked(training(WRONG, FOLLOWS, also))
    assert "gradients: not synchronised (3.9e6 × rounding noise); buffers: buffers not broadcast" in " ".join(
        screen(command).split()
    )
    assert re.findall(r"<h3>(.*?)</h3>", page(command))[:2] == ["Not synchronised", "Buffers not broadcast"]
    assert '<dd class="advice">broadcast them</dd>' in page(command)


def test_a_page_works_offline():
    text = page(EVERYTHING)
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "<script" not in text
    assert "default-src 'none'" in text


@given(st.text(max_size=40))
def test_text_of_a_script_is_only_text(text):
    hostile = f"<script>{text}</script>\x1b[31m & [bold]"
    named = replace(WRONG, parameter=hostile, message=hostile, parameters=((hostile, 1.0),))
    command = replace(checked(training(named, replace(BROKEN, message=hostile))), command=("python", hostile))
    assert "<script" not in page(command)
    assert "\x1b" not in screen(command)
    assert document(command)["trainings"][0]["findings"][0]["message"] == hostile


def test_quiet_a_right_training_has_one_line_and_any_other_is_shown_whole():
    assert screen(checked(training(RIGHT)), quiet=True) == screen(checked(training(RIGHT)), width=240).splitlines()[0]
    noted = checked(training(RIGHT, headline_note("objective", "It is a sum.")))
    assert screen(noted, quiet=True).endswith("; 1 note hidden by --quiet")
    failed = checked(training(RIGHT), code=3)
    for other in (EVERYTHING, failed, checked(training(NOT_JUDGED)), checked(training(RIGHT, moved=(0,)))):
        assert screen(other, quiet=True) == screen(other)


def test_options_of_the_project_s_file_are_said_to_come_from_there_everywhere():
    command = replace(checked(training(RIGHT)), settings={"steps": 2, "p": ["causes"]})
    said = 'settings of pyproject.toml: steps = 2, p = ["causes"]'
    assert screen(command).splitlines()[-1].strip() == said
    assert said.replace('"', "&#34;") in page(command)
    assert document(command)["settings"] == {"steps": 2, "p": ["causes"]}
    assert "pyproject.toml" not in screen(checked(training(RIGHT)))


def test_a_report_has_the_verdict_in_every_form_at_the_line_in_the_repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "trainings").mkdir()
    (tmp_path / "trainings" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "trainings")
    command = checked(training(WRONG, FOLLOWS, facts={"script": {"file": "train.py", "line": 7}}))
    write_report(tmp_path, command, verdict_of(command))
    assert {*REPORT} <= {file.name for file in tmp_path.iterdir()}
    (problem,) = json.loads((tmp_path / "code-quality.json").read_text())
    assert problem["location"] == {"path": "trainings/train.py", "lines": {"begin": 7}}
    assert "::error file=trainings/train.py,line=7," in github_commands(annotations_on(command))
    assert ">wrong</text>" in (tmp_path / "badge.svg").read_text()


def test_markdown_begins_with_the_verdict_and_text_from_a_script_is_only_text():
    evil = replace(WRONG, message="<img src=x> | `a` [b](c)", parameter="<b>|")
    command = checked(training(evil, FOLLOWS, headline_note("objective", "a sum")), training(RIGHT))
    text = verdict_markdown(command, verdict_of(command))
    assert text.startswith("### ❌ WRONG: 1 of 2 trainings: gradients: not synchronised")
    assert "#### Training 2: ✅ RIGHT" in text
    assert "> Note: a sum" in text
    assert re.search(r"^\| wrong \| ranks-agree \| consequence of gradients", text, re.MULTILINE)
    assert "<img" not in text
    assert "<b>" not in text
