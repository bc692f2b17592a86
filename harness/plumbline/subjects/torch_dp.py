"""Training with torch's DataParallel: one process with a replica on each device."""

from __future__ import annotations

from torch.nn import DataParallel

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, PRECISIONS, OneDevice, fit


@subject(
    name="torch",
    backends=["dp"],
    precisions={"cuda": PRECISIONS},  # on CPUs it would be a plain forward
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    fit(job, Dp(job))


class Dp(OneDevice):
    """DataParallel, which splits each batch over the devices and gathers the outputs on the first."""

    def __init__(self, job):
        super().__init__(job)
        self.model = DataParallel(self.bare, job.devices)
