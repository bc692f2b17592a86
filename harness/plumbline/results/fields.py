"""The types of a record's fields, and the JSON schemas of documents that have them."""

from __future__ import annotations

import math
from datetime import timezone
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, Field, JsonValue, PlainSerializer


def _encodable(value: object) -> object:
    """Escape lone surrogates: they come from bytes that are not UTF-8, and JSON cannot represent them."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    def holds(part: JsonValue) -> bool:
        if isinstance(part, dict):
            return all(map(holds, part.values()))
        if isinstance(part, list):
            return all(map(holds, part))
        return not isinstance(part, float) or math.isfinite(part)

    if not holds(value):
        raise ValueError("numbers in it must be finite")
    return value


Text = Annotated[str, BeforeValidator(_encodable)]
Count = Annotated[int, Field(ge=0, le=2**53)]  # up to the largest integer that every JSON reader represents exactly
AtLeastOne = Annotated[int, Field(ge=1, le=2**53)]
UtcTime = Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(timezone.utc))]
XNoise = Annotated[
    float,
    BeforeValidator(lambda value: float(value) if value in ("inf", "-inf") and isinstance(value, str) else value),
    AfterValidator(lambda value: math.inf if value is not None and math.isnan(value) else value),
    PlainSerializer(
        lambda value: value if value is None or math.isfinite(value) else str(value),
        return_type=float | Literal["inf", "-inf"],
    ),
]
Figure = Annotated[float, Field(allow_inf_nan=False)]
Plain = Annotated[dict[str, JsonValue], AfterValidator(_finite)]


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def document_schema(document: type[BaseModel], name: str, version: int) -> dict[str, Any]:
    """Return the schema of a document, with an id of its ``name`` and ``version``."""
    schema = document.model_json_schema(mode="serialization")
    return {"$schema": DIALECT, "$id": f"urn:plumbline:{name}:{version}", **schema}
