"""The log of a forked rank, which its fork server writes."""

from __future__ import annotations

import os

KEPT = 1 << 19
"""Bytes of output that a log keeps at the beginning, and again at the end."""

_AT_ONCE = 1 << 16
_ENOUGH = 1 << 22


class Log:
    """Reads a rank's output from a pipe, and writes it to ``path``.

    Output between the beginning and the end is counted and dropped, so a rank can neither fill the disk nor wait for
    it. If the log cannot be written, the cell does not fail.
    """

    def __init__(self, path: str) -> None:
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        self._room = KEPT
        self._end = bytearray()
        self._left_out = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            self._file = os.open(os.devnull, os.O_WRONLY)

    def read(self) -> bool:
        """Read what has arrived, up to a limit; return whether more may follow."""
        for _ in range(_ENOUGH // _AT_ONCE):
            try:
                chunk = os.read(self.source, _AT_ONCE)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._take(chunk)
        return True

    def close(self) -> None:
        """Read the rest, and write the end. A process that prints later gets SIGPIPE."""
        self.read()
        os.close(self.source)
        if self._left_out:
            self._write(f"\n… {self._left_out} bytes left out …\n".encode())
        self._write(bytes(self._end))
        os.close(self._file)

    def close_in_fork(self) -> None:
        os.close(self.source)
        os.close(self._file)

    def _take(self, chunk: bytes) -> None:
        beginning, rest = chunk[: self._room], chunk[self._room :]
        self._room -= len(beginning)
        self._write(beginning)
        self._end += rest
        if len(self._end) > 2 * KEPT:
            self._left_out += len(self._end) - KEPT
            del self._end[:-KEPT]

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            pass
