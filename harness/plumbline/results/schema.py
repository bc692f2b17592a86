"""The JSON schema of ``results.jsonl``: what one line of it may be. ``results.schema.json`` beside this file has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from plumbline.results.document_schema import DIALECT
from plumbline.results.header_footer import SCHEMA_VERSION
from plumbline.results.json_lines import Line

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
