"""Checks a training function on ranks that are forked from this process, in a test or a notebook."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plumbline.check.evidence.options import (
    Deal,
    RecordingOptions,
    refuse_invalid_options,
    refuse_other_than_function,
    refuse_other_than_number,
    write_deal,
    write_options,
)
from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.script_checks import judged_trainings, read_trainings, with_resplit
from plumbline.check.rank.install import make_recorder
from plumbline.check.training_verdict import TrainingVerdict
from plumbline.ranks.rank_main import RankEnd
from plumbline.ranks.run import run_on_ranks
from plumbline.recording.patching import Patches, modules_with_functions_of_torch

_OBSTACLE = "obstacle-"


@dataclass(frozen=True, repr=False)
class CheckedFunction(TrainingVerdict):
    """The verdict on the trainings of a function, and how its ranks ended."""

    ends: tuple[RankEnd, ...] = ()

    @property
    def values(self) -> list[Any]:
        """What the function returned on each rank."""
        return [end.value for end in self.ends]

    def assert_right(self, *, require_full: bool = False) -> None:
        """Raise unless every training was judged and nothing in it is wrong.

        ``require_full``: also raise if less than 99 % of gradients or updates was judged.

        Raises:
            AssertionError: a rank failed, no optimizer stepped, or something is wrong; the message says what to look
                at.
        """
        __tracebackhide__ = True
        for end in self.ends:
            if end.has_failed:
                what = f": {end.description}" if end.description else ""
                raise AssertionError(f"rank {end.rank} {end.how.value}{what}\n{end.stderr}")
        super().assert_right(require_full=require_full)


def check_function(
    train: Callable[[], Any],
    ranks: int = 2,
    *,
    steps: int = 4,
    after: int = 0,
    timeout: float = 120.0,
    objective: str = "",
    resplit: bool = False,
) -> CheckedFunction:
    """Call ``train`` on each of ``ranks`` forked processes, record its first optimizer steps, and judge them.

    Args:
        train: Called without arguments. It creates model, data and optimizer, and trains. torch.distributed is
            initialized.
        ranks: The number of ranks, at least 1.
        steps: Optimizer steps to record.
        after: Optimizer steps to skip first.
        timeout: Seconds after which ranks that are still running are killed.
        objective: The objective that the training is declared to optimise, as in ``plumbline check --objective``.
        resplit: Repeat the first step with its samples split differently, as ``plumbline check --resplit`` does.

    Raises:
        TypeError, ValueError: an argument is invalid.
        LaunchError: the ranks cannot be started here.
    """
    refuse_other_than_function("check()", train)
    refuse_other_than_number("ranks", ranks, 1)
    refuse_invalid_options(steps=steps, after=after, objective=objective)
    if not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0")
    options = RecordingOptions(steps, after, objective=objective, splits=resplit)
    with tempfile.TemporaryDirectory(prefix="plumbline-check-") as folder:
        ends = record_function(train, ranks, Path(folder), options, timeout)
        obstacles = sorted(Path(folder).glob(f"{_OBSTACLE}*"))
        obstacle = obstacles[0].read_text("utf-8") if obstacles else ""
        trainings = judged_trainings(Path(folder))
    if resplit:

        def rerun(options: RecordingOptions, deal: Deal) -> Sequence[RecordedTraining]:
            with tempfile.TemporaryDirectory(prefix="plumbline-check-") as folder:
                record_function(train, ranks, Path(folder), replace(options, stop=False), timeout, deal)
                return read_trainings(Path(folder))

        trainings = with_resplit(trainings, rerun)
    return CheckedFunction(tuple(trainings), obstacle, ends)


def record_function(
    train: Callable[[], Any],
    ranks: int,
    folder: Path,
    options: RecordingOptions,
    timeout: float = 120.0,
    deal: Deal | None = None,
) -> tuple[RankEnd, ...]:
    """Call ``train`` on forked ranks and record it in ``folder``, as ``check_function`` does, without judging it."""
    write_options(folder, options)
    if deal is not None:
        write_deal(folder, deal)
    importers = modules_with_functions_of_torch()

    def recorded(_: Any) -> Any:
        recorder = make_recorder(str(folder))
        patches = Patches()
        patches.open()
        recorder.install()
        patches.replace_imported(importers)
        try:
            return train()
        finally:
            recorder.finish()
            if error := recorder.progress["error"]:
                Path(folder, f"{_OBSTACLE}{os.getpid()}").write_text(f"recording failed: {error}", "utf-8")

    return run_on_ranks(recorded, ranks, timeout=timeout)
