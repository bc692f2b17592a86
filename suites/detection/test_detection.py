"""Tests the judge: it must catch and explain known-bad trainers, and accept known-good ones.

    pytest suites/detection
    pytest suites/detection -k averaging

One test is one trainer on one cell, with real ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.backend import Held
from plumbline.core.finding import diagnosis
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.subjects.load import load

EVERYBODY = Path(__file__).parent / "everybody.py"


def trials():
    """Return every trainer with each of its cells, as parameters."""
    found = load(str(EVERYBODY))
    import expect  # modules beside everybody.py can be imported after load()

    for trainer in found:
        expectation, file = trainer.train.expectation, trainer.train.expectation_file
        marks = [pytest.mark.xfail(strict=True, reason=expectation.unseen)] if expectation.unseen else []
        for cell, check in expectation.cells.items():
            values = (expectation, file, expect.cell_of(cell, trainer.name), check)
            yield pytest.param(*values, id=f"{file}-{trainer.name}-{cell.replace('/', '-')}", marks=marks)


@pytest.fixture(scope="session")
def pool():
    """One fork server for all trainers."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = Pool(str(EVERYBODY))
    yield opened
    opened.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("expectation", "file", "cell", "check"), list(trials()))
def test_detection(expectation, file, cell, check, pool, tmp_path, record_property, pytestconfig):
    settings = Settings(time_limit=60, store_above=pytestconfig.getoption("store_above"))
    findings = examine(pool, cell, tmp_path / "evidence", settings).findings
    bad = [finding for finding in findings if finding.outcome.is_bad]
    steps = [finding.step + 1 for finding in bad if finding.step is not None]
    record_property(
        "detection",
        {
            "family": file,
            "trainer": cell.subject,
            "cell": cell.id,
            "caught": bool(bad),
            "named": expectation.named(findings),
            "caused": expectation.caused(findings),
            "cause": named.cause if (named := diagnosis(findings)) else None,
            "nameless": not expectation.families,
            "unseen": expectation.unseen is not None,
            "steps": min(steps, default=None),
            "precision": cell.precision,
            "mesh": cell.backend if any(one.splits != {Held.SAMPLES} for one in cell.parallelism.dimensions) else None,
            "error": max(
                (f.error_x_noise / f.limit_x_noise for f in bad or findings if f.error_x_noise and f.limit_x_noise),
                default=None,
            ),
        },
    )
    mismatch = expectation.mismatch(findings, check)
    assert mismatch is None, mismatch
