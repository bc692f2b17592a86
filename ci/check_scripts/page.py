"""The page about a run of the corpus, as Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version

from mistake import Mistake
from published import COMMITS
from result import SAME, Result, is_false_accusation, is_false_praise, is_right
from script import REWRITTEN, Script

from plumbline.core.numbers import counted

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch-ignite")

WHOLE = ("right",)
"""Accepted verdicts for a right training that can be judged completely."""

Scripts = Sequence[tuple[Script, Result]]
Mistakes = Sequence[tuple[Mistake, Script, Result]]


def page(scripts: Scripts, mistakes: Mistakes, *, kept: bool = False) -> str:
    """Return the page; with ``kept``, results may be from earlier runs with other states of the project."""
    lines = ["# Real scripts under `plumbline check`", "", introduction(), ""]
    if kept:
        lines += ["Rows were collected over several runs, while the project changed between them.", ""]
    ran = [(script, result) for script, result in scripts if not result.why_not]
    tried = [one for one in mistakes if not one[2].why_not]
    if ran or tried:
        lines += [score(ran, tried), ""]
    if judged := [one for one in ran if one[0].accepted == WHOLE]:
        lines += script_table(judged)
    if others := [one for one in ran if one[0].accepted != WHOLE]:
        lines += ["", *half_judged_table(others)]
    if tried:
        lines += mistake_table(tried)
    left = {one.name: one.why_not for one in [*(r for _, r in scripts), *(r for *_, r in mistakes)] if one.why_not}
    if left:
        lines += ["", "## Not run", "", *(f"- {name}: {why}" for name, why in left.items())]
    return "\n".join([*lines, ""])


def introduction() -> str:
    """Return how the page was made."""
    packages = []
    for name in PACKAGES:
        try:
            packages.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return (
        f"Made on {date.today()} by `python ci/check_scripts.py`: Python {platform.python_version()}, "
        f"{', '.join(packages)}, CPU, gloo, one thread per rank. Scripts of public repositories run as "
        "published, with tiny data instead of their downloads; they are not part of this project."
    )


def score(ran: Scripts, tried: Mistakes) -> str:
    """Return the numbers of false praises and false accusations."""
    every = [(result, script, None) for script, result in ran] + [(r, script, mistake) for mistake, script, r in tried]
    praise = [result.name for result, script, mistake in every if is_false_praise(result, script, mistake)]
    accused = [result.name for result, script, mistake in every if is_false_accusation(result, script, mistake)]
    sentences = (
        f"{what}: {len(names)} of {len(every)} verdicts{' (' if names else ''}{', '.join(names)}{')' if names else ''}."
        for what, names in (("False praise", praise), ("False accusations", accused))
    )
    return " ".join(sentences)


def script_table(ran: Scripts) -> list[str]:
    """Return the lines about scripts."""
    published = sum(script.is_unmodified for script, _ in ran)
    same = sum(result.losses == SAME for _, result in ran)
    right = sum(is_right(result, script, None) for script, result in ran)
    return [
        "## Scripts",
        "",
        f"{counted(len(ran), 'script')}, {published} of them published and unmodified. As expected: {right}. Losses "
        f"with and without check are bitwise equal: {same}.",
        "",
        "`time` is the time of the whole command under check, including start-up, replay and judging, relative to a "
        "plain run, on a machine that did other work too.",
        "",
        "| script | source | ranks | covers | verdict | × noise | covered | losses | time | as expected |",
        "| --- | --- | --: | --- | --- | --: | --: | --- | --: | :-: |",
        *(script_row(script, result) for script, result in ran),
    ]


def half_judged_table(ran: Scripts) -> list[str]:
    """Return the lines about scripts that are wrong or judged only in part."""
    wrong = [result.verdict.answer for script, result in ran if script.is_wrong and result.verdict]
    counts = ", ".join(f"{wrong.count(answer)} {answer}" for answer in dict.fromkeys(("wrong", *wrong)))
    return [
        "## Scripts that are wrong or judged only in part",
        "",
        f"{counted(len(ran), 'script')}, {sum(script.is_wrong for script, _ in ran)} of them wrong. As expected: "
        f"{sum(is_right(result, script, None) for script, result in ran)}. Verdicts on the wrong ones: {counts}.",
        "",
        "| script | source | ranks | covers | truth | may be called | verdict | as expected |",
        "| --- | --- | --: | --- | --- | --- | --- | :-: |",
        *(half_judged_row(script, result) for script, result in ran),
    ]


def half_judged_row(script: Script, result: Result) -> str:
    """Return the line of one such script."""
    cells = (
        script.name,
        source(script),
        str(script.ranks),
        script.covers,
        f"{'wrong' if script.is_wrong else 'right'}: {script.because}",
        ", ".join(script.accepted),
        verdict_of(result),
        "yes" if is_right(result, script, None) else "**NO**",
    )
    return f"| {' | '.join(cells)} |"


def script_row(script: Script, result: Result) -> str:
    """Return the line of one script."""
    verdict = result.verdict
    coverage = verdict.coverage if verdict else None
    cells = (
        script.name,
        source(script),
        str(script.ranks),
        script.covers,
        verdict_of(result),
        number(verdict.noise if verdict else None),
        "–" if coverage is None else f"{100 * coverage:.1f} %",
        result.losses,
        number(result.slower, ".1f"),
        "yes" if is_right(result, script, None) else "**NO**",
    )
    return f"| {' | '.join(cells)} |"


def verdict_of(result: Result) -> str:
    """Return the verdict and its reason."""
    verdict = result.verdict
    if verdict is None:
        return "**none**"
    if verdict.answer == "right":
        return "right"
    if verdict.answer == "wrong":
        return f"wrong, {', '.join(verdict.bad)}"
    return f"{verdict.answer}: {verdict.sentence.removeprefix(f'{verdict.answer}: ')}"


def number(value: float | None, form: str = ".3g") -> str:
    """Format a number, or a dash if there is none."""
    return "–" if value is None else format(value, form)


def source(script: Script) -> str:
    """Return where a script is from."""
    if script.source == REWRITTEN:
        return REWRITTEN
    changed = "" if script.is_unmodified else ", changed"
    return f"{script.source} {COMMITS[script.source][:7]}{changed}"


def mistake_table(tried: Mistakes) -> list[str]:
    """Return the lines about mistakes."""
    real = [one for one in tried if one[0].causes]
    names = {mistake.name for mistake, *_ in real}
    named = [mistake.name for mistake, script, result in real if is_right(result, script, mistake)]
    found = sum(result.verdict is not None and result.verdict.answer == "wrong" for *_, result in real)
    return [
        "",
        "## Mistakes",
        "",
        f"{len(names)} mistakes put into {len({script.name for _, script, _ in real})} scripts, {len(real)} runs: "
        f"found in {found}, named by the first finding in {len(named)}. "
        f"{sum(named.count(name) >= 3 for name in names)} mistakes are named in three scripts or more.",
        "",
        "| mistake | script | first finding | × noise | as expected |",
        "| --- | --- | --- | --: | :-: |",
        *(mistake_row(*one) for one in tried),
    ]


def mistake_row(mistake: Mistake, script: Script, result: Result) -> str:
    """Return the line of one mistake in one script."""
    verdict = result.verdict
    first = "**no verdict**" if verdict is None else verdict.bad[0] if verdict.bad else verdict.answer
    noise = number(verdict.noise if verdict and verdict.bad else None, ".2g")
    right = "yes" if is_right(result, script, mistake) else "**NO**"
    return f"| {mistake.name}: {mistake.says} | {script.name} | {first} | {noise} | {right} |"
