"""A workload that no trainer is asked about: experts whose gradients are clipped."""

from __future__ import annotations

from plumbline.workloads.experts import MixtureOfExperts
from plumbline.workloads.updates import Clipping


class ClippedExperts(MixtureOfExperts, Clipping):
    """A mixture of experts whose gradients are clipped to a fraction of their length."""

    name = "clipped-experts"
    exposes = "norms without experts, with those of some ranks only, or averaged over ranks"
