"""The body as one of torch's own test cases, which spawn their ranks."""

from __future__ import annotations

import os
from contextlib import suppress

import torch.distributed as dist
from ddp import train_and_compare
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.testing._internal.common_distributed import MultiProcessTestCase


class _Spawned(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        with suppress(OSError):
            os.remove(self.file_name)

    def test_spawned(self) -> None:
        store = FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        train_and_compare(self.rank, self.world_size)
        dist.destroy_process_group()


class Test2(_Spawned):
    """2 ranks."""

    world_size = 2


class Test4(_Spawned):
    """4 ranks."""

    world_size = 4


class Test8(_Spawned):
    """8 ranks."""

    world_size = 8


del _Spawned
