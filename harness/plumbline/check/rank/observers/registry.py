"""Creates the observers of data, random numbers, buffers, weights, the objective and the script."""

from __future__ import annotations

from plumbline.check.rank.observers.batches import BatchObserver
from plumbline.check.rank.observers.buffers import BufferObserver
from plumbline.check.rank.observers.documents import DocumentObserver
from plumbline.check.rank.observers.experts import ExpertObserver
from plumbline.check.rank.observers.frozen_weights import FrozenWeightObserver
from plumbline.check.rank.observers.gathered_outputs import GatheredOutputObserver
from plumbline.check.rank.observers.generators import GeneratorObserver
from plumbline.check.rank.observers.loaders import LoaderObserver
from plumbline.check.rank.observers.moved_weights import MovedWeightObserver
from plumbline.check.rank.observers.objective import ObjectiveObserver
from plumbline.check.rank.observers.parallelism import ParallelismObserver
from plumbline.check.rank.observers.recomputation import RecomputationObserver
from plumbline.check.rank.observers.script_line import ScriptLineObserver
from plumbline.check.rank.observers.ties import TieObserver
from plumbline.check.rank.observers.unused_losses import UnusedLossObserver
from plumbline.check.rank.observers.weights import WeightObserver
from plumbline.recording.observer import Observer


def training_observers(*, count_tokens: bool = False) -> list[Observer]:
    """Return new observers for one process, in the order in which they are to be called.

    Args:
        count_tokens: count the labels of each batch, for a script whose loss is written by hand.
    """
    loaders, parallelism = LoaderObserver(), ParallelismObserver()
    objective = ObjectiveObserver(count_tokens=count_tokens)
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
        UnusedLossObserver(),
        GatheredOutputObserver(),
        ExpertObserver(),
        TieObserver(),
        MovedWeightObserver(),
        FrozenWeightObserver(),
        ScriptLineObserver(),
    ]
