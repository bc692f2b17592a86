"""Records as lines of ``results.jsonl`` and back: strict JSON, one object a line, each with its checksum.

``results.schema.json`` beside this file is the schema of a line.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from plumbline.results.document_schema import DIALECT
from plumbline.results.header_footer import SCHEMA_VERSION, Footer, Header
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
