"""Training with torch's DataParallel, as its documentation does: one process, a replica on each of its devices."""

from __future__ import annotations

from torch.nn import DataParallel

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import CAPABILITIES, PRECISIONS, OneDevice, fit


@subject(
    name="torch",
    backends=["dp"],
    precisions={"cuda": PRECISIONS},  # with several cpus it is one plain forward
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    fit(job, Dp(job))


class Dp(OneDevice):
    """DataParallel: each forward splits the batch over the devices, and gathers the outputs on the first."""

    def __init__(self, job):
        super().__init__(job)
        self.model = DataParallel(self.bare, job.devices)
