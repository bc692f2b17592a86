"""A run as one frozen value, read from the lines of its ``results.jsonl`` (``results.schema.json``)."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from plumbline.results.fields import DIALECT
from plumbline.results.files import CorruptRecord, MissingHeader, NewerSchema, ResultsError, RunNotFound
from plumbline.results.header_footer import SCHEMA_VERSION, Footer, Header
from plumbline.results.records import Coordinates, Measurement, PlannedCell, Result, by_cell

Line = Header | Result | Measurement | Footer  # the record of a line
_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\s*$')


class ChecksumError(ValueError):
    """A line was changed after it was written."""


_RECORD: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


def line_of(record: Line) -> bytes:
    """Return the record as one line of UTF-8 with its newline. The last field is the CRC-32 of the others."""
    body = record.model_dump_json().encode()
    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def record_of(line: bytes) -> Line:
    """Read one line back; raise ``ChecksumError``, or pydantic's ``ValidationError`` if it is not a record."""
    if (found := _CHECKSUM.search(line)) and zlib.crc32(line[: found.start()] + b"}") != int(found[1], 16):
        raise ChecksumError("its checksum does not match")
    return _RECORD.validate_json(line, strict=True)


FILE: Final = Path(__file__).with_name("results.schema.json")


def results_schema() -> dict[str, Any]:
    """Return the schema of a line: a header, a result, a measurement or a footer, with its checksum."""
    return {
        "$schema": DIALECT,
        "$id": f"urn:plumbline:results:{SCHEMA_VERSION}",
        "title": "A line of results.jsonl",
        "type": "object",
        "properties": {"crc32": {"type": "string", "pattern": "^[0-9a-f]{8}$"}},
        "required": ["type"],
        **TypeAdapter[Line](Line).json_schema(mode="serialization"),
    }


RESULTS = "results.jsonl"
LATEST = "latest"
PROFILES = "profiles"  # the subfolder of a run with the files of profiled launches, one folder per cell

# In bytes: far above what a run writes, and low enough that a hostile file cannot exhaust the memory.
LARGEST_FILE = 1 << 29
LARGEST_LINE = 1 << 25


@dataclass(frozen=True)
class Run:
    """The records of a run. ``path`` is its folder; ``torn``: the last line was cut off and is left out."""

    header: Header
    results: tuple[Result, ...]
    footer: Footer | None
    path: Path
    torn: bool = False
    measurements: tuple[Measurement, ...] = ()

    @property
    def missing(self) -> tuple[PlannedCell, ...]:
        seen = {record.coordinates for record in (*self.results, *self.measurements)}
        return tuple(cell for cell in self.header.planned if cell.coordinates not in seen)

    @property
    def whole(self) -> dict[Coordinates, tuple[Result, ...]]:
        """The findings of each cell whose findings were all recorded."""
        return {
            coordinates: tuple(found)
            for coordinates, found in by_cell(self.results).items()
            if (len(found) >= found[0].findings if found[0].findings else coordinates != self.cut_short)
        }

    @property
    def cut_short(self) -> Coordinates | None:
        """The last cell of a run without a footer: it may lack findings."""
        return self.results[-1].coordinates if self.footer is None and self.results else None

    @property
    def incomplete(self) -> bool:
        """Whether the run ended early: no footer, a torn line, or cells without a record."""
        return self.footer is None or self.torn or bool(self.missing)


