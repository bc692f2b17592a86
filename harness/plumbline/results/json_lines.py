"""Records as lines of ``results.jsonl`` and back: strict JSON, one object a line, each with its checksum."""

from __future__ import annotations

import re
import zlib
from typing import Annotated

from pydantic import Field, TypeAdapter

from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Measurement, Result

Line = Header | Result | Measurement | Footer
"""The record of a line."""

_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\s*$')


class ChecksumError(ValueError):
    """A line was changed after it was written."""


_RECORD: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


def line_of(record: Line) -> bytes:
    """Return the record as one line of UTF-8, its newline included; the last field is the others' CRC-32."""
    body = record.model_dump_json().encode()
    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def record_of(line: bytes) -> Line:
    """Read one line back.

    Raises:
        pydantic.ValidationError: it is not JSON, or not a record of this schema version.
        ChecksumError: it has a checksum that does not match.

    """
    if (found := _CHECKSUM.search(line)) and zlib.crc32(line[: found.start()] + b"}") != int(found[1], 16):
        raise ChecksumError("its checksum does not match")
    return _RECORD.validate_json(line, strict=True)
