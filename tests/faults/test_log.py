"""A log keeps the beginning and the end of the output, or all of it if it is short."""

from __future__ import annotations

import os

import pytest

from plumbline.worker.rank_log import KEPT, Log


@pytest.mark.parametrize("size", [0, 1, KEPT - 1, KEPT, KEPT + 1, 2 * KEPT, 5 * KEPT + 3])
def test_beginning_and_end_are_kept(tmp_path, size):
    log = Log(str(tmp_path / "log"))
    printed = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    for start in range(0, size, 1 << 15):
        os.write(log.sink, printed[start : start + (1 << 15)])
        assert log.read()
    os.close(log.sink)
    log.close()
    kept = (tmp_path / "log").read_bytes()
    assert kept[:KEPT] == printed[:KEPT]
    assert kept.endswith(printed[-KEPT:])
    if size <= 2 * KEPT:
        assert kept == printed
    else:
        assert b" bytes left out " in kept
        assert len(kept) < 3 * KEPT + 100


def test_a_log_that_cannot_be_written_harms_nobody(tmp_path):
    log = Log(str(tmp_path / "no" / "folder"))
    os.write(log.sink, b"words")
    os.close(log.sink)
    assert not log.read(), "it is read to its end"
    log.close()
