"""torch's own trainers: one subject, whose backends are declared each by its own file."""

from harness.subjects.handwritten import train as train
from harness.subjects.torch_cp import train as train_cp
from harness.subjects.torch_dp import train as train_dp
from harness.subjects.torch_ep import train as train_ep
from harness.subjects.torch_fsdp import train as train_fsdp
from harness.subjects.torch_pp import train as train_pp
from harness.subjects.torch_sp import train as train_sp
from harness.subjects.torch_tp import train as train_tp
from harness.subjects.torch_zero import train as train_zero

__all__ = [
    "train", "train_cp", "train_dp", "train_ep", "train_fsdp", "train_pp", "train_sp", "train_tp", "train_zero",
]  # fmt: skip
