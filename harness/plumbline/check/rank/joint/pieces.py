"""Parameters whose copies are stepped, as in mixed-precision trainers: one copy may be spread over several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import as_real
from plumbline.check.rank.joint.weights import JointParameter
from plumbline.recording.master_weights import Piece
from plumbline.recording.observer import Facts


class JointPieces(JointParameter):
    """A parameter of which this rank's optimizers hold ``pieces``, possibly none.

    Each piece has the factor by which its gradient was scaled and clipped since the backward passes. ``recorded`` has
    the recorded names of all ranks' pieces.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        pieces: Sequence[tuple[Piece, float]],
        recorded: Sequence[str],
        scaled: float = 1.0,
        stage: str = "",
        *,
        is_tied: bool = False,
    ) -> None:
        super().__init__(name, parameter, scaled=scaled, stage=stage, is_tied=is_tied)
        self._pieces = pieces
        self._recorded = list(recorded)

    @property
    def is_complete(self) -> bool:
        """Whether all pieces have a gradient: some trainers assign it one optimizer step after the other."""
        return all(one.master.grad is not None for one, _ in self._pieces)

    def gradient(self) -> Tensor | None:
        """Return the pieces' gradient before scaling and clipping, zeros elsewhere; None without a piece."""
        return self._joined([factor for _, factor in self._pieces])

    def received(self) -> Tensor | None:
        """Return the gradient as the optimizers receive it, scaled and clipped."""
        return self._joined([1.0] * len(self._pieces))

    def own_part(self, along: Tensor) -> Tensor:
        """Return a direction with zeros outside of this rank's pieces."""
        own = torch.zeros(self.shape.numel(), dtype=along.dtype, device=along.device)
        for piece, _ in self._pieces:
            own[piece.start : piece.start + piece.length] = 1
        return along * own.view(along.shape)

    def _joined(self, factors: Sequence[float]) -> Tensor | None:
        if not self._pieces:
            return None
        dtype = torch.complex128 if self.parameter.is_complex() else torch.float64
        joined = torch.zeros(self.shape.numel(), dtype=dtype, device=self.parameter.device)
        for (piece, _), factor in zip(self._pieces, factors, strict=True):
            if piece.master.grad is not None:
                joined[piece.start : piece.start + piece.length] = piece.of(piece.master.grad.detach()) / factor
        return as_real(joined.view(self.shape))

    def described(self, gradient: Tensor | None) -> Facts:
        """Return this rank's description of the parameter, and where its pieces lie."""
        return {
            **super().described(gradient),
            "recorded": self._recorded,
            "pieces": [[one.start, one.length] for one, _ in self._pieces],
        }
