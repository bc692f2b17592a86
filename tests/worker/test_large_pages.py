"""Memory that is gathered in large pages holds what it held; a fork may write to it."""

from __future__ import annotations

import mmap
import os
import random

from plumbline.worker.preload import gather_in_large_pages


def test_what_is_in_memory_stays_here_and_in_a_fork():
    held = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    content = random.Random(0).randbytes(len(held))
    held[:] = content
    gather_in_large_pages()
    assert held[:] == content
    pid = os.fork()
    if pid == 0:
        held[5 << 20] ^= 1
        os._exit(held[:] != content[: 5 << 20] + bytes([content[5 << 20] ^ 1]) + content[(5 << 20) + 1 :])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert held[:] == content
