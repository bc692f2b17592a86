"""The files of runs and checks for other programs match their schemas, and the schemas match the code."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from plumbline.results.run import FILE

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "reports" / "example-simulated" / "results.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(FILE.read_text()))


def test_the_committed_schemas_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(ROOT / "ci" / "schemas.py"))["run"](["--check"]) == 0, capsys.readouterr().out


def test_a_schema_is_one(validator: Draft202012Validator) -> None:
    Draft202012Validator.check_schema(validator.schema)
    assert validator.schema["$id"] == "urn:plumbline:results:1"


@pytest.mark.parametrize("line", [EXAMPLE[0], *EXAMPLE[1:-1:500], EXAMPLE[-1]], ids=lambda line: line[:20])
def test_a_line_of_the_example_is_valid(validator: Draft202012Validator, line: str) -> None:
    validator.validate(json.loads(line))


@pytest.mark.parametrize(
    "wrong", [{"outcome": "great"}, {"step": -1}, {"gpus": 0}, {"type": "remark"}, {"error_x_noise": "much"}], ids=str
)
def test_what_is_no_record_is_invalid(validator: Draft202012Validator, wrong: dict[str, object]) -> None:
    result = json.loads(EXAMPLE[1])
    assert validator.is_valid(result)
    assert not validator.is_valid({**result, **wrong})
    assert not validator.is_valid({name: value for name, value in result.items() if name != "cell"})
