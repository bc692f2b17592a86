"""The page about a run of the corpus: tables in Markdown."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version

from mistakes import Mistake
from published import COMMITS
from running import Ran
from script import REWRITTEN, Script
from verdict import Verdict

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch-ignite")
LONGEST = 160


@dataclass(frozen=True)
class Checked:
    """A script that was run plainly, under check, and plainly again where the losses differ.

    ``why_not`` says why it could not be run.
    """

    script: Script
    first: Ran | None = None
    second: Ran | None = None
    recorded: Ran | None = None
    verdict: Verdict | None = None
    why_not: str = ""

    @property
    def losses(self) -> str:
        """Whether the losses under check are those of a plain run."""
        if self.first is None or not self.first.losses:
            return "none"
        if self.recorded is not None and self.recorded.losses == self.first.losses:
            return "the same"
        repeats = self.second is not None and self.second.losses == self.first.losses
        if not repeats:
            return "differ without it too"
        return "repeat" if self.recorded is None else "**DIFFER**"

    @property
    def is_as_it_should_be(self) -> bool:
        """Whether it ran, and a right script was called right and a wrong one wrong. What cannot be run is left out."""
        if self.why_not:
            return True
        if self.first is None or self.first.code != 0:
            return False
        if self.recorded is None:
            return True
        accused = self.verdict is not None and bool(self.verdict.bad)
        return self.verdict is not None and accused == bool(self.script.wrong) and self.losses != "**DIFFER**"

    @property
    def verdict_text(self) -> str:
        """The verdict, and whether it is true."""
        if self.verdict is None:
            return "**no verdict**"
        if not self.verdict.bad:
            return "right" if not self.script.wrong else "right, **not found**"
        found = f"wrong: {self.verdict.first_cause}"
        return f"{found} (true: {self.script.wrong})" if self.script.wrong else f"{found} **(not proven)**"

    @property
    def slower(self) -> str:
        """The time under check over that of a plain run, of whole processes."""
        if self.first is None or self.recorded is None:
            return "–"
        return f"{self.recorded.seconds / self.first.seconds:.1f}"

    def line(self) -> str:
        """Return one line for the terminal."""
        if self.why_not:
            return f"{self.script.name}: not run, {self.why_not}"
        assert self.first is not None
        parts = [f"exit {self.first.code}, {self.first.seconds:.1f} s, losses {self.losses}"]
        if self.recorded is not None:
            parts += [f"check: exit {self.recorded.code}, {self.recorded.seconds:.1f} s, {self.verdict_text}"]
        if not self.is_as_it_should_be:
            parts += ["", *(self.recorded or self.first).output.splitlines()[-25:]]
        return f"{self.script.name}: " + "\n    ".join(parts)


@dataclass(frozen=True)
class Tried:
    """A script with a mistake in it, run under check."""

    mistake: Mistake
    script: Script
    recorded: Ran | None = None
    verdict: Verdict | None = None
    why_not: str = ""

    @property
    def is_as_it_should_be(self) -> bool:
        """Whether the first finding names the mistake, or nothing is held against what is none."""
        if self.why_not:
            return True
        if self.verdict is None:
            return False
        found = self.verdict.first_cause
        return found in self.mistake.causes if self.mistake.causes else found is None

    def line(self) -> str:
        """Return one line for the terminal."""
        if self.why_not:
            return f"{self.mistake.name} in {self.script.name}: not run, {self.why_not}"
        found = self.verdict.first_cause if self.verdict else "**no verdict**"
        line = f"{self.mistake.name} in {self.script.name}: {found or 'nothing'}"
        if self.is_as_it_should_be:
            return line
        output = self.recorded.output.splitlines()[-25:] if self.recorded else []
        return "\n    ".join([f"{line}, expected {' or '.join(self.mistake.causes) or 'nothing'}", *output])


def page(scripts: Sequence[Checked], mistakes: Sequence[Tried]) -> str:
    """Return the page."""
    lines = ["# Real scripts under `plumbline check`", "", introduction(), ""]
    ran = [one for one in scripts if not one.why_not]
    if ran:
        lines += script_table(ran)
    tried = [one for one in mistakes if not one.why_not]
    if tried:
        lines += mistake_table(tried)
    both: tuple[Checked | Tried, ...] = (*scripts, *mistakes)
    left = {one.script.name: one.why_not for one in both if one.why_not}
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
        f"{', '.join(packages)}, CPU, gloo, one thread a rank. Scripts of public repositories run as they were "
        "published, with tiny data in the place of their downloads; they are not part of this project."
    )


def script_table(ran: Sequence[Checked]) -> list[str]:
    """Return the lines about scripts."""
    unmodified = [one for one in ran if one.script.is_unmodified]
    same = sum(one.losses == "the same" for one in ran)
    right = sum(one.is_as_it_should_be for one in ran)
    lines = [
        "## Scripts",
        "",
        f"{len(ran)} scripts, {len(unmodified)} of them published and unmodified. As it should be: {right}. Losses bit "
        f"for bit the same with and without check: {same}.",
        "",
        "`time` is that of the whole command under check over that of a plain run, start-up, replay "
        "and judging included, on a machine that did other work too.",
        "",
        "| script | source | ranks | covers | verdict | × noise | covered | losses | time |",
        "| --- | --- | --: | --- | --- | --: | --: | --- | --: |",
    ]
    for one in ran:
        noise = one.verdict.noise if one.verdict else None
        coverage = one.verdict.coverage if one.verdict else None
        lines.append(
            f"| {one.script.name} | {source(one.script)} | {one.script.ranks} | {one.script.covers} | "
            f"{one.verdict_text} | {'–' if noise is None else f'{noise:.3g}'} | "
            f"{'–' if coverage is None else f'{100 * coverage:.1f} %'} | {one.losses} | {one.slower} |"
        )
    return lines


def source(script: Script) -> str:
    """Return where a script comes from."""
    if script.source == REWRITTEN:
        return REWRITTEN
    changed = "" if script.is_unmodified else ", devices changed"
    return f"{script.source} {COMMITS[script.source][:7]}{changed}"


def mistake_table(tried: Sequence[Tried]) -> list[str]:
    """Return the lines about mistakes."""
    real = [one for one in tried if one.mistake.causes]
    names = {one.mistake.name for one in real}
    often = [name for name in names if sum(one.mistake.name == name and one.is_as_it_should_be for one in real) >= 3]
    lines = [
        "",
        "## Mistakes",
        "",
        f"{len(names)} mistakes put into {len({one.script.name for one in real})} scripts: named by the first finding "
        f"in {sum(one.is_as_it_should_be for one in real)} of {len(real)} runs, found at all in "
        f"{sum(bool(one.verdict and one.verdict.bad) for one in real)}; {len(often)} of them named in three scripts or "
        "more.",
        "",
        "| mistake | script | first finding | × noise | named |",
        "| --- | --- | --- | --: | :-: |",
    ]
    for one in tried:
        bad = one.verdict.bad if one.verdict else ()
        first = f"{bad[0]['check']}: {bad[0].get('cause') or 'unexplained'}" if bad else "none"
        noise = bad[0].get("error_x_noise") if bad else None
        lines.append(
            f"| {one.mistake.name}: {one.mistake.says} | {one.script.name} | {first} | "
            f"{'–' if noise is None else f'{noise:.2g}'} | {'yes' if one.is_as_it_should_be else '**NO**'} |"
        )
    return lines
