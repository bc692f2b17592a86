"""Training with each schedule of torch.distributed.pipelining: one subject per schedule.

Schedules with several stages per rank have two, the only number that V-shaped schedules support.
"""

from torch.distributed import pipelining

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import PRECISIONS
from plumbline.subjects.torch_pp import CAPABILITIES, Schedule, train_with

SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", 2),
    "looped-bfs": ("ScheduleLoopedBFS", 2),
    "interleaved-zero-bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zbv-zero-bubble": ("ScheduleZBVZeroBubble", 2),
    "dualpipev": ("ScheduleDualPipeV", 2),
}
"""torch's class, which some versions lack, and the number of stages per rank, by schedule."""

TURNING = ("zbv-zero-bubble", "dualpipev")
"""V-shaped schedules: stages go from the first rank to the last and back."""

MAX_STAGES = {"dualpipev": 4}
"""DualPipeV needs at least as many micro-batches as stages."""


def trainer_with(name):
    make, stages_per_rank = SCHEDULES[name]
    schedule = Schedule(getattr(pipelining, make), stages_per_rank, name in TURNING)

    @subject(
        name=f"torch-{name}",
        backends=["pp"],
        precisions=PRECISIONS,
        capabilities=CAPABILITIES,
        library="torch",
        stages_per_rank=stages_per_rank,
        max_stages=MAX_STAGES.get(name),
        devices="own",
        batches="equal",
    )
    def train(job):
        train_with(schedule, job)

    return train


globals().update({name: trainer_with(name) for name, (make, _) in SCHEDULES.items() if hasattr(pipelining, make)})
