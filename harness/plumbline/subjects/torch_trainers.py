"""The torch trainers: one subject, with a file for each group of backends."""

from plumbline.subjects.torch_base import train, train_dp, train_zero
from plumbline.subjects.torch_cp import train as train_cp
from plumbline.subjects.torch_ep import train as train_ep
from plumbline.subjects.torch_fsdp import train as train_fsdp
from plumbline.subjects.torch_pp import train as train_pp
from plumbline.subjects.torch_tp import train as train_tp
from plumbline.subjects.torch_tp import train_sp

__all__ = [
    "train", "train_cp", "train_dp", "train_ep", "train_fsdp", "train_pp", "train_sp", "train_tp", "train_zero",
]  # fmt: skip
