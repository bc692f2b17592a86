"""The recorder of a process that a subject starts by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from plumbline.evidence.tensor_store import TensorStore
from plumbline.recording.process import rank_and_world
from plumbline.worker.recording.recorder import Recorder


class ChildRecorder(Recorder):
    """A recorder that learns its rank from the process group, and that can be pickled and sent to a child.

    A pickled model brings its hooks along: where they are unpickled, they are those of that process's own recorder
    (:mod:`plumbline.worker.node_member` says how it is pickled).
    """

    def __init__(self, store: TensorStore, report: Callable[..., None], finish: Callable[[], None]) -> None:
        super().__init__(store, _Counter(report))
        self.rank: int | None = None
        self._report = report
        self._finish = finish

    @property
    def model(self) -> nn.Module | None:
        """The model that is recorded, and that carries the recorder's hooks."""
        return self._tensors.model

    def __setstate__(self, model: nn.Module) -> None:
        # It has no parameters yet: it is being unpickled itself, and holds the hook that brought us here.
        self._tensors.model = model
        self._watched = [model]

    @property
    def is_active(self) -> bool:
        """Whether anything was recorded that only a rank does."""
        return bool(self.steps or self.evaluations or self.rank is not None)

    def reset(self) -> None:
        """Forget all but the models: what was recorded so far belongs to the parent process."""
        model, watched = self._tensors.model, self._watched
        self.__init__(self._store, self._report, self._finish)  # type: ignore[misc]
        self._tensors.model, self._watched = model, watched

    def on_finished(self) -> None:
        """Write the evidence now: this process may be killed."""
        self._finish()

    def _note_world(self) -> None:
        super()._note_world()
        place = rank_and_world()
        if place is not None and place[0] != self.rank:
            self.rank = place[0]
            self._report(rank=self.rank)


class _Counter:
    """A recorder's number of steps: each new number is reported."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report

    def __setitem__(self, place: slice, number: bytes) -> None:
        self._report(steps=int.from_bytes(number, "little"))
