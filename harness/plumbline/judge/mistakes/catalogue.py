"""All known mistakes that are stated as combinations of shares. A new file of them costs one line here."""

from __future__ import annotations

from plumbline.judge.mistakes import accumulation, averaging, loss_scale, synchronisation, zeros

MISTAKES = (
    *accumulation.MISTAKES,
    *averaging.MISTAKES,
    *loss_scale.MISTAKES,
    *synchronisation.MISTAKES,
    *zeros.MISTAKES,
)
