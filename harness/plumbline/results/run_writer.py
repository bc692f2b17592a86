"""Writes a run's folder, record by record while the run goes on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from plumbline.core.invocation import command
from plumbline.results.files import NothingToResume, ReportDirUnusable, ResultsError, point_symlink
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Coordinates
from plumbline.results.run import LATEST, RESULTS, ChecksumError, Line, Run, line_of, read_run, record_of


class RunWriter:
    """Appends the records of a run to its file. ``write`` returns when the operating system has them.

    Without ``close`` (after a crash, or at the end of its ``with`` block) the run has no footer. If the report
    directory or the file cannot be written to, methods raise ``ReportDirUnusable`` or ``ResultsError``.
    """

    def __init__(self, report_dir: Path, header: Header) -> None:
        self.path = report_dir / header.run_id
        try:
            self.path.mkdir(parents=True)
            self._file: FileIO = (self.path / RESULTS).open("xb", buffering=0)
            _claim(self._file)
            self.write(header)
            point_symlink(report_dir / LATEST, header.run_id)
        except OSError as error:
            where = error.filename2 or error.filename
            raise ReportDirUnusable(
                f"Cannot start a run in the report directory {report_dir} ({error.strerror}: {where}): "
                "make it writable or choose another with --report-dir."
            ) from error

    @classmethod
    def resume(cls, path: Path) -> tuple[RunWriter, Run]:
        """Reopen the run at ``path`` after its last complete cell; return the writer, and the run up to there.

        Records of an incomplete cell were never reported, and are cut off. Raise ``NothingToResume`` if the run is
        complete or another process is writing it, and ``ResultsError`` if it cannot be read or written to.
        """
        file = read_run(path).path / RESULTS
        writer = object.__new__(cls)
        writer.path = file.parent
        try:
            writer._file = file.open("r+b", buffering=0)
            _claim(writer._file)
            run = read_run(file)
            if not run.incomplete:
                raise NothingToResume(
                    f"{file.parent} is already complete. Begin a new run, or rewrite its pages with "
                    f"`{command('plumbline', 'report', str(file.parent))}`."
                )
            content = file.read_bytes()
            whole, end = run.whole, 0
            for number, line in enumerate(content.splitlines(keepends=True)):
                if number and line.strip() and not _is_of(line, whole):
                    break
                end += len(line)
            writer._file.seek(writer._file.truncate(end))
            if not content[:end].endswith(b"\n"):
                writer._file.write(b"\n")  # only the newline was missing
        except OSError as error:
            raise ResultsError(f"Cannot resume {file} ({error.strerror}): make it writable.") from error
        return writer, read_run(file)

    def close(self, footer: Footer) -> None:
        """Append the footer: the run is complete."""
        self.write(footer)
        self._file.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, *records: Line) -> None:
        """Append records: all of them, or none if that fails."""
        end = self._file.seek(0, os.SEEK_CUR)
        data = memoryview(b"".join(map(line_of, records)))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.seek(self._file.truncate(end))  # all of them or none
            raise ResultsError(
                f"Cannot write to {self.path / RESULTS} ({error.strerror}): "
                "free disk space or choose another directory with --report-dir."
            ) from error


def check_report_dir(report_dir: Path) -> None:
    """Raise ``ReportDirUnusable`` if no run could be written below ``report_dir``, which need not exist yet."""
    nearest = next(path for path in (report_dir, *report_dir.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        raise ReportDirUnusable(
            f"Cannot create the report directory {report_dir}: {nearest} is not a directory. "
            "Move it away or choose another directory with --report-dir."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
        reason = "is on a read-only file system" if read_only else "is not writable"
        raise ReportDirUnusable(
            f"Cannot write to the report directory {report_dir}: {nearest} {reason}. "
            "Make it writable or choose another with --report-dir."
        )


def _claim(file: FileIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise NothingToResume(
            f"The run {Path(file.name).parent} is being written by another process: "
            "wait until it ends, or begin a new run."
        ) from None
    except OSError:  # a file system without locks
        pass


def _is_of(line: bytes, whole: Collection[Coordinates]) -> bool:
    try:
        record = record_of(line)
    except (ValidationError, ChecksumError):
        return False
    return isinstance(record, Header) or (not isinstance(record, Footer) and record.coordinates in whole)