def read_run(path: Path) -> Run:
    """Read a run from its folder, from ``latest``, or from its ``results.jsonl``, or raise a ``ResultsError``.

    A last line that was cut off is left out, and the run is then ``incomplete``.
    """
    # os.path returns False for a name that is too long; Path would raise.
    file = path / RESULTS if os.path.isdir(path) else path
    if os.path.islink(file):  # pages would be written to where it leads
        raise RunNotFound(f"{file} is a symbolic link: name the folder of the run itself.")
    if not os.path.isfile(file):  # also refuses a pipe or a device, which might never end
        raise RunNotFound(
            f"There is no run at {path}: name a folder that holds a {RESULTS}, "
            f"for example the {LATEST} folder of a report directory."
        )
    try:
        # One byte more than allowed shows whether the file is too large, even if it grows meanwhile.
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ResultsError(f"Cannot read {file} ({error.strerror}): make it readable.") from error
    if len(content) > LARGEST_FILE:
        raise ResultsError(f"{file} is larger than {LARGEST_FILE >> 20} MiB: it is not a run of plumbline.")
    return _assemble(content, file.resolve())


def _assemble(content: bytes, file: Path) -> Run:
    lines = content.split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise MissingHeader(_without_header(file, "is empty"))
    header = _read_header(file, *numbered[0])
    results: list[Result] = []
    measurements: list[Measurement] = []
    footer: Footer | None = None
    torn = False
    for number, line in numbered[1:]:
        record = _read_record(file, number, line, may_be_torn=number == numbered[-1][0])
        if record is None:
            torn = True
        elif isinstance(record, Header) or footer is not None:
            raise CorruptRecord(f"{file}, line {number}: a {record.type} is not allowed here. {_WAY_OUT}")
        elif isinstance(record, Footer):
            footer = record
        elif isinstance(record, Measurement):
            measurements.append(record)
        else:
            results.append(record)
    return Run(header, tuple(results), footer, file.parent, torn, tuple(measurements))


_WAY_OUT = "The file was changed after it was written: copy it from its source again, or repeat the run."


def _read_record(file: Path, number: int, line: bytes, *, may_be_torn: bool) -> Line | None:
    if len(line) > LARGEST_LINE:
        raise CorruptRecord(f"{file}, line {number}: longer than {LARGEST_LINE >> 20} MiB. {_WAY_OUT}")
    try:
        return record_of(line)
    except ValidationError as error:
        complaints = error.errors(include_input=False, include_url=False)
        if may_be_torn and any(part["type"] == "json_invalid" for part in complaints):
            return None
        # Which field is wrong and why, without the file's content: it may be long or hostile.
        where = ".".join(str(part) for part in complaints[0]["loc"])[:80]
        why = f"{where}: {complaints[0]['msg'][:200]}" if where else complaints[0]["msg"][:200]
        raise CorruptRecord(f"{file}, line {number}: {why}. {_WAY_OUT}") from error
    except ChecksumError as error:
        raise CorruptRecord(f"{file}, line {number}: {error}. {_WAY_OUT}") from error


def _without_header(file: Path, what: str) -> str:
    if file.name != RESULTS:  # perhaps a file of the user's own
        return f"{file} is not a run: name a folder that holds a {RESULTS}."
    return (
        f"{file} {what}: the run ended before it began, or it is not a run of plumbline. Delete its folder, or name "
        "another run."
    )


class _Envelope(BaseModel):
    """The fields of a header in any schema version."""

    type: str
    schema_version: int | None = None


def _read_header(file: Path, number: int, line: bytes) -> Header:
    if len(line) > LARGEST_LINE:
        raise MissingHeader(f"{file} does not begin with a header: it is not a run of plumbline.")
    try:
        envelope = _Envelope.model_validate_json(line, strict=True)
    except ValidationError as error:
        raise MissingHeader(_without_header(file, "does not begin with a complete header")) from error
    if envelope.type != "header" or envelope.schema_version is None:
        raise MissingHeader(f"{file} does not begin with a header: name another run.")
    if envelope.schema_version > SCHEMA_VERSION:
        raise NewerSchema(
            f"{file} has schema version {envelope.schema_version}, and this plumbline reads up to "
            f"{SCHEMA_VERSION}: upgrade plumbline."
        )
    record = _read_record(file, number, line, may_be_torn=False)
    if not isinstance(record, Header):
        raise MissingHeader(f"{file} does not begin with a header: name another run.")
    return record
