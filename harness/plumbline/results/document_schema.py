"""JSON schemas of the documents that Plumbline writes for programs."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def document_schema(document: type[BaseModel], name: str, version: int) -> dict[str, Any]:
    """Return the schema of a document, with an id of its ``name`` and ``version``."""
    schema = document.model_json_schema(mode="serialization")
    return {"$schema": DIALECT, "$id": f"urn:plumbline:{name}:{version}", **schema}
