"""Writes the JSON schemas of Plumbline's outputs: `results.jsonl`, and the JSON of commands.

python ci/schemas.py            # rewrites the files in harness/plumbline/
python ci/schemas.py --check    # exits with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from plumbline.check.report import json_file
from plumbline.cli import documents
from plumbline.report import for_programs
from plumbline.results import run as results_run

SCHEMAS: dict[Path, Callable[[], dict[str, Any]]] = {
    results_run.FILE: results_run.results_schema,
    for_programs.FILE: for_programs.report_schema,
    json_file.FILE: json_file.check_schema,
    json_file.DRY_RUN_FILE: json_file.dry_run_schema,
    **{file: partial(documents.schema_in, file) for file in documents.FILES},
}


def run(arguments: list[str] | None = None) -> int:
    """Rewrite the schemas, or print which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a schema is out of date")
    check = parser.parse_args(arguments).check
    written = {path: f"{json.dumps(make(), indent=2)}\n" for path, make in SCHEMAS.items()}
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{path.name} {'is out of date: run python ci/schemas.py' if check else 'written'}")
        if not check:
            path.write_text(written[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(run())
