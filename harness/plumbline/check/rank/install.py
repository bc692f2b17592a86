"""Installs the recorder with its observers in a process of the user's command, as soon as torch is imported there."""

from __future__ import annotations

import os
from collections.abc import Callable

from plumbline.check.evidence.options import Deal, RecordingOptions, read_deal, read_options
from plumbline.check.rank.evidence_writer import EvidenceWriter
from plumbline.check.rank.observers.documents import DocumentObserver
from plumbline.check.rank.observers.experts import ExpertObserver
from plumbline.check.rank.observers.frozen_weights import FrozenWeightObserver, MovedWeightObserver
from plumbline.check.rank.observers.gathered_outputs import GatheredOutputObserver
from plumbline.check.rank.observers.generators import GeneratorObserver
from plumbline.check.rank.observers.loaders import BatchObserver, LoaderObserver
from plumbline.check.rank.observers.objective import ObjectiveObserver
from plumbline.check.rank.observers.parallelism import ParallelismObserver
from plumbline.check.rank.observers.recomputation import RecomputationObserver
from plumbline.check.rank.observers.script_line import ScriptLineObserver
from plumbline.check.rank.observers.splits import SplitObserver
from plumbline.check.rank.observers.ties import TieObserver
from plumbline.check.rank.observers.unused_losses import UnusedLossObserver
from plumbline.check.rank.observers.weights import BufferObserver, WeightObserver
from plumbline.check.rank.optimizer.clipping import ClippingObserver
from plumbline.check.rank.optimizer.learning_rate import LearningRate
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer.precision_used import PrecisionUsed
from plumbline.check.rank.optimizer.state_continuity import ResumableStateObserver, StateContinuity
from plumbline.check.rank.optimizer.update_replay import UpdateReplay
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.check.rank.recorder import TrainingRecorder
from plumbline.check.rank.recording_cost import RecordingCost
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames
from plumbline.recording.process import follow_processes
from plumbline.replay.applied_functions import keep_functions_patched


def activate(folder: str, note: Callable[..., None]) -> None:
    """Record the optimizer steps of this process as the options in ``folder`` say, and write them there.

    ``note`` adds facts to the notes about this process.

    Raises:
        OSError, ValueError: the folder has no options.
    """
    keep_functions_patched()
    recorder = make_recorder(folder)
    recorder.install()
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            recorder.finish()
            note(**recorder.progress)
        elif recorder.has_steps:
            recorder.finish()

    # A forked process is separate: it takes steps of its own, or none.
    follow_processes(end, recorder.forget)


def make_recorder(folder: str) -> TrainingRecorder:
    options = read_options(folder)
    return recorder_of(options, EvidenceWriter(lambda: folder), read_deal(folder) if options.splits else {})


def recorder_of(options: RecordingOptions, writer: EvidenceWriter, deal: Deal) -> TrainingRecorder:
    names, scale, sample = ParameterNames(), LossScale(), ParameterSample(options.sample_parameters)
    clipping = ClippingObserver(scale)
    replays: list[Observer] = [UpdateReplay(sample)] if options.replays else []
    replays = [RecordingCost()] if options.dry_run else replays
    others: list[Observer] = [LearningRate(), PrecisionUsed(), *training_observers(names), StateContinuity(), *replays]
    if options.state:
        others.append(ResumableStateObserver())
    if options.splits:
        others.append(SplitObserver(deal, without_dropout=options.without_dropout))
    return TrainingRecorder(options, writer, names, scale, clipping, others, sample)


def training_observers(names: ParameterNames) -> list[Observer]:
    """Return new observers for one process, in the order in which they are to be called."""
    loaders, parallelism, objective = LoaderObserver(), ParallelismObserver(), ObjectiveObserver(names)
    return [
        loaders,
        parallelism,
        BatchObserver(loaders),
        GeneratorObserver(),
        RecomputationObserver(),
        BufferObserver(parallelism),
        WeightObserver(parallelism),
        DocumentObserver(objective),
        objective,
        UnusedLossObserver(names),
        GatheredOutputObserver(),
        ExpertObserver(names),
        TieObserver(names),
        MovedWeightObserver(),
        FrozenWeightObserver(),
        ScriptLineObserver(),
    ]
